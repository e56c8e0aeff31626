"""Qwen2 and Qwen2.5: a Llama with biases on q, k and v, and where it is switched on, a window on the later layers."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_of
from cacheblend_cli.model.spec import ModelSpec

WINDOW_FIELDS = {
    "use_sliding_window": "whether sliding_window counts",
    "sliding_window": "how many tokens a layer looks back over, itself included; 4096 where it is missing",
    "layer_types": "which layers have the window; null: those from max_window_layers on",
    "max_window_layers": "the first layer with a window, counted from 0; 28 where it is missing",
}
MISSING = {"max_position_embeddings": 32768, "num_key_value_heads": 32}


def read(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields, QWEN2.architectures[0], MISSING)
    return replace(spec, qkv_bias=True, sliding_windows=later_windows(fields, spec.num_layers))


def later_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer, of Qwen2 and Qwen3."""
    window = fields.optional_integer("sliding_window", 4096) if fields.flag("use_sliding_window") else None
    types = fields.layer_types(num_layers)
    if types is None:
        first = num_layers if window is None else fields.integer("max_window_layers", 28, least=0)
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    return windows_of(types, window)


QWEN2 = Family("qwen2", ("Qwen2ForCausalLM", "Qwen2Model"), WINDOW_FIELDS, read)
