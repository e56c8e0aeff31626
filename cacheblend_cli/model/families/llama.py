"""Llama 2, 3 and 3.x, and what calls itself one: TinyLlama, Vicuna, Yi, DeepSeek LLM and Coder, SmolLM 1 and 2, Falcon 3."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder
from cacheblend_cli.model.spec import ModelSpec

FIELDS = {
    "attention_bias": "biases of the q, k, v and o projections",
    "mlp_bias": "biases of the gate, up and down projections",
    "pretraining_tp": "how training was split over devices: the result is the same",
    "max_window_layers": "left over in models that were turned into Llamas: says nothing without a window",
}


def read(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields, LLAMA.architectures[0], {"max_position_embeddings": 2048})
    bias = fields.flag("attention_bias")
    return replace(spec, qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias"))


LLAMA = Family("llama", ("LlamaForCausalLM", "LlamaModel"), FIELDS, read)
