"""Qwen3: a Llama with a norm on each head of q and k, biases where the config says so, and Qwen2's windows."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.model.families.qwen2 import MISSING as QWEN2_MISSING
from cacheblend_cli.model.families.qwen2 import WINDOW_FIELDS, later_windows
from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder
from cacheblend_cli.model.spec import ModelSpec

FIELDS = WINDOW_FIELDS | {"attention_bias": "biases of the q, k, v and o projections"}
MISSING = QWEN2_MISSING | {"head_dim": 128}


def read(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields, QWEN3.architectures[0], MISSING)
    bias, windows = fields.flag("attention_bias"), later_windows(fields, spec.num_layers)
    return replace(spec, qk_norm=True, qkv_bias=bias, o_bias=bias, sliding_windows=windows)


QWEN3 = Family("qwen3", ("Qwen3ForCausalLM", "Qwen3Model"), FIELDS, read)
