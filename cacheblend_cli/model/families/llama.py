"""Llama 2, 3 and 3.x, models with a Llama config (TinyLlama, Vicuna, Yi, DeepSeek LLM and Coder, SmolLM 1 and 2, Falcon
3), and families that differ from it in a few fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_by_pattern, windows_of
from cacheblend_cli.model.families.rope_fields import rope_by_kind
from cacheblend_cli.model.families.values import shown, wrong_value
from cacheblend_cli.model.spec import ModelSpec

# pretraining_tp: how training was split over devices; the result is the same. max_window_layers: a leftover in models
# that were converted to Llamas; without a window it has no effect.
FIELDS = ("attention_bias", "mlp_bias", "pretraining_tp", "max_window_layers")


def read(fields: ConfigFields) -> ModelSpec:
    return plain_decoder(fields, {"max_position_embeddings": 2048})


LLAMA = Family("llama", ("LlamaForCausalLM", "LlamaModel"), FIELDS, read)

# Granite 3: factors on the embedding, the scores, the output of each layer and the logits.

FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def read_granite(fields: ConfigFields) -> ModelSpec:
    embedding, attention, residual, logits = (fields.factor(name, 1.0) for name in FACTORS)
    return replace(
        read(fields),
        embedding_scale=embedding,
        attention_scale=attention,  # in place of head_dim ** -0.5
        residual_scale=residual,
        logit_scale=1 / logits,
    )


GRANITE = Family(
    "granite", ("GraniteForCausalLM", "GraniteModel"), ("attention_bias", "mlp_bias", *FACTORS), read_granite
)

# SmolLM3: no RoPE in every fourth layer and, if switched on, a window in those layers.

SMOLLM3_FIELDS = (
    *FIELDS, "no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types",
)  # fmt: skip
SMOLLM3_MISSING = {
    "max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2000000.0,
}  # fmt: skip


def read_smollm3(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields, SMOLLM3_MISSING)
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


SMOLLM3 = Family("smollm3", ("SmolLM3ForCausalLM", "SmolLM3Model"), SMOLLM3_FIELDS, read_smollm3)

# Phi-3, 3.5 and 4: fused q, k, v and fused gate and up, and longrope over a part of the head.

PHI3_MISSING = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}


def read_phi3(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(ConfigFields({"original_max_position_embeddings": 4096} | fields.values), PHI3_MISSING)
    if spec.rope["rope_type"] not in ("default", "longrope"):
        raise UsageError(f"RoPE of a phi3 is of type {shown(spec.rope['rope_type'])}", "known: default, longrope")
    windows = (fields.optional_integer("sliding_window", None),) * spec.num_layers
    return replace(spec, sliding_windows=windows, fused=("qkv_proj", "gate_up_proj"))


PHI3 = Family("phi3", ("Phi3ForCausalLM", "Phi3Model"), ("sliding_window", "resid_pdrop", "embd_pdrop"), read_phi3)

# GLM-4: RoPE rotates neighbouring channels of half of a head; since 0414 (glm4) norms around attention and MLP.

GLM_AROUND = (
    ("attention_in", "input_layernorm"),
    ("attention_out", "post_self_attn_layernorm"),
    ("mlp_in", "post_attention_layernorm"),
    ("mlp_out", "post_mlp_layernorm"),
)
GLM_MISSING = {
    "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 0.00000015625,
    "partial_rotary_factor": 0.5, "attention_bias": True,
}  # fmt: skip


def read_glm(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields, GLM_MISSING)
    # attention_bias applies to q, k and v only
    return replace(spec, interleaved=True, fused=("gate_up_proj",), o_bias=False)


def read_glm4(fields: ConfigFields) -> ModelSpec:
    return replace(read_glm(fields), norms=GLM_AROUND)


GLM = Family("glm", ("GlmForCausalLM", "GlmModel"), ("attention_bias",), read_glm)
GLM4 = Family("glm4", ("Glm4ForCausalLM", "Glm4Model"), ("attention_bias",), read_glm4)

# OLMo 2 and 3: norms after attention and MLP instead of before, and norms over all of q and all of k. OLMo 3 has
# windows on three of four layers; its RoPE scaling does not apply to them.

AFTER = (("attention_out", "post_attention_layernorm"), ("mlp_out", "post_feedforward_layernorm"))
OLMO_MISSING = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
OLMO3_THETA = 500000.0


def read_olmo2(fields: ConfigFields) -> ModelSpec:
    return replace(plain_decoder(fields, OLMO_MISSING), norms=AFTER, qk_norm=True, qk_norm_over_all=True)


def read_olmo3(fields: ConfigFields) -> ModelSpec:
    spec = read_olmo2(fields.without_rope())
    full, local = rope_by_kind(fields.values, spec.max_position_embeddings, spec.head_dim, OLMO3_THETA, OLMO3_THETA)
    windows = windows_by_pattern(fields, spec.num_layers, every=4)
    return replace(spec, sliding_windows=windows, rope=full, local_rope=local)


OLMO2 = Family("olmo2", ("Olmo2ForCausalLM", "Olmo2Model"), ("attention_bias",), read_olmo2)
OLMO3 = Family(
    "olmo3", ("Olmo3ForCausalLM", "Olmo3Model"), ("attention_bias", "sliding_window", "layer_types"), read_olmo3
)

# EXAONE 4: norms after attention and MLP, and on each head of q and k. In the large model three of four layers have a
# window, and the others have no RoPE.

EXAONE4_FIELDS = ("sliding_window", "sliding_window_pattern", "layer_types")
EXAONE4_MISSING = {"max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5}


def read_exaone4(fields: ConfigFields) -> ModelSpec:
    spec = replace(plain_decoder(fields, EXAONE4_MISSING), norms=AFTER, qk_norm=True)
    if fields.optional_integer("sliding_window", 4096) is None:
        return spec
    return _rotated_in_windows(spec, windows_by_pattern(fields, spec.num_layers, every=4))


EXAONE4 = Family("exaone4", ("Exaone4ForCausalLM", "Exaone4Model"), EXAONE4_FIELDS, read_exaone4)

# Command R (Cohere) and Command R7B, A (Cohere 2): LayerNorms without biases, parallel attention and MLP, RoPE over
# neighbouring channels, scaled logits. In Cohere 2 three of four layers have a window, and the others have no RoPE.

COHERE_FIELDS = ("layer_norm_eps", "logit_scale", "attention_bias")
COHERE2_FIELDS = (*COHERE_FIELDS, "sliding_window", "layer_types", "sliding_window_pattern")
COHERE_MISSING = {
    "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500000.0,
}  # fmt: skip
COHERE2_MISSING = COHERE_MISSING | {"rope_theta": 10000.0}


def read_cohere(fields: ConfigFields, missing: Mapping[str, Any] = COHERE_MISSING) -> ModelSpec:
    spec = plain_decoder(fields, missing, eps="layer_norm_eps")
    scale = fields.factor("logit_scale", 0.0625)
    return replace(spec, norms=spec.norms[:1], parallel=True, layer_norm=True, interleaved=True, logit_scale=scale)


def read_cohere2(fields: ConfigFields) -> ModelSpec:
    spec = read_cohere(fields, COHERE2_MISSING)
    return _rotated_in_windows(spec, windows_by_pattern(fields, spec.num_layers, every=4))


def _rotated_in_windows(spec: ModelSpec, windows: tuple[int | None, ...]) -> ModelSpec:
    """Return the spec with these windows; layers without one have no RoPE."""
    unrotated = tuple(layer for layer, window in enumerate(windows) if window is None)
    return replace(spec, sliding_windows=windows, unrotated=unrotated)


COHERE = Family("cohere", ("CohereForCausalLM", "CohereModel"), COHERE_FIELDS, read_cohere)
COHERE2 = Family("cohere2", ("Cohere2ForCausalLM", "Cohere2Model"), COHERE2_FIELDS, read_cohere2)

# StableLM: LayerNorms with biases, RoPE over a quarter of the head; by its config parallel attention and MLP.

STABLELM_FIELDS = ("layer_norm_eps", "use_qkv_bias", "use_parallel_residual", "hidden_dropout")
STABLELM_MISSING = {
    "max_position_embeddings": 4096, "num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25,
}  # fmt: skip


def read_stablelm(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields, STABLELM_MISSING, eps="layer_norm_eps")
    parallel = fields.flag("use_parallel_residual")
    return replace(
        spec,
        norms=spec.norms[:1] if parallel else spec.norms,
        parallel=parallel,
        layer_norm=True,
        norm_bias=True,
        qkv_bias=fields.flag("use_qkv_bias"),
    )


STABLELM = Family("stablelm", ("StableLmForCausalLM", "StableLmModel"), STABLELM_FIELDS, read_stablelm)

# StarCoder 2: LayerNorms with biases, biases everywhere, an MLP without a gate, and one window for all layers.

STARCODER2_FIELDS = ("norm_epsilon", "use_bias", "sliding_window", "residual_dropout", "embedding_dropout")
STARCODER2_MISSING = {
    "max_position_embeddings": 4096, "num_key_value_heads": 2, "tie_word_embeddings": True, "norm_epsilon": 1e-5,
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip


def read_starcoder2(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields, STARCODER2_MISSING, eps="norm_epsilon")
    bias, window = fields.flag("use_bias", True), fields.optional_integer("sliding_window", None)
    return replace(
        spec,
        sliding_windows=(window,) * spec.num_layers,
        layer_norm=True,
        norm_bias=True,
        gated_mlp=False,
        renamed=(("up_proj", "mlp.c_fc"), ("down_proj", "mlp.c_proj")),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


STARCODER2 = Family("starcoder2", ("Starcoder2ForCausalLM", "Starcoder2Model"), STARCODER2_FIELDS, read_starcoder2)
