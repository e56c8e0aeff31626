"""OLMo 2 and 3: norms behind attention and MLP and none before, and one over all of q and all of k. OLMo 3 has windows on
three of four layers, which its RoPE's scaling leaves alone."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.model.families.reader import ConfigFields, Family, every_nth, plain_decoder, windows_of
from cacheblend_cli.model.families.rope_fields import rope_by_kind
from cacheblend_cli.model.spec import ModelSpec

FIELDS = {"attention_bias": "biases of the q, k, v and o projections"}
FIELDS_3 = FIELDS | {
    "sliding_window": "how many tokens a layer with a window looks back over, itself included",
    "layer_types": "which layers have the window; null: all but every fourth",
}
AFTER = (("attention_out", "post_attention_layernorm"), ("mlp_out", "post_feedforward_layernorm"))
MISSING = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
THETA_3 = 500000.0


def read(fields: ConfigFields) -> ModelSpec:
    return _after(plain_decoder(fields, OLMO2.architectures[0], MISSING), fields)


def read_3(fields: ConfigFields) -> ModelSpec:
    plain = ConfigFields({k: v for k, v in fields.values.items() if k not in ("rope_parameters", "rope_scaling")})
    spec = _after(plain_decoder(plain, OLMO3.architectures[0], MISSING), fields)
    types = fields.layer_types(spec.num_layers) or every_nth(spec.num_layers, 4)
    full, local = rope_by_kind(fields.values, spec.max_position_embeddings, spec.head_dim, THETA_3, THETA_3)
    windows = windows_of(types, fields.optional_integer("sliding_window", 4096))
    return replace(spec, sliding_windows=windows, rope=full, local_rope=local, config=fields.values)


def _after(spec: ModelSpec, fields: ConfigFields) -> ModelSpec:
    bias = fields.flag("attention_bias")
    return replace(spec, norms=AFTER, qk_norm=True, qk_norm_over_all=True, qkv_bias=bias, o_bias=bias)


OLMO2 = Family("olmo2", ("Olmo2ForCausalLM", "Olmo2Model"), FIELDS, read)
OLMO3 = Family("olmo3", ("Olmo3ForCausalLM", "Olmo3Model"), FIELDS_3, read_3)
