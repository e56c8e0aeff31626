"""Llamas: Llama 2, 3 and 3.x, and what calls itself one (TinyLlama, Vicuna, Yi, DeepSeek LLM and Coder, SmolLM 1 and 2, Falcon 3);
and Granite 3, Phi-3 and SmolLM3, each a Llama with a difference."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_of
from cacheblend_cli.model.families.values import shown, wrong_value
from cacheblend_cli.model.spec import ModelSpec

# pretraining_tp: how training was split over devices: the result is the same. max_window_layers: left over in models that
# were turned into Llamas: says nothing without a window.
FIELDS = ("attention_bias", "mlp_bias", "pretraining_tp", "max_window_layers")
GRANITE_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
SMOLLM3_FIELDS = (
    *FIELDS, "no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types",
)  # fmt: skip
MISSING = {"max_position_embeddings": 2048}
MISSING_PHI3 = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}
MISSING_SMOLLM3 = {
    "max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2000000.0,
}  # fmt: skip


def read(fields: ConfigFields) -> ModelSpec:
    return plain_decoder(fields, MISSING)


def read_granite(fields: ConfigFields) -> ModelSpec:
    """Factors on the embedding, on the scores, on what a layer adds and on the logits."""
    embedding, attention, residual, logits = (fields.factor(name, 1.0) for name in GRANITE_FACTORS)
    return replace(
        read(fields),
        embedding_scale=embedding,
        attention_scale=attention,  # in place of head_dim ** -0.5
        residual_scale=residual,
        logit_scale=1 / logits,
    )


def read_phi3(fields: ConfigFields) -> ModelSpec:
    """q, k, v and gate and up are one tensor each (Phi-3, 3.5 and 4), with longrope over a part of the head."""
    spec = plain_decoder(ConfigFields({"original_max_position_embeddings": 4096} | fields.values), MISSING_PHI3)
    if spec.rope["rope_type"] not in ("default", "longrope"):
        raise UsageError(f"RoPE of a phi3 is of type {shown(spec.rope['rope_type'])}", "known: default, longrope")
    windows = (fields.optional_integer("sliding_window", None),) * spec.num_layers
    return replace(spec, sliding_windows=windows, fused=("qkv_proj", "gate_up_proj"))


def read_smollm3(fields: ConfigFields) -> ModelSpec:
    """Every fourth layer has no RoPE, and where it is switched on, a window instead."""
    spec = plain_decoder(fields, MISSING_SMOLLM3)
    rotated = fields.values.get("no_rope_layers")  # 1 for a layer with RoPE, 0 for one without
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
    unrotated = tuple(layer for layer, r in enumerate(rotated) if not r)
    return replace(spec, unrotated=unrotated, sliding_windows=windows_of(types, window))


LLAMA = Family("llama", ("LlamaForCausalLM", "LlamaModel"), FIELDS, read)
GRANITE = Family(
    "granite", ("GraniteForCausalLM", "GraniteModel"), ("attention_bias", "mlp_bias", *GRANITE_FACTORS), read_granite
)
PHI3 = Family("phi3", ("Phi3ForCausalLM", "Phi3Model"), ("sliding_window", "resid_pdrop", "embd_pdrop"), read_phi3)
SMOLLM3 = Family("smollm3", ("SmolLM3ForCausalLM", "SmolLM3Model"), SMOLLM3_FIELDS, read_smollm3)
