"""SmolLM3: a Llama with no RoPE in every fourth layer and, if switched on, a window in those layers."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_of
from cacheblend_cli.model.families.values import wrong_value
from cacheblend_cli.model.spec import ModelSpec

# max_window_layers (a leftover from Qwen2) and pretraining_tp have no effect here.
FIELDS = (
    "attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window",
    "layer_types", "max_window_layers", "pretraining_tp",
)  # fmt: skip
MISSING = {
    "max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2000000.0,
}  # fmt: skip


def read(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields, MISSING)
    rotated = fields.values.get("no_rope_layers")  # 1 for a layer with RoPE, 0 for one without
    if rotated is None:
        every = fields.integer("no_rope_layer_interval", 4)
        rotated = [int((layer + 1) % every != 0) for layer in range(spec.num_layers)]
    if not isinstance(rotated, list) or len(rotated) != spec.num_layers or any(r not in (0, 1) for r in rotated):
        raise wrong_value("no_rope_layers", rotated, f"a list of {spec.num_layers} times 0 or 1")
    if not any(rotated):
        raise UsageError("no layer of this model has RoPE", "its tokens would have no positions: check no_rope_layers")
    window = fields.optional_integer("sliding_window", None)
    switched_on = fields.flag("use_sliding_window") and window is not None
    types = fields.layer_types(spec.num_layers) or [
        "full_attention" if r or not switched_on else "sliding_attention" for r in rotated
    ]
    unrotated = tuple(layer for layer, r in enumerate(rotated) if not r)
    return replace(spec, unrotated=unrotated, sliding_windows=windows_of(types, window))


SMOLLM3 = Family("smollm3", ("SmolLM3ForCausalLM", "SmolLM3Model"), FIELDS, read)
