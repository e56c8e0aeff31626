"""Gemma 1, 2 and 3: the embedding scaled by sqrt(hidden_size), norms that multiply by 1 + weight.

Gemma 2 has norms around attention and MLP, windows on every other layer, soft caps; Gemma 3 windows on five of six layers,
with a RoPE of their own, and a norm on each head of q and k.
"""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.model.families.reader import ConfigFields, Family, every_nth, plain_decoder, windows_of
from cacheblend_cli.model.families.rope_fields import rope_by_kind
from cacheblend_cli.model.spec import ModelSpec

FIELDS = {"attention_bias": "biases of the q, k, v and o projections"}
WINDOW_FIELDS = FIELDS | {
    "hidden_activation": "the MLP's activation",
    "query_pre_attn_scalar": "scores are divided by its root",
    "sliding_window": "how many tokens a layer with a window looks back over, itself included",
    "layer_types": "which layers have the window; null: by sliding_window_pattern",
    "final_logit_softcapping": "the soft cap of the logits; null: none",
}
FIELDS_2 = WINDOW_FIELDS | {"attn_logit_softcapping": "the soft cap of attention's scores; null: none"}
FIELDS_3 = WINDOW_FIELDS | {
    "sliding_window_pattern": "every how many layers one has no window; 6 where it is missing",
    "rope_local_base_freq": "RoPE's base in layers with a window",
}
AROUND = (
    ("attention_in", "input_layernorm"),
    ("attention_out", "post_attention_layernorm"),
    ("mlp_in", "pre_feedforward_layernorm"),
    ("mlp_out", "post_feedforward_layernorm"),
)
MISSING = {
    "max_position_embeddings": 8192, "num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
MISSING_2 = MISSING | {"num_key_value_heads": 4}
MISSING_3 = MISSING_2 | {
    "max_position_embeddings": 131072, "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 26, "num_attention_heads": 8,
}  # fmt: skip


def read(fields: ConfigFields) -> ModelSpec:
    values = fields.values
    if values.get("hidden_act") == "gelu":  # what the first releases said, and did not mean
        fields = ConfigFields(values | {"hidden_act": "gelu_pytorch_tanh"})
    return replace(_scaled(plain_decoder(fields, GEMMA.architectures[0], MISSING), fields), config=values)


def read_2(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields, GEMMA2.architectures[0], MISSING_2, activation="hidden_activation")
    cap = fields.optional_factor("attn_logit_softcapping", 50.0)
    final = fields.optional_factor("final_logit_softcapping", 30.0)
    types = fields.layer_types(spec.num_layers) or every_nth(spec.num_layers, 2)
    return replace(_around(spec, fields, types), attention_soft_cap=cap, logit_soft_cap=final)


def read_3(fields: ConfigFields) -> ModelSpec:
    plain = ConfigFields({k: v for k, v in fields.values.items() if k not in ("rope_parameters", "rope_scaling")})
    spec = plain_decoder(plain, GEMMA3.architectures[0], MISSING_3, activation="hidden_activation")
    pattern = fields.integer("sliding_window_pattern", 6)
    types = fields.layer_types(spec.num_layers) or every_nth(spec.num_layers, pattern)
    full, local = rope_by_kind(fields.values, spec.max_position_embeddings, spec.head_dim, 1000000.0, 10000.0)
    cap = fields.optional_factor("final_logit_softcapping", None)
    spec = replace(_around(spec, fields, types), logit_soft_cap=cap, qk_norm=True, config=fields.values)
    return replace(spec, rope=full, local_rope=local)


def _scaled(spec: ModelSpec, fields: ConfigFields) -> ModelSpec:
    bias = fields.flag("attention_bias")
    return replace(spec, embedding_scale=spec.hidden_size**0.5, norm_offset=1.0, qkv_bias=bias, o_bias=bias)


def _around(spec: ModelSpec, fields: ConfigFields, types: list[str]) -> ModelSpec:
    windows = windows_of(types, fields.optional_integer("sliding_window", 4096))
    scale = fields.integer("query_pre_attn_scalar", 256) ** -0.5
    return replace(_scaled(spec, fields), norms=AROUND, sliding_windows=windows, attention_scale=scale)


GEMMA = Family("gemma", ("GemmaForCausalLM", "GemmaModel"), FIELDS, read)
GEMMA2 = Family("gemma2", ("Gemma2ForCausalLM", "Gemma2Model"), FIELDS_2, read_2)
GEMMA3 = Family("gemma3_text", ("Gemma3ForCausalLM", "Gemma3TextModel"), FIELDS_3, read_3)
