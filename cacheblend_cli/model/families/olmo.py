"""Norms behind attention and MLP and none before: OLMo 2 and 3, with one over all of q and all of k, and EXAONE 4, with one on each
head of q and k."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_by_pattern
from cacheblend_cli.model.families.rope_fields import rope_by_kind
from cacheblend_cli.model.spec import ModelSpec

WINDOW_FIELDS = ("sliding_window", "layer_types")
AFTER = (("attention_out", "post_attention_layernorm"), ("mlp_out", "post_feedforward_layernorm"))
MISSING = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
MISSING_EXAONE4 = MISSING | {"num_key_value_heads": 32}
THETA_3 = 500000.0


def read(fields: ConfigFields) -> ModelSpec:
    return replace(plain_decoder(fields, MISSING), norms=AFTER, qk_norm=True, qk_norm_over_all=True)


def read_3(fields: ConfigFields) -> ModelSpec:
    """Windows on three of four layers, which RoPE's scaling leaves alone."""
    spec = read(fields.without_rope())
    full, local = rope_by_kind(fields.values, spec.max_position_embeddings, spec.head_dim, THETA_3, THETA_3)
    windows = windows_by_pattern(fields, spec.num_layers, every=4)
    return replace(spec, sliding_windows=windows, rope=full, local_rope=local)


def read_exaone4(fields: ConfigFields) -> ModelSpec:
    """In the large one three of four layers have a window, and the others no RoPE."""
    spec = replace(plain_decoder(fields, MISSING_EXAONE4), norms=AFTER, qk_norm=True)
    if fields.optional_integer("sliding_window", 4096) is None:
        return spec
    windows = windows_by_pattern(fields, spec.num_layers, every=4)
    return replace(spec, sliding_windows=windows, unrotated=tuple(i for i, w in enumerate(windows) if w is None))


OLMO2 = Family("olmo2", ("Olmo2ForCausalLM", "Olmo2Model"), ("attention_bias",), read)
OLMO3 = Family("olmo3", ("Olmo3ForCausalLM", "Olmo3Model"), ("attention_bias", *WINDOW_FIELDS), read_3)
EXAONE4 = Family(
    "exaone4", ("Exaone4ForCausalLM", "Exaone4Model"), (*WINDOW_FIELDS, "sliding_window_pattern"), read_exaone4
)
