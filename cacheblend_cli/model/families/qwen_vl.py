"""The language models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL. Their RoPE over height, width and time is the plain one where
all tokens are text: the three places of a token are the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cacheblend_cli.model.families.qwen2 import WINDOW_FIELDS, later_windows
from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder
from cacheblend_cli.model.spec import ModelSpec

MISSING_2 = {
    "max_position_embeddings": 32768, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
}  # fmt: skip
MISSING_3 = {
    "max_position_embeddings": 128000, "num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500000.0,
}  # fmt: skip
LAST_WINDOW = {"max_window_layers": 80}


def read(fields: ConfigFields) -> ModelSpec:
    plain = _plain(fields)
    spec = plain_decoder(plain, QWEN2_VL.architectures[0], MISSING_2)
    windows = later_windows(ConfigFields(LAST_WINDOW | fields.values), spec.num_layers)
    return replace(spec, qkv_bias=True, sliding_windows=windows, config=fields.values)


def read_3(fields: ConfigFields) -> ModelSpec:
    spec, bias = plain_decoder(_plain(fields), QWEN3_VL.architectures[0], MISSING_3), fields.flag("attention_bias")
    return replace(spec, qk_norm=True, qkv_bias=bias, o_bias=bias, config=fields.values)


def _plain(fields: ConfigFields) -> ConfigFields:
    ropes = {name: fields.values[name] for name in ("rope_parameters", "rope_scaling") if name in fields.values}
    return ConfigFields(fields.values | {name: _without_sections(rope) for name, rope in ropes.items()})


def _without_sections(rope: Any) -> Any:
    if not isinstance(rope, dict):
        return rope
    rest = {k: v for k, v in rope.items() if k not in ("mrope_section", "mrope_interleaved")}
    return rest | {name: "default" for name in ("type", "rope_type") if rest.get(name) == "mrope"}


QWEN2_VL = Family("qwen2_vl_text", ("Qwen2VLTextModel",), WINDOW_FIELDS, read)
QWEN2_5_VL = Family("qwen2_5_vl_text", ("Qwen2_5_VLTextModel",), WINDOW_FIELDS, read)
QWEN3_VL = Family(
    "qwen3_vl_text", ("Qwen3VLTextModel",), {"attention_bias": "biases of the q, k, v and o projections"}, read_3
)
