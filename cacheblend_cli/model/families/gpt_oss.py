"""gpt-oss: experts with a clamped SwiGLU, biases everywhere, sinks in attention, and a window on every other layer."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.model.families.moe import ROUTER_FIELDS, checked
from cacheblend_cli.model.families.reader import ConfigFields, Family, every_nth, plain_decoder, windows_of
from cacheblend_cli.model.spec import ExpertsSpec, ModelSpec

FIELDS = ROUTER_FIELDS | {
    "num_local_experts": "experts of a layer",
    "experts_per_token": "num_experts_per_tok once more",
    "attention_bias": "biases of the q, k, v and o projections",
    "sliding_window": "how many tokens a layer with a window looks back over, itself included",
    "layer_types": "which layers have the window; null: every other one, from the first on",
    "swiglu_alpha": "a factor inside the sigmoid of the experts' activation",
    "swiglu_limit": "what the experts' gate and up are clamped to",
}
MISSING = {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
    "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
}  # fmt: skip
ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def read(fields: ConfigFields) -> ModelSpec:
    values = fields.values
    if not values.get("rope_scaling") and not values.get("rope_parameters"):
        values = values | {"rope_parameters": dict(ROPE)}
    spec = plain_decoder(ConfigFields(values), GPT_OSS.architectures[0], MISSING)
    types = fields.layer_types(spec.num_layers) or every_nth(spec.num_layers, 2)
    bias = fields.flag("attention_bias", True)
    experts = ExpertsSpec(
        count=fields.integer("num_local_experts", 128),
        per_token=fields.integer("num_experts_per_tok", 4),
        width=spec.intermediate_size,
        layers=tuple(range(spec.num_layers)),
        router="router",
        bias=True,
        clamped=(fields.factor("swiglu_alpha", 1.702), fields.factor("swiglu_limit", 7.0)),
    )
    return replace(
        spec,
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        sliding_windows=windows_of(types, fields.optional_integer("sliding_window", 128)),
        experts=checked(experts),
        config=fields.values,
    )


GPT_OSS = Family("gpt_oss", ("GptOssForCausalLM", "GptOssModel"), FIELDS, read)
