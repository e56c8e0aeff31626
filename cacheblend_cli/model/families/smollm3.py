"""SmolLM3: a Llama whose every fourth layer has no RoPE, and where it is switched on, a window instead."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_of
from cacheblend_cli.model.families.values import wrong_value
from cacheblend_cli.model.spec import ModelSpec

FIELDS = {
    "attention_bias": "biases of the q, k, v and o projections",
    "mlp_bias": "biases of the gate, up and down projections",
    "no_rope_layers": "1 for a layer with RoPE, 0 for one without; null: by no_rope_layer_interval",
    "no_rope_layer_interval": "every how many layers one has no RoPE; 4 where it is missing",
    "use_sliding_window": "whether layers without RoPE have a window, where layer_types does not say",
    "sliding_window": "how many tokens a layer with a window looks back over, itself included",
    "layer_types": "which layers have the window",
    "max_window_layers": "left over from a Qwen2: says nothing here",
    "pretraining_tp": "how training was split over devices: the result is the same",
}
MISSING = {
    "max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2000000.0,
}  # fmt: skip


def read(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields, SMOLLM3.architectures[0], MISSING)
    rotated = fields.values.get("no_rope_layers")
    if rotated is None:
        every = fields.integer("no_rope_layer_interval", 4)
        rotated = [int((layer + 1) % every != 0) for layer in range(spec.num_layers)]
    if not isinstance(rotated, list) or len(rotated) != spec.num_layers or any(r not in (0, 1) for r in rotated):
        raise wrong_value("no_rope_layers", rotated, f"a list of {spec.num_layers} times 0 or 1")
    if not any(rotated):
        raise UsageError("no layer of this model has RoPE", "its tokens would have no places: check no_rope_layers")
    window = fields.optional_integer("sliding_window", None)
    switched_on = fields.flag("use_sliding_window") and window is not None
    types = fields.layer_types(spec.num_layers) or [
        "full_attention" if r or not switched_on else "sliding_attention" for r in rotated
    ]
    bias = fields.flag("attention_bias")
    return replace(
        spec,
        unrotated=tuple(layer for layer, r in enumerate(rotated) if not r),
        sliding_windows=windows_of(types, window),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
    )


SMOLLM3 = Family("smollm3", ("SmolLM3ForCausalLM", "SmolLM3Model"), FIELDS, read)
