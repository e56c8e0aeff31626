"""Qwen2, 2.5 and 3, and the language models of Qwen2-VL, 2.5-VL and 3-VL.

Qwen2 is a Llama with biases on q, k and v and, if switched on, a window on the later layers. Qwen3 has a norm on each
head of q and k, and biases if the config says so. The VL models' RoPE over height, width and time equals plain RoPE
when all tokens are text: the three positions of a token are the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_of
from cacheblend_cli.model.spec import ModelSpec

WINDOW_FIELDS = ("use_sliding_window", "sliding_window", "layer_types", "max_window_layers")
MISSING = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
MISSING_3 = MISSING | {"head_dim": 128}
MISSING_VL = {
    "max_position_embeddings": 32768, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
}  # fmt: skip
MISSING_3_VL = {
    "max_position_embeddings": 128000, "num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500000.0,
}  # fmt: skip


def read_2(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields, MISSING)
    return replace(spec, qkv_bias=True, sliding_windows=_later_windows(fields, spec.num_layers, first=28))


def read_3(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields, MISSING_3)
    return replace(spec, qk_norm=True, sliding_windows=_later_windows(fields, spec.num_layers, first=28))


def read_vl(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(_of_text(fields), MISSING_VL)
    return replace(spec, qkv_bias=True, sliding_windows=_later_windows(fields, spec.num_layers, first=80))


def read_3_vl(fields: ConfigFields) -> ModelSpec:
    return replace(plain_decoder(_of_text(fields), MISSING_3_VL), qk_norm=True)


def _later_windows(fields: ConfigFields, num_layers: int, first: int) -> tuple[int | None, ...]:
    """Return the window of each layer: by layer_types, else from layer max_window_layers (default `first`) on."""
    window = fields.optional_integer("sliding_window", 4096) if fields.flag("use_sliding_window") else None
    types = fields.layer_types(num_layers)
    if types is None:
        first = num_layers if window is None else fields.integer("max_window_layers", first, least=0)
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    return windows_of(types, window)


def _of_text(fields: ConfigFields) -> ConfigFields:
    """Reduce multimodal RoPE to its form over text alone."""
    ropes = {name: fields.values[name] for name in ("rope_parameters", "rope_scaling") if name in fields.values}
    return ConfigFields(fields.values | {name: _without_sections(rope) for name, rope in ropes.items()})


def _without_sections(rope: Any) -> Any:
    if not isinstance(rope, dict):
        return rope
    rest = {k: v for k, v in rope.items() if k not in ("mrope_section", "mrope_interleaved")}
    return rest | {name: "default" for name in ("type", "rope_type") if rest.get(name) == "mrope"}


QWEN2 = Family("qwen2", ("Qwen2ForCausalLM", "Qwen2Model"), WINDOW_FIELDS, read_2)
QWEN3 = Family("qwen3", ("Qwen3ForCausalLM", "Qwen3Model"), (*WINDOW_FIELDS, "attention_bias"), read_3)
QWEN2_VL = Family("qwen2_vl_text", ("Qwen2VLTextModel",), WINDOW_FIELDS, read_vl)
QWEN2_5_VL = Family("qwen2_5_vl_text", ("Qwen2_5_VLTextModel",), WINDOW_FIELDS, read_vl)
QWEN3_VL = Family("qwen3_vl_text", ("Qwen3VLTextModel",), ("attention_bias",), read_3_vl)
