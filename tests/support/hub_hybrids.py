"""Hybrids: models some of whose layers keep a recurrent state in place of K and V."""

from __future__ import annotations

from typing import Any

from hub_families import qwen_vl
from hub_models import HubModel
from transformers import (
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

DELTA: dict[str, Any] = {
    "num_hidden_layers": 8, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
LINEAR, FULL = "linear_attention", "full_attention"
MAMBA: dict[str, Any] = {
    "num_hidden_layers": 5, "layer_types": [LINEAR, FULL, LINEAR, FULL, LINEAR], "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_d_state": 8, "mamba_chunk_size": 16, "shared_intermediate_size": 32,
}  # fmt: skip
CONV: dict[str, Any] = {
    "num_hidden_layers": 6, "layer_types": ["conv", "conv", FULL, "conv", FULL, "conv"], "block_ff_dim": 48,
}  # fmt: skip

SECTIONS = {
    "rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25,
}  # fmt: skip

QWEN = HubModel("qwen 3.5", Qwen3_5TextConfig, DELTA)
RUN = [
    QWEN,
    HubModel("qwen 3.5 with eyes", qwen_vl(Qwen3_5Config), DELTA | {"rope_parameters": SECTIONS}),
    HubModel("qwen 3.5 with experts", Qwen3_5MoeTextConfig, DELTA | EXPERTS),
    HubModel("qwen 3 next", Qwen3NextConfig, DELTA | EXPERTS),
    HubModel("granite 4 h", GraniteMoeHybridConfig, MAMBA | {"num_local_experts": 0, "position_embedding_type": "nope",
             "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.0}),
    HubModel("granite 4 h with experts", GraniteMoeHybridConfig, MAMBA | {"num_local_experts": 4, "num_experts_per_tok": 2,
             "position_embedding_type": "rope"}),
    HubModel("nemotron h", NemotronHConfig, {"num_hidden_layers": 6, "mamba_num_heads": 8, "mamba_head_dim": 8, "head_dim": 8,
             "layers_block_type": [LINEAR, "mlp", FULL, LINEAR, "moe", FULL], "ssm_state_size": 8, "n_groups": 2,
             "chunk_size": 16}),
    HubModel("olmo hybrid", OlmoHybridConfig, DELTA | {"num_hidden_layers": 4, "eos_token_id": 1, "bos_token_id": 0}),
    HubModel("lfm 2", Lfm2Config, CONV),
    HubModel("lfm 2 with experts", Lfm2MoeConfig, CONV | {"num_experts": 4, "num_experts_per_tok": 2,
             "moe_intermediate_size": 16, "num_dense_layers": 2}),
]  # fmt: skip
