"""Llama 2, 3 and 3.x, models with a Llama config (TinyLlama, Vicuna, Yi, DeepSeek LLM and Coder, SmolLM 1 and 2, Falcon
3), and families that differ from it in a few fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_by_pattern, windows_of
from cacheblend_cli.model.families.rope_fields import rope_by_kind
from cacheblend_cli.model.families.values import is_number, shown, wrong_value
from cacheblend_cli.model.spec import QUERY_GROWTH, ModelSpec

# pretraining_tp: how training was split over devices; the result is the same. max_window_layers: a leftover in models
# that were converted to Llamas; without a window it has no effect.
FIELDS = ("attention_bias", "mlp_bias", "pretraining_tp", "max_window_layers")
FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
AFTER = (("attention_out", "post_attention_layernorm"), ("mlp_out", "post_feedforward_layernorm"))
GLM_AROUND = (
    ("attention_in", "input_layernorm"),
    ("attention_out", "post_self_attn_layernorm"),
    ("mlp_in", "post_attention_layernorm"),
    ("mlp_out", "post_mlp_layernorm"),
)
OLMO3_THETA = 500000.0
MINISTRAL3_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, QUERY_GROWTH: 0.1,
}  # fmt: skip


def read_granite(fields: ConfigFields) -> ModelSpec:
    """Granite 3: factors on the embedding, the scores, the output of each layer and the logits."""
    embedding, attention, residual, logits = (fields.factor(name, 1.0) for name in FACTORS)
    spec = replace(plain_decoder(fields), attention_scale=attention)  # in place of head_dim ** -0.5
    return replace(spec, embedding_scale=embedding, residual_scale=residual, logit_scale=1 / logits)


def read_mistral(fields: ConfigFields) -> ModelSpec:
    """Mistral: a Llama without biases and with one window for all layers."""
    return _with_one_window(plain_decoder(fields), fields)


def read_ministral(fields: ConfigFields) -> ModelSpec:
    """Ministral: a Mistral with a window on some layers. transformers treats a Mistral config with `layer_types` as
    one, and so does `families.family_of`."""
    spec = read_mistral(fields)
    types = fields.layer_types(spec.num_layers)
    return spec if types is None else replace(spec, sliding_windows=windows_of(types, spec.sliding_windows[0]))


def read_ministral3(fields: ConfigFields) -> ModelSpec:
    """Ministral 3: queries grow with their positions. The growth is one of RoPE's parameters, in config.json and in the
    spec."""
    written = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    rope = fields.values.get(written) or MINISTRAL3_ROPE
    if not isinstance(rope, dict):
        raise wrong_value(written, rope, "an object or null")
    own = {k: v for k, v in rope.items() if k not in (QUERY_GROWTH, "max_position_embeddings")}
    spec = plain_decoder(fields.changed(**{written: own}))
    beta: Any = rope.get(QUERY_GROWTH)
    if not is_number(beta) or beta < 0:
        raise wrong_value(QUERY_GROWTH, beta, "a number of 0 or more")
    if not spec.rope.get("original_max_position_embeddings"):
        raise UsageError(
            f"{written} in config.json lack original_max_position_embeddings, which {QUERY_GROWTH} needs",
            "correct config.json, or fetch the checkpoint again",
        )
    return _with_one_window(replace(spec, rope=spec.rope | {QUERY_GROWTH: float(beta)}), fields)


def read_smollm3(fields: ConfigFields) -> ModelSpec:
    """SmolLM3: no RoPE in every fourth layer and, if switched on, a window in those layers."""
    spec = plain_decoder(fields)
    rotated = fields.values.get("no_rope_layers")  # 1 for a layer with RoPE, 0 for one without
    if rotated is None:
        every = fields.integer("no_rope_layer_interval", 4)
        rotated = [int((layer + 1) % every != 0) for layer in range(spec.num_layers)]
    if not isinstance(rotated, list) or len(rotated) != spec.num_layers or any(r not in (0, 1) for r in rotated):
        raise wrong_value("no_rope_layers", rotated, f"a list of {spec.num_layers} values 0 or 1")
    if not any(rotated):
        raise UsageError("no layer of this model has RoPE", "its tokens would have no positions: check no_rope_layers")
    window = fields.optional_integer("sliding_window")
    switched_on = fields.flag("use_sliding_window") and window is not None
    types = fields.layer_types(spec.num_layers) or [
        "full_attention" if r or not switched_on else "sliding_attention" for r in rotated
    ]
    unrotated = tuple(layer for layer, r in enumerate(rotated) if not r)
    return replace(spec, unrotated=unrotated, sliding_windows=windows_of(types, window))


def read_phi3(fields: ConfigFields) -> ModelSpec:
    """Phi-3, 3.5 and 4: fused q, k and v and fused gate and up, and longrope over a part of the head."""
    original = fields.value("original_max_position_embeddings", 4096)
    spec = plain_decoder(fields.changed(original_max_position_embeddings=original))
    if spec.rope["rope_type"] not in ("default", "longrope"):
        raise UsageError(f"RoPE of a phi3 is of type {shown(spec.rope['rope_type'])}", "known: default, longrope")
    return replace(_with_one_window(spec, fields), fused=("qkv_proj", "gate_up_proj"))


def read_glm(fields: ConfigFields) -> ModelSpec:
    """GLM-4: RoPE rotates neighbouring channels of half of a head."""
    # attention_bias applies to q, k and v only
    return replace(plain_decoder(fields), interleaved=True, fused=("gate_up_proj",), o_bias=False)


def read_glm4(fields: ConfigFields) -> ModelSpec:
    """GLM-4 since 0414: norms around attention and MLP."""
    return replace(read_glm(fields), norms=GLM_AROUND)


def read_olmo2(fields: ConfigFields) -> ModelSpec:
    """OLMo 2: norms after attention and MLP instead of before, and norms over all of q and all of k."""
    return replace(plain_decoder(fields), norms=AFTER, qk_norm=True, qk_norm_over_all=True)


def read_olmo3(fields: ConfigFields) -> ModelSpec:
    """OLMo 3: windows on three of four layers, to which the RoPE scaling does not apply."""
    spec = read_olmo2(fields.without_rope())
    full, local = rope_by_kind(fields.values, spec.max_position_embeddings, spec.head_dim, OLMO3_THETA, OLMO3_THETA)
    windows = windows_by_pattern(fields, spec.num_layers, every=4)
    return replace(spec, sliding_windows=windows, rope=full, local_rope=local)


def read_exaone4(fields: ConfigFields) -> ModelSpec:
    """EXAONE 4: norms after attention and MLP, and on each head of q and k. In the large model three of four layers
    have a window, and the others have no RoPE."""
    spec = replace(plain_decoder(fields), norms=AFTER, qk_norm=True)
    return spec if fields.optional_integer("sliding_window", 4096) is None else _rotated_in_windows(spec, fields)


def read_cohere(fields: ConfigFields) -> ModelSpec:
    """Command R (Cohere): LayerNorms without biases, parallel attention and MLP, RoPE over neighbouring channels,
    scaled logits."""
    spec, scale = plain_decoder(fields, eps="layer_norm_eps"), fields.factor("logit_scale", 0.0625)
    return replace(spec, norms=spec.norms[:1], parallel=True, layer_norm=True, interleaved=True, logit_scale=scale)


def read_cohere2(fields: ConfigFields) -> ModelSpec:
    """Command R7B and A (Cohere 2): three of four layers have a window, and the others have no RoPE."""
    return _rotated_in_windows(read_cohere(fields), fields)


def read_stablelm(fields: ConfigFields) -> ModelSpec:
    """StableLM: LayerNorms with biases, RoPE over a quarter of the head; by its config parallel attention and MLP."""
    spec, parallel = plain_decoder(fields, eps="layer_norm_eps"), fields.flag("use_parallel_residual")
    spec = replace(spec, layer_norm=True, norm_bias=True, qkv_bias=fields.flag("use_qkv_bias"))
    return replace(spec, norms=spec.norms[:1] if parallel else spec.norms, parallel=parallel)


def read_starcoder2(fields: ConfigFields) -> ModelSpec:
    """StarCoder 2: LayerNorms with biases, biases everywhere, an MLP without a gate, and one window for all layers."""
    spec, bias = plain_decoder(fields, eps="norm_epsilon"), fields.flag("use_bias", True)
    spec = replace(_with_one_window(spec, fields), qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    renamed = ("up_proj", "mlp.c_fc"), ("down_proj", "mlp.c_proj")
    return replace(spec, layer_norm=True, norm_bias=True, gated_mlp=False, renamed=renamed)


def _with_one_window(spec: ModelSpec, fields: ConfigFields) -> ModelSpec:
    return replace(spec, sliding_windows=(fields.optional_integer("sliding_window"),) * spec.num_layers)


def _rotated_in_windows(spec: ModelSpec, fields: ConfigFields) -> ModelSpec:
    """Return the spec with windows on three of four layers; layers without one have no RoPE."""
    windows = windows_by_pattern(fields, spec.num_layers, every=4)
    unrotated = tuple(layer for layer, window in enumerate(windows) if window is None)
    return replace(spec, sliding_windows=windows, unrotated=unrotated)


_GLM = {
    "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 0.00000015625,
    "partial_rotary_factor": 0.5, "attention_bias": True,
}  # fmt: skip
_OLMO = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
_COHERE = {"max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500000.0}
_MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
FAMILIES = (
    Family("llama", ("LlamaForCausalLM", "LlamaModel"), FIELDS, plain_decoder, {"max_position_embeddings": 2048}),
    Family("granite", ("GraniteForCausalLM", "GraniteModel"), ("attention_bias", "mlp_bias", *FACTORS), read_granite,
           {"max_position_embeddings": 2048}),
    # max_window_layers is a leftover from Qwen2 without effect here
    Family("ministral", ("MinistralForCausalLM", "MinistralModel", "MistralForCausalLM", "MistralModel"),
           ("sliding_window", "max_window_layers", "layer_types"), read_ministral, _MISTRAL),
    Family("mistral", ("MistralForCausalLM", "MistralModel"), ("sliding_window", "max_window_layers"), read_mistral, _MISTRAL),
    Family("ministral3", ("Ministral3ForCausalLM", "Ministral3Model"), ("sliding_window",), read_ministral3,
           {"max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}),
    Family("smollm3", ("SmolLM3ForCausalLM", "SmolLM3Model"),
           (*FIELDS, "no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types"),
           read_smollm3, {"max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True,
                          "rope_theta": 2000000.0}),
    Family("phi3", ("Phi3ForCausalLM", "Phi3Model"), ("sliding_window", "resid_pdrop", "embd_pdrop"), read_phi3,
           {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}),
    Family("glm", ("GlmForCausalLM", "GlmModel"), ("attention_bias",), read_glm, _GLM),
    Family("glm4", ("Glm4ForCausalLM", "Glm4Model"), ("attention_bias",), read_glm4, _GLM),
    Family("olmo2", ("Olmo2ForCausalLM", "Olmo2Model"), ("attention_bias",), read_olmo2, _OLMO),
    Family("olmo3", ("Olmo3ForCausalLM", "Olmo3Model"), ("attention_bias", "sliding_window", "layer_types"), read_olmo3, _OLMO),
    Family("exaone4", ("Exaone4ForCausalLM", "Exaone4Model"), ("sliding_window", "sliding_window_pattern", "layer_types"),
           read_exaone4, {"max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5}),
    Family("cohere", ("CohereForCausalLM", "CohereModel"), ("layer_norm_eps", "logit_scale", "attention_bias"), read_cohere,
           _COHERE),
    Family("cohere2", ("Cohere2ForCausalLM", "Cohere2Model"),
           ("layer_norm_eps", "logit_scale", "attention_bias", "sliding_window", "layer_types", "sliding_window_pattern"),
           read_cohere2, _COHERE | {"rope_theta": 10000.0}),
    Family("stablelm", ("StableLmForCausalLM", "StableLmModel"),
           ("layer_norm_eps", "use_qkv_bias", "use_parallel_residual", "hidden_dropout"), read_stablelm,
           {"max_position_embeddings": 4096, "num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25}),
    Family("starcoder2", ("Starcoder2ForCausalLM", "Starcoder2Model"),
           ("norm_epsilon", "use_bias", "sliding_window", "residual_dropout", "embedding_dropout"), read_starcoder2,
           {"max_position_embeddings": 4096, "num_key_value_heads": 2, "tie_word_embeddings": True, "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh"}),
)  # fmt: skip
