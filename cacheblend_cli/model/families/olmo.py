"""OLMo 2 and 3: norms after attention and MLP instead of before, and norms over all of q and all of k. OLMo 3 has
windows on three of four layers; its RoPE scaling does not apply to them."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_by_pattern
from cacheblend_cli.model.families.rope_fields import rope_by_kind
from cacheblend_cli.model.spec import ModelSpec

AFTER = (("attention_out", "post_attention_layernorm"), ("mlp_out", "post_feedforward_layernorm"))
MISSING = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
THETA_3 = 500000.0


def read(fields: ConfigFields) -> ModelSpec:
    return replace(plain_decoder(fields, MISSING), norms=AFTER, qk_norm=True, qk_norm_over_all=True)


def read_3(fields: ConfigFields) -> ModelSpec:
    spec = read(fields.without_rope())
    full, local = rope_by_kind(fields.values, spec.max_position_embeddings, spec.head_dim, THETA_3, THETA_3)
    windows = windows_by_pattern(fields, spec.num_layers, every=4)
    return replace(spec, sliding_windows=windows, rope=full, local_rope=local)


OLMO2 = Family("olmo2", ("Olmo2ForCausalLM", "Olmo2Model"), ("attention_bias",), read)
OLMO3 = Family("olmo3", ("Olmo3ForCausalLM", "Olmo3Model"), ("attention_bias", "sliding_window", "layer_types"), read_3)
