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


def read_2(fields: ConfigFields) -> ModelSpec:
    return replace(_with_later_windows(plain_decoder(fields), fields), qkv_bias=True)


def read_3(fields: ConfigFields) -> ModelSpec:
    return replace(_with_later_windows(plain_decoder(fields), fields), qk_norm=True)


def read_vl(fields: ConfigFields) -> ModelSpec:
    return read_2(_of_text(fields))


def read_3_vl(fields: ConfigFields) -> ModelSpec:
    return replace(plain_decoder(_of_text(fields)), qk_norm=True)


def _with_later_windows(spec: ModelSpec, fields: ConfigFields) -> ModelSpec:
    """Return the spec with the window of each layer: by layer_types, else from layer max_window_layers on."""
    window = fields.optional_integer("sliding_window", 4096) if fields.flag("use_sliding_window") else None
    types = fields.layer_types(spec.num_layers)
    if types is None:
        first = spec.num_layers if window is None else fields.integer("max_window_layers", 28, least=0)
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(spec.num_layers)]
    return replace(spec, sliding_windows=windows_of(types, window))


def _of_text(fields: ConfigFields) -> ConfigFields:
    """Reduce multimodal RoPE to its form over text alone."""
    ropes = {name: fields.values[name] for name in ("rope_parameters", "rope_scaling") if name in fields.values}
    return fields.changed(**{name: _without_sections(rope) for name, rope in ropes.items()})


def _without_sections(rope: Any) -> Any:
    if not isinstance(rope, dict):
        return rope
    rest = {k: v for k, v in rope.items() if k not in ("mrope_section", "mrope_interleaved")}
    return rest | {name: "default" for name in ("type", "rope_type") if rest.get(name) == "mrope"}


_WINDOWS = ("use_sliding_window", "sliding_window", "layer_types", "max_window_layers")
_QWEN2 = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
_QWEN2_VL = {"max_position_embeddings": 32768, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
       "max_window_layers": 80}  # fmt: skip
FAMILIES = (
    Family("qwen2", ("Qwen2ForCausalLM", "Qwen2Model"), _WINDOWS, read_2, _QWEN2),
    Family("qwen3", ("Qwen3ForCausalLM", "Qwen3Model"), (*_WINDOWS, "attention_bias"), read_3, _QWEN2 | {"head_dim": 128}),
    Family("qwen2_vl_text", ("Qwen2VLTextModel",), _WINDOWS, read_vl, _QWEN2_VL),
    Family("qwen2_5_vl_text", ("Qwen2_5_VLTextModel",), _WINDOWS, read_vl, _QWEN2_VL),
    Family("qwen3_vl_text", ("Qwen3VLTextModel",), ("attention_bias",), read_3_vl,
           {"max_position_embeddings": 128000, "num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500000.0}),
)  # fmt: skip
