"""Models without a file in `families`: those that run on transformers' own layers, and those that are refused there."""

from __future__ import annotations

from typing import Any

from hub_models import HubModel, new
from transformers import (
    ApertusConfig,
    ArceeConfig,
    AXK2Config,
    CodeGenConfig,
    DiffLlamaConfig,
    DogeConfig,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Glm4MoeConfig,
    GPTNeoXConfig,
    GraniteMoeConfig,
    GraniteSWAConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    Jais2Config,
    MellumConfig,
    MiniMaxM2Config,
    ModernBertDecoderConfig,
    NemotronConfig,
    OlmoConfig,
    OlmoeConfig,
    PersimmonConfig,
    PhiConfig,
    PhimoeConfig,
    SeedOssConfig,
    VaultGemmaConfig,
)

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
DOTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}

RUN = [
    HubModel("olmo", OlmoConfig),
    HubModel("olmo, clipped", OlmoConfig, {"clip_qkv": 0.4}),
    HubModel("olmoe", OlmoeConfig, EXPERTS),
    HubModel("phi", PhiConfig),
    HubModel("phi, normed heads", PhiConfig, {"qk_layernorm": True}),
    HubModel("gpt-neox", GPTNeoXConfig),
    HubModel("gpt-neox, not parallel", GPTNeoXConfig, {"use_parallel_residual": False}),
    HubModel("nemotron", NemotronConfig),
    HubModel("persimmon", PersimmonConfig),
    HubModel("jais 2", Jais2Config),
    HubModel("phi with experts", PhimoeConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    HubModel("seed-oss", SeedOssConfig),
    HubModel("seed-oss, yarn", SeedOssConfig, new("yarn", factor=4.0, original_max_position_embeddings=64)),
    HubModel("ernie 4.5", Ernie4_5Config),
    HubModel("helium", HeliumConfig, {"head_dim": 8}),
    HubModel("arcee", ArceeConfig),
    HubModel("apertus", ApertusConfig),
    HubModel("granite with experts", GraniteMoeConfig, {"num_local_experts": 4, "num_experts_per_tok": 2,
             "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.0}),
    HubModel("granite with windows and sinks", GraniteSWAConfig, {"attention_multiplier": 0.2}),
    HubModel("dots.llm1", Dots1Config, DOTS),
    HubModel("glm 4.5", Glm4MoeConfig, DOTS),
    HubModel("minimax m2", MiniMaxM2Config, {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 4}),
    HubModel("ernie 4.5 with experts", Ernie4_5_MoeConfig, {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16,
             "moe_layer_end_index": 2}),
    HubModel("mellum, two RoPEs", MellumConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
             "moe_intermediate_size": 16, "sliding_window": 24, "layer_types": MIXED}),
    HubModel("vaultgemma", VaultGemmaConfig, {"head_dim": 8, "sliding_window": 24, "layer_types": MIXED}),
    HubModel("modernbert decoder", ModernBertDecoderConfig, {"pad_token_id": 0, "sliding_window": 24, "layer_types": MIXED}),
]  # fmt: skip

LAYER_NORM = [m for m in RUN if m.config in (GPTNeoXConfig, Jais2Config, ModernBertDecoderConfig, NemotronConfig, OlmoConfig,
                                             PersimmonConfig, PhiConfig, PhimoeConfig)]  # fmt: skip


def refused(name: str, config: Any, why: str, **shape: Any) -> HubModel:
    return HubModel(name, config, shape, refused=why)


REFUSED = [
    refused("codegen", CodeGenConfig, "its attention does not go through AttentionInterface"),
    refused("norm behind RoPE", HunYuanDenseV1Config, "its RoPE turns q and k in a way that is not known", head_dim=8),
    refused("sparse attention", DogeConfig, "its layers choose themselves which keys they see"),
    refused("an indexer", AXK2Config, "its layers choose which keys they see"),
    refused("RoPE by length", OlmoConfig, "depends on the prompt's length", rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, **LONGROPE}),
    HubModel("its layers under another name", OlmoConfig, edit={"architectures": ["OlmoModel"]}, refused="OlmoModel"),
    HubModel("quantised", OlmoConfig, edit={"quantization_config": {"quant_method": "fp8"}}, refused="quantised"),
    HubModel("a number as text", OlmoConfig, edit={"hidden_size": "32"}, refused="hidden_size"),
    HubModel("an MLP of another size", OlmoConfig, edit={"intermediate_size": 64}, refused="mismatched weights"),
]  # fmt: skip
DIFFERENTIAL = refused("two attentions in one", DiffLlamaConfig, "differs from transformers'")
