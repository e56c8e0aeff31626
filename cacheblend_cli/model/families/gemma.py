"""Gemma 1, 2 and 3: the embedding scaled by sqrt(hidden_size), norms that multiply by 1 + weight.

Gemma 2 has norms around attention and MLP, windows on every other layer, and soft caps. Gemma 3 has windows on five of
six layers, with a separate RoPE, and a norm on each head of q and k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_by_pattern
from cacheblend_cli.model.families.rope_fields import rope_by_kind
from cacheblend_cli.model.spec import ModelSpec

FIELDS = ("attention_bias",)
WINDOW_FIELDS = (
    *FIELDS, "hidden_activation", "query_pre_attn_scalar", "sliding_window", "layer_types", "final_logit_softcapping",
)  # fmt: skip
FIELDS_2 = (*WINDOW_FIELDS, "attn_logit_softcapping")
FIELDS_3 = (*WINDOW_FIELDS, "sliding_window_pattern", "rope_local_base_freq")
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
    if fields.values.get("hidden_act") == "gelu":  # the first releases say gelu but mean gelu_pytorch_tanh
        fields = ConfigFields(fields.values | {"hidden_act": "gelu_pytorch_tanh"})
    return _scaled(plain_decoder(fields, MISSING))


def read_2(fields: ConfigFields) -> ModelSpec:
    spec = _around(fields, MISSING_2, every=2)
    cap = fields.optional_factor("attn_logit_softcapping", 50.0)
    return replace(spec, attention_soft_cap=cap, logit_soft_cap=fields.optional_factor("final_logit_softcapping", 30.0))


def read_3(fields: ConfigFields) -> ModelSpec:
    spec = _around(fields.without_rope(), MISSING_3, every=6)
    full, local = rope_by_kind(fields.values, spec.max_position_embeddings, spec.head_dim, 1000000.0, 10000.0)
    cap = fields.optional_factor("final_logit_softcapping", None)
    return replace(spec, logit_soft_cap=cap, qk_norm=True, rope=full, local_rope=local)


def _scaled(spec: ModelSpec) -> ModelSpec:
    return replace(spec, embedding_scale=spec.hidden_size**0.5, norm_offset=1.0)


def _around(fields: ConfigFields, missing: Mapping[str, Any], every: int) -> ModelSpec:
    spec = _scaled(plain_decoder(fields, missing, activation="hidden_activation"))
    windows = windows_by_pattern(fields, spec.num_layers, every)
    scale = fields.integer("query_pre_attn_scalar", 256) ** -0.5
    return replace(spec, norms=AROUND, sliding_windows=windows, attention_scale=scale)


GEMMA = Family("gemma", ("GemmaForCausalLM", "GemmaModel"), FIELDS, read)
GEMMA2 = Family("gemma2", ("Gemma2ForCausalLM", "Gemma2Model"), FIELDS_2, read_2)
GEMMA3 = Family("gemma3_text", ("Gemma3ForCausalLM", "Gemma3TextModel"), FIELDS_3, read_3)
