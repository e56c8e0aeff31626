"""EXAONE 4: norms after attention and MLP, and on each head of q and k. In the large model three of four layers have a
window, and the others have no RoPE."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.model.families.olmo import AFTER
from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_by_pattern
from cacheblend_cli.model.spec import ModelSpec

FIELDS = ("sliding_window", "sliding_window_pattern", "layer_types")
MISSING = {"max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5}


def read(fields: ConfigFields) -> ModelSpec:
    spec = replace(plain_decoder(fields, MISSING), norms=AFTER, qk_norm=True)
    if fields.optional_integer("sliding_window", 4096) is None:
        return spec
    windows = windows_by_pattern(fields, spec.num_layers, every=4)
    return replace(spec, sliding_windows=windows, unrotated=tuple(i for i, w in enumerate(windows) if w is None))


EXAONE4 = Family("exaone4", ("Exaone4ForCausalLM", "Exaone4Model"), FIELDS, read)
