"""Llama 2, 3 and 3.x, and models with a Llama config: TinyLlama, Vicuna, Yi, DeepSeek LLM and Coder, SmolLM 1 and 2,
Falcon 3."""

from __future__ import annotations

from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder
from cacheblend_cli.model.spec import ModelSpec

# pretraining_tp: how training was split over devices; the result is the same. max_window_layers: a leftover in models
# that were converted to Llamas; without a window it has no effect.
FIELDS = ("attention_bias", "mlp_bias", "pretraining_tp", "max_window_layers")


def read(fields: ConfigFields) -> ModelSpec:
    return plain_decoder(fields, {"max_position_embeddings": 2048})


LLAMA = Family("llama", ("LlamaForCausalLM", "LlamaModel"), FIELDS, read)
