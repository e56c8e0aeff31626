"""EXAONE 4: norms behind attention and MLP, a norm on each head of q and k; in the large one three of four layers have a
window, and the others no RoPE."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.model.families.olmo import AFTER
from cacheblend_cli.model.families.reader import ConfigFields, Family, every_nth, plain_decoder, windows_of
from cacheblend_cli.model.spec import ModelSpec

FIELDS = {
    "sliding_window": "how many tokens a layer with a window looks back over, itself included; null: no layer has one",
    "sliding_window_pattern": "every how many layers one has no window; 4 where it is missing",
    "layer_types": "which layers have the window; null: by sliding_window_pattern",
}
MISSING = {"max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5}


def read(fields: ConfigFields) -> ModelSpec:
    spec = replace(plain_decoder(fields, EXAONE4.architectures[0], MISSING), norms=AFTER, qk_norm=True)
    window = fields.optional_integer("sliding_window", 4096)
    if window is None:
        return spec
    types = fields.layer_types(spec.num_layers)
    if types is None:
        types = every_nth(spec.num_layers, fields.integer("sliding_window_pattern", 4))
    windows = windows_of(types, window)
    return replace(spec, sliding_windows=windows, unrotated=tuple(i for i, w in enumerate(windows) if w is None))


EXAONE4 = Family("exaone4", ("Exaone4ForCausalLM", "Exaone4Model"), FIELDS, read)
