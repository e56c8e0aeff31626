"""gpt-oss: experts with a clamped SwiGLU, biases everywhere, sinks in attention, and a window on every other layer."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.model.families.moe import ROUTER_FIELDS, checked
from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_by_pattern
from cacheblend_cli.model.spec import ExpertsSpec, ModelSpec

FIELDS = (
    *ROUTER_FIELDS, "num_local_experts", "attention_bias", "sliding_window", "layer_types", "swiglu_alpha", "swiglu_limit",
    "experts_per_token",  # another name for num_experts_per_tok
)  # fmt: skip
MISSING = {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
    "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
    "attention_bias": True,
}  # fmt: skip
ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def read(fields: ConfigFields) -> ModelSpec:
    values = fields.values
    if not values.get("rope_scaling") and not values.get("rope_parameters"):
        values = values | {"rope_parameters": dict(ROPE)}
    spec = plain_decoder(ConfigFields(values), MISSING)
    experts = ExpertsSpec(
        count=fields.integer("num_local_experts", 128),
        per_token=fields.integer("num_experts_per_tok", 4),
        width=spec.intermediate_size,
        layers=tuple(range(spec.num_layers)),
        router="router",
        bias=True,
        clamped=(fields.factor("swiglu_alpha", 1.702), fields.factor("swiglu_limit", 7.0)),
    )
    windows = windows_by_pattern(fields, spec.num_layers, every=2, window=128)
    return replace(spec, sinks=True, sliding_windows=windows, experts=checked(experts))


GPT_OSS = Family("gpt_oss", ("GptOssForCausalLM", "GptOssModel"), FIELDS, read)
