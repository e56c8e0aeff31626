"""Configurations of the families beside Llama, Mistral and Qwen, as their models on the hub have them, in small."""

from __future__ import annotations

from typing import Any

import torch
from hub_models import DROP, HubModel, new, old, tensors
from transformers import (
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeLiteConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    MiniCPM3Config,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
    YoutuConfig,
)

LONG = {"short_factor": [1.0, 1.3, 1.7], "long_factor": [1.5, 3.0, 6.0]}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
QWEN_EYES = {
    "depth": 1,
    "hidden_size": 16,
    "embed_dim": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "fullatt_block_indexes": [0],
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}


def mistral3(tied: bool = False, **shape: Any) -> PretrainedConfig:
    text = MistralConfig(**shape).to_dict()
    return Mistral3Config(text_config=text, vision_config={"model_type": "pixtral", **EYES}, tie_word_embeddings=tied)


def ministral3(tied: bool = False, **shape: Any) -> PretrainedConfig:
    text = Ministral3Config(**shape).to_dict()
    return Mistral3Config(text_config=text, vision_config={"model_type": "pixtral", **EYES}, tie_word_embeddings=tied)


def qwen_vl(cls: type[PretrainedConfig]) -> Any:
    def config(tied: bool = False, **shape: Any) -> PretrainedConfig:
        eyes = QWEN_EYES | {"out_hidden_size": 32, "hidden_size": 32 if cls is Qwen2VLConfig else 16}
        return cls(text_config=shape, vision_config=eyes, tie_word_embeddings=tied)

    return config


def gemma4(**shape: Any) -> PretrainedConfig:
    return Gemma4Config(text_config=Gemma4TextConfig(**shape).to_dict(), vision_config=GEMMA4_EYES, audio_config=None)


def gemma4_unified(**shape: Any) -> PretrainedConfig:
    text = Gemma4UnifiedTextConfig(**shape).to_dict()
    eyes = {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32, "patch_size": 2}
    return Gemma4UnifiedConfig(text_config=text, vision_config=eyes, audio_config=None)


GEMMA4_EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
               "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}  # fmt: skip


def gemma3(**shape: Any) -> PretrainedConfig:
    return Gemma3Config(
        text_config=Gemma3TextConfig(**shape).to_dict(), vision_config={"image_size": 28, "patch_size": 14, **EYES}
    )


def flat(path: Any) -> None:
    """Qwen2.5-VL's config.json as the hub has it: the language model's fields beside vision_config."""
    import json

    file = path / "config.json"
    config = json.loads(file.read_text())
    inner = config.pop("text_config")
    inner.pop("model_type")
    inner["rope_scaling"] = {"type": "mrope", "mrope_section": [1, 1, 2]}
    inner["rope_theta"] = inner.pop("rope_parameters")["rope_theta"]
    file.write_text(json.dumps({**inner, **config}))


def newer_names(held: dict[str, torch.Tensor]) -> None:
    """As the modules are called, and as new models are stored: model.language_model.layers, model.vision_tower."""
    for name in list(held):
        own = name.removeprefix("language_model.")
        if own.startswith("model."):
            own = f"model.language_model.{own.removeprefix('model.')}"
        held[own if own.startswith(("lm_head.", "model.")) else f"model.{own}"] = held.pop(name)


GROWTH = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 24, "beta_fast": 32.0,
          "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}  # fmt: skip


LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}
EXPERTS_V2 = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
EXPERTS_V3 = EXPERTS_V2 | {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2}
LONG_LATENT = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.5, 2.0, 4.0, 8.0]}
YARN_LATENT = old(
    10000,
    type="yarn",
    factor=40,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=0.7,
    original_max_position_embeddings=32,
)


def own_code(file: str, base: str) -> dict[str, Any]:
    """The code of its own that a model on the hub names, where transformers has the same class."""
    names = {"AutoConfig": f"configuration_{file}.{base}Config", "AutoModel": f"modeling_{file}.{base}Model",
             "AutoModelForCausalLM": f"modeling_{file}.{base}ForCausalLM"}  # fmt: skip
    return {"auto_map": names}


HUB_V2 = own_code("deepseek", "DeepseekV2") | {
    "scoring_func": "softmax",
    "seq_aux": True,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
}
HUB_V3 = own_code("deepseek", "DeepseekV3") | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "seq_aux": True, "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1,
          "num_nextn_predict_layers": 1}  # fmt: skip


def predictor(held: dict[str, torch.Tensor]) -> None:
    """A layer that predicts further tokens, behind the model's own, as the hub's files have it."""
    held["model.layers.3.eh_proj.weight"] = torch.ones(32, 64)
    held["model.layers.3.self_attn.o_proj.weight"] = torch.ones(32, 56)


def as_the_hub(held: dict[str, torch.Tensor]) -> None:
    predictor(held)
    for name in held:
        if name.endswith("e_score_correction_bias"):
            held[name] = torch.randn(held[name].shape, generator=torch.Generator().manual_seed(1))


def in_mxfp4(path: Any) -> None:
    """The experts as gpt-oss has them on the hub: random blocks of 4 bits and their scales, in one tensor a layer."""
    import json

    file = path / "config.json"
    skipped = {
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        "quant_method": "mxfp4",
        "dequantize": True,
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": skipped}))

    def quantise(held: dict[str, torch.Tensor]) -> None:
        for name in [name for name in held if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            count, inputs, outputs = held.pop(name).shape
            held[f"{name}_blocks"] = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
            held[f"{name}_scales"] = torch.randint(121, 126, (count, outputs, inputs // 32), dtype=torch.uint8)

    tensors(quantise)(path)


def without_scales(path: Any) -> None:
    in_mxfp4(path)
    tensors(lambda held: held.pop("model.layers.1.mlp.experts.down_proj_scales"))(path)


MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SINKS = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 20, "swiglu_limit": 0.6}
O_YARN = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
          "original_max_position_embeddings": 64}  # fmt: skip
WIDE = {"head_dim": 16}
GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 6, "sliding_window": 20, "hidden_size_per_layer_input": 0,
          "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2}  # fmt: skip
GEMMA4_SMALL = GEMMA4 | {
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 320,
    "num_kv_shared_layers": 3,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
GEMMA4_UNIFIED = {name: value for name, value in GEMMA4.items() if name != "hidden_size_per_layer_input"}
GEMMA3N = {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 20, "hidden_size_per_layer_input": 12, "laurel_rank": 8,
           "vocab_size_per_layer_input": 320, "num_kv_shared_layers": 3, "layer_types": GEMMA4["layer_types"]}  # fmt: skip
HUB_UNIFIED = {"enable_moe_block": False, "hidden_size_per_layer_input": 0, "moe_intermediate_size": None, "num_experts": None,
               "top_k_experts": None, "vocab_size_per_layer_input": 262144, "use_bidirectional_attention": "vision"}  # fmt: skip
HUB_3N = {"query_pre_attn_scalar": 256, "altup_lr_multiplier": 1.0, "rope_parameters": DROP, "rope_theta": 1e6, "rope_scaling": None,
          "rope_local_base_freq": 1e4}  # fmt: skip
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 20}

RUN = [
    # A language model inside another
    HubModel("mistral-small-3", mistral3, {"sliding_window": None, "head_dim": 8}),
    HubModel("mistral-small-3, newer names", mistral3, {"sliding_window": None, "head_dim": 8}, change=tensors(newer_names)),
    HubModel("mistral3, tied, window", mistral3, {"tied": True, "sliding_window": 24, "head_dim": 16}),
    HubModel("qwen2.5-vl", qwen_vl(Qwen2_5_VLConfig), {"rope_parameters": SECTIONS}),
    HubModel("qwen2.5-vl, flat", qwen_vl(Qwen2_5_VLConfig), {"rope_parameters": SECTIONS}, change=flat),
    HubModel("qwen2-vl, tied", qwen_vl(Qwen2VLConfig), {"rope_parameters": SECTIONS, "tied": True}),
    HubModel("qwen3-vl", qwen_vl(Qwen3VLConfig), {"head_dim": 16, "rope_parameters": SECTIONS | {"mrope_section": [2, 3, 3]}}),
    HubModel("qwen3-vl, tied", qwen_vl(Qwen3VLConfig), {"head_dim": 8, "rope_parameters": SECTIONS, "tied": True}),
    HubModel("gemma-3-4b", gemma3, GEMMA | {"sliding_window_pattern": 2}),
    HubModel("gemma-3-4b, newer names", gemma3, GEMMA | {"layer_types": MIXED}, change=tensors(newer_names)),
    # Ministral 3
    HubModel("ministral-3-8b", Ministral3Config, {"head_dim": 16, "rope_parameters": GROWTH}),
    HubModel("ministral-3, as transformers 4 wrote it", Ministral3Config, {"head_dim": 8, "rope_parameters": GROWTH, "tie_word_embeddings": True},
             old(DROP) | {"head_dim": 8, "rope_scaling": GROWTH}),
    HubModel("ministral-3, window, no growth", Ministral3Config,
             {"head_dim": 8, "sliding_window": 24, "rope_parameters": GROWTH | {"llama_4_scaling_beta": 0.0}}),
    HubModel("ministral-3, plain RoPE", Ministral3Config, {"head_dim": 8, "rope_parameters": GROWTH | {"rope_type": "default"}}),
    HubModel("ministral-3-3b-instruct", ministral3, {"head_dim": 16, "rope_parameters": GROWTH | {"type": "yarn"}, "tied": True},
             change=tensors(newer_names)),
    # Gemma
    HubModel("gemma", GemmaConfig, WIDE),
    HubModel("gemma, the first release", GemmaConfig, WIDE | {"num_key_value_heads": 1}, old(10000.0) | {"hidden_act": "gelu", "head_dim": 16}),
    HubModel("gemma, biases, float16", GemmaConfig, WIDE | {"attention_bias": True}, dtype=torch.float16),
    HubModel("gemma-2", Gemma2Config, GEMMA, old(10000.0) | {"head_dim": 16}),
    HubModel("gemma-2, small caps", Gemma2Config, GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    HubModel("gemma-2, no caps", Gemma2Config, GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    HubModel("gemma-2, windows by name", Gemma2Config, GEMMA | {"layer_types": MIXED[1:] + MIXED[1:2]}),
    HubModel("gemma-3-1b", Gemma3TextConfig, GEMMA | {"layer_types": MIXED}),
    HubModel("gemma-3-1b, as the hub", Gemma3TextConfig, GEMMA, old(1000000.0, rope_type="linear", factor=8.0) | {
             "head_dim": 16, "layer_types": DROP, "sliding_window_pattern": 2, "rope_local_base_freq": 10000.0}),
    HubModel("gemma-3, logits capped", Gemma3TextConfig, GEMMA | {"final_logit_softcapping": 3.0, "layer_types": MIXED}),
    # Gemma 4
    HubModel("gemma-4-31b", Gemma4TextConfig, GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    HubModel("gemma-4-e2b", Gemma4TextConfig, GEMMA4_SMALL | {"use_double_wide_mlp": True}),
    HubModel("gemma-4-e4b, a cap", Gemma4TextConfig, GEMMA4_SMALL | {"final_logit_softcapping": 3.0, "num_key_value_heads": 1},
             {"per_layer_config": DROP, "global_head_dim": 32}, shard_size="20KB"),
    HubModel("gemma-4-26b-a4b", Gemma4TextConfig, GEMMA4 | GEMMA4_EXPERTS | {"use_bidirectional_attention": "vision"}),
    HubModel("gemma-4-26b-a4b, inside another", gemma4, GEMMA4 | GEMMA4_EXPERTS | {"top_k_experts": 3, "pad_token_id": 0}),
    HubModel("gemma-4-12b", Gemma4UnifiedTextConfig, GEMMA4_UNIFIED | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
             HUB_UNIFIED),
    HubModel("gemma-4-12b, inside another", gemma4_unified, GEMMA4_UNIFIED | {"num_kv_shared_layers": 3, "pad_token_id": 0}),
    HubModel("gemma-4-e2b, inside another", gemma4, GEMMA4_SMALL | {"use_double_wide_mlp": True, "pad_token_id": 0}),
    # Gemma 3n
    HubModel("gemma-3n-e4b", Gemma3nTextConfig, GEMMA3N | {"activation_sparsity_pattern": [0.95, 0.6, *[0.0] * 4]}, HUB_3N),
    HubModel("gemma-3n-e2b, widths", Gemma3nTextConfig, GEMMA3N | {"num_kv_shared_layers": 2, "altup_num_inputs": 3,
             "altup_active_idx": 1, "intermediate_size": [48, 48, 64, 48, 48, 40]}, {"rope_parameters": DROP, "rope_theta": 1e6}),
    HubModel("gemma-3n, no shared layers, no scale", Gemma3nTextConfig, GEMMA3N | {"num_kv_shared_layers": 0, "final_logit_softcapping": 3.0,
             "altup_correct_scale": False, "vocab_size_per_layer_input": 290}, shard_size="20KB"),
    # Latent attention
    HubModel("deepseek-v2-lite", DeepseekV2Config, LATENT | EXPERTS_V2 | {"q_lora_rank": None}, YARN_LATENT | HUB_V2),
    HubModel("deepseek-v2", DeepseekV2Config, LATENT | EXPERTS_V2 | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2,
             "routed_scaling_factor": 1.7, "first_k_dense_replace": 2}, YARN_LATENT),
    HubModel("deepseek-v2, biases", DeepseekV2Config, LATENT | EXPERTS_V2 | {"attention_bias": True, "first_k_dense_replace": 3}),
    HubModel("deepseek-v3", DeepseekV3Config, LATENT | EXPERTS_V3, YARN_LATENT | HUB_V3, change=tensors(as_the_hub)),
    HubModel("deepseek-v3, halves", DeepseekV3Config, LATENT | EXPERTS_V3 | {"rope_interleave": False, "norm_topk_prob": False,
             "q_lora_rank": None}),
    HubModel("deepseek-v3, bfloat16", DeepseekV3Config, LATENT | EXPERTS_V3, dtype=torch.bfloat16),
    HubModel("glm-4.7-flash", Glm4MoeLiteConfig, LATENT | EXPERTS_V3 | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
             {"num_nextn_predict_layers": 1}, change=tensors(predictor)),
    HubModel("glm-4.7-flash, by layer", Glm4MoeLiteConfig, LATENT | EXPERTS_V3 | {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    HubModel("minicpm3", MiniCPM3Config, LATENT | {"scale_depth": 1.4, "dim_model_base": 8, "scale_emb": 12, "v_head_dim": None},
             own_code("minicpm", "MiniCPM3") | old(DROP, type="longrope", original_max_position_embeddings=64, **LONG_LATENT)),
    HubModel("minicpm3, short prompt", MiniCPM3Config, LATENT | {"q_lora_rank": None, "mlp_bias": True, "tie_word_embeddings": False},
             new("longrope", original_max_position_embeddings=400, **LONG_LATENT)),
    HubModel("youtu-llm", YoutuConfig, LATENT | {"tie_word_embeddings": True}, new("default", rope_theta=1600000)),
    HubModel("youtu-llm, yarn", YoutuConfig, LATENT, new("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7,
             mscale_all_dim=1.1)),
    # Phi
    HubModel("phi-3-mini-4k", Phi3Config, {"sliding_window": 30, "num_key_value_heads": 4}, old(10000.0) | {"num_key_value_heads": DROP}),
    HubModel("phi-3-mini-128k", Phi3Config, {"head_dim": 8, "original_max_position_embeddings": 64},
             old(10000.0, type="longrope", short_factor=[1.0, 1.1, 1.3, 1.7], long_factor=[1.5, 2.0, 4.0, 8.0])),
    HubModel("phi-4-mini", Phi3Config, {"tie_word_embeddings": True, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75},
             old(10000.0, type="longrope", **LONG) | {"partial_rotary_factor": 0.75}),
    HubModel("phi-4-mini, short prompt", Phi3Config, {"original_max_position_embeddings": 400},
             new("longrope", partial_rotary_factor=0.75, **LONG)),
    HubModel("phi-4", Phi3Config, {"sliding_window": None, "max_position_embeddings": 512}, new("default", rope_theta=250000)),
    # Granite, SmolLM 3, OLMo
    HubModel("granite-3", GraniteConfig, {"embedding_multiplier": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6,
                                          "logits_scaling": 0.25, "tie_word_embeddings": True}),
    HubModel("granite, biases", GraniteConfig, {"embedding_multiplier": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.7,
                                                "logits_scaling": 0.5, "attention_bias": True, "mlp_bias": True}),
    HubModel("granite, factors of 1", GraniteConfig, {}, {"attention_multiplier": DROP, "residual_multiplier": DROP}),
    HubModel("smollm3", SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
    HubModel("smollm3, by interval", SmolLM3Config, {"no_rope_layer_interval": 2}, old(5000000.0) | {"no_rope_layers": DROP, "layer_types": DROP}),
    HubModel("smollm3, window", SmolLM3Config, {"no_rope_layers": [1, 0, 0], "use_sliding_window": True, "sliding_window": 20},
             {"layer_types": DROP}),
    HubModel("smollm3, yarn", SmolLM3Config, {"no_rope_layers": [0, 1, 1]}, new("yarn", factor=4.0, original_max_position_embeddings=64)),
    HubModel("olmo-2", Olmo2Config, {"num_key_value_heads": 4}, old(500000.0)),
    HubModel("olmo-2, grouped", Olmo2Config, {"attention_bias": True}),
    HubModel("olmo-3", Olmo3Config, {"sliding_window": 20, "layer_types": MIXED}),
    HubModel("olmo-3, yarn", Olmo3Config, {"sliding_window": 20, "layer_types": MIXED, "rope_parameters": {
             "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64,
                                "attention_factor": 1.2},
             "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}}),
    HubModel("olmo-3, as the hub", Olmo3Config, {"sliding_window": 20, "num_hidden_layers": 4},
             old(500000, rope_type="yarn", factor=8.0, original_max_position_embeddings=64) | {"layer_types": DROP}),
    # GLM
    HubModel("glm-4-9b", GlmConfig, WIDE | {"attention_bias": True}, old(10000.0) | {"head_dim": 16, "partial_rotary_factor": 0.5}),
    HubModel("glm, three quarters", GlmConfig, {"head_dim": 8, "partial_rotary_factor": 0.75, "attention_bias": False}),
    HubModel("glm, whole head", GlmConfig, {"head_dim": 8, "partial_rotary_factor": 1.0}),
    HubModel("glm-4-0414", Glm4Config, WIDE | {"attention_bias": True}),
    HubModel("glm-4-0414, tied, bfloat16", Glm4Config, WIDE | {"tie_word_embeddings": True}, dtype=torch.bfloat16),
    # StarCoder, StableLM
    HubModel("starcoder2", Starcoder2Config, {"sliding_window": 24}),
    HubModel("starcoder2, no biases", Starcoder2Config, {"use_bias": False, "tie_word_embeddings": False, "hidden_act": "gelu"}),
    HubModel("starcoder2, as the hub", Starcoder2Config, {}, old(100000) | {"activation_function": "gelu", "sliding_window": 24}),
    HubModel("stablelm-3b", StableLmConfig, {"num_key_value_heads": 4}, old(10000) | {"partial_rotary_factor": 0.25}),
    HubModel("stablelm-2", StableLmConfig, {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    HubModel("stablelm, parallel", StableLmConfig, {"use_parallel_residual": True}),
    # Cohere, EXAONE
    HubModel("command-r", CohereConfig, {"logit_scale": 0.5}),
    HubModel("command-r, biases", CohereConfig, {"attention_bias": True, "tie_word_embeddings": False}, old(8000000.0)),
    HubModel("command-r7b", Cohere2Config, {"sliding_window": 20, "logit_scale": 0.25, "num_hidden_layers": 4}),
    HubModel("command-r7b, as the hub", Cohere2Config, {"sliding_window": 20, "num_hidden_layers": 4},
             old(50000) | {"layer_types": DROP, "sliding_window_pattern": 2}),
    HubModel("command-a, biases", Cohere2Config, {"sliding_window": 20, "layer_types": MIXED, "attention_bias": True}),
    # Experts
    HubModel("qwen3-30b-a3b", Qwen3MoeConfig, MOE | {"norm_topk_prob": True, "head_dim": 16}, old(1000000.0) | {"head_dim": 16}),
    HubModel("qwen3-moe, not normed, biases", Qwen3MoeConfig, MOE | {"attention_bias": True, "head_dim": 8}),
    HubModel("qwen3-moe, one layer with experts", Qwen3MoeConfig, MOE | {"decoder_sparse_step": 2, "head_dim": 8}, shard_size="20KB"),
    HubModel("qwen1.5-moe", Qwen2MoeConfig, MOE | {"shared_expert_intermediate_size": 40}),
    HubModel("qwen2-moe, a plain layer", Qwen2MoeConfig, MOE | {"mlp_only_layers": [1], "norm_topk_prob": True, "qkv_bias": False}),
    HubModel("mixtral-8x7b", MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}, old(1000000.0)),
    HubModel("mixtral, window, all experts", MixtralConfig, {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 24}),
    # gpt-oss
    HubModel("gpt-oss-20b", GptOssConfig, SINKS | {"rope_parameters": O_YARN | {"rope_theta": 150000.0}}),
    HubModel("gpt-oss-120b, as the hub", GptOssConfig, SINKS | {"swiglu_limit": 7.0, "rope_parameters": O_YARN | {"rope_theta": 150000}},
             old(150000, **O_YARN) | {"head_dim": 16, "experts_per_token": 2, "initial_context_length": 4096}, shard_size="20KB"),
    HubModel("gpt-oss, no biases, all windows", GptOssConfig, SINKS | {"attention_bias": False, "layer_types": ["sliding_attention"] * 3,
             "swiglu_alpha": 1.2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    HubModel("gpt-oss, one KV head, all experts", GptOssConfig, SINKS | {"num_key_value_heads": 1, "num_experts_per_tok": 6,
             "tie_word_embeddings": True, "rope_parameters": O_YARN | {"rope_theta": 150000.0}}, dtype=torch.bfloat16),
    HubModel("gpt-oss, mxfp4", GptOssConfig, SINKS | {"intermediate_size": 64, "hidden_size": 64, "rope_parameters": O_YARN | {"rope_theta": 1e4}},
             change=in_mxfp4),
    # EXAONE
    HubModel("exaone-4-1.2b", Exaone4Config, {"sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True}),
    HubModel("exaone-4-32b", Exaone4Config, {"sliding_window": 20, "layer_types": MIXED}),
    HubModel("exaone-4, by pattern", Exaone4Config, {"sliding_window": 20, "sliding_window_pattern": 2}, {"layer_types": DROP}),
]  # fmt: skip


def fault(name: str, told: str, config: Any = None, **edit: Any) -> HubModel:
    """A model that is refused, whatever its weights are."""
    return HubModel(name, config or GemmaConfig, {}, edit, refused=told, has_weights=False)


REFUSED = [
    HubModel("gemma 3n, the fifth stream of four", Gemma3nTextConfig, GEMMA3N, {"altup_active_idx": 4},
             refused="altup_active_idx in config.json is 4"),
    HubModel("gemma 3n, layers without a sparsity", Gemma3nTextConfig, GEMMA3N, {"activation_sparsity_pattern": [0.5]},
             refused="activation_sparsity_pattern in config.json is [0.5]"),
    fault("gemma 4, more experts than there are", "top_k_experts in config.json is 9", Gemma4TextConfig, **GEMMA4_EXPERTS | {"top_k_experts": 9}),
    fault("gemma 4, text in both directions", "use_bidirectional_attention in config.json is 'all'", Gemma4TextConfig,
          use_bidirectional_attention="all"),
    fault("gemma 4, all layers use another's K and V", "num_kv_shared_layers in config.json is 3", Gemma4TextConfig,
          num_kv_shared_layers=3),
    fault("deepseek v2, normed weights", "norm_topk_prob = true", DeepseekV2Config, **LATENT, **EXPERTS_V2, norm_topk_prob=True),
    fault("deepseek v2, other scores", "scoring_func in config.json is 'sigmoid'", DeepseekV2Config, **LATENT, **EXPERTS_V2,
          scoring_func="sigmoid"),
    fault("deepseek v3, groups that do not divide", "n_group in config.json is 3", DeepseekV3Config, **LATENT, **EXPERTS_V3 | {"n_group": 3}),
    fault("deepseek v3, too few experts in its groups", "topk_group in config.json is 1", DeepseekV3Config, **LATENT,
          **EXPERTS_V3 | {"topk_group": 1, "num_experts_per_tok": 3}),
    fault("deepseek v3, biases and no latent of queries", "q_lora_rank = null", DeepseekV3Config, **LATENT | {"q_lora_rank": None},
          **EXPERTS_V3, attention_bias=True),
    fault("deepseek v3, another class of its own", "the model needs its own code", DeepseekV3Config, **LATENT, **EXPERTS_V3,
          auto_map={"AutoModelForCausalLM": "modeling_kimi.KimiForCausalLM"}),
    fault("latent attention with fewer KV heads", "num_key_value_heads in config.json is 2", YoutuConfig,
          **LATENT | {"num_key_value_heads": 2}),
    fault("both directions", "use_bidirectional_attention = true", use_bidirectional_attention=True),
    fault("gemma 3 with a soft cap that transformers does not apply", "attn_logit_softcapping", Gemma3TextConfig,
          attn_logit_softcapping=50.0),
    fault("gemma 3, one RoPE", "by kind of layer", Gemma3TextConfig, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    fault("gemma 2, no size of windows", "sliding_window is missing", Gemma2Config, sliding_window=None),
    fault("gemma 2, cap of nothing", "final_logit_softcapping in config.json is 0", Gemma2Config, final_logit_softcapping=0),
    fault("phi-3 with yarn", "RoPE of a phi3 is of type 'yarn'", Phi3Config, **new("yarn", factor=4.0)),
    fault("phi-3, odd part", "partial_rotary_factor", Phi3Config, **new("default", partial_rotary_factor=0.4)),
    fault("more experts than there are", "num_experts_per_tok in config.json is 9", MixtralConfig, num_experts_per_tok=9),
    fault("windows of a qwen2_moe", "use_sliding_window of a qwen2_moe", Qwen2MoeConfig, use_sliding_window=True),
    fault("stablelm 2 12b", "qk_layernorm = true", StableLmConfig, qk_layernorm=True),
    fault("command r+", "use_qk_norm = true", CohereConfig, use_qk_norm=True),
    fault("granite, logits divided by 0", "logits_scaling in config.json is 0", GraniteConfig, logits_scaling=0),
    fault("smollm3, no places", "no layer of this model has RoPE", SmolLM3Config, no_rope_layers=[0, 0, 0]),
    fault("smollm3, layers missing", "no_rope_layers", SmolLM3Config, no_rope_layers=[1, 0]),
    HubModel("mxfp4, scales missing", GptOssConfig, SINKS | {"intermediate_size": 32}, change=without_scales,
             refused="model.layers.1.mlp.experts.down_proj_blocks is not read"),
    fault("text_config missing", "text_config in config.json is null", model_type="mistral3", architectures=None),
    fault("text of another family", "unknown model_type 'ministral4'", mistral3, text_config={"model_type": "ministral4"}),
    fault("ministral 3, growth missing", "llama_4_scaling_beta in config.json is null", Ministral3Config, **new("default")),
    fault("ministral 3, growth by nothing", "lack original_max_position_embeddings", Ministral3Config,
          **new("default", llama_4_scaling_beta=0.1)),
]  # fmt: skip
