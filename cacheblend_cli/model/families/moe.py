"""Mixtures of experts: Qwen2-MoE (with a shared expert), Qwen3-MoE, Mixtral, and gpt-oss."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder, windows_by_pattern, windows_of
from cacheblend_cli.model.families.values import MOST_EXPERTS, wrong_value
from cacheblend_cli.model.spec import ExpertsSpec, ModelSpec

GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def read_qwen2(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields)
    experts = _qwen_experts(fields, spec.num_layers)
    shared = fields.integer("shared_expert_intermediate_size", 5632)
    if fields.flag("use_sliding_window"):
        raise UsageError("use_sliding_window of a qwen2_moe is not implemented", "use another model")
    windows_of(fields.layer_types(spec.num_layers) or [], None)
    return replace(spec, qkv_bias=fields.flag("qkv_bias", True), experts=replace(experts, shared_width=shared))


def read_qwen3(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(fields)
    window = fields.optional_integer("sliding_window", 4096) if fields.flag("use_sliding_window") else None
    experts = _qwen_experts(fields, spec.num_layers)
    return replace(spec, qk_norm=True, sliding_windows=(window,) * spec.num_layers, experts=experts)


def _qwen_experts(fields: ConfigFields, num_layers: int) -> ExpertsSpec:
    plain, step = fields.values.get("mlp_only_layers"), fields.integer("decoder_sparse_step", 1)
    if not isinstance(plain, list | None) or any(not isinstance(layer, int) for layer in plain or []):
        raise wrong_value("mlp_only_layers", plain, "a list of layers, or null")
    dense = set(plain or [])
    named = fields.integer("num_local_experts", fields.integer("num_experts"))
    if fields.values.get("num_experts", named) != named:
        raise wrong_value("num_local_experts", named, "what num_experts is")
    per_token, width = fields.integer("num_experts_per_tok"), fields.integer("moe_intermediate_size")
    layers = tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    return checked(ExpertsSpec(named, per_token, width, layers, normed=fields.flag("norm_topk_prob")))


def read_mixtral(fields: ConfigFields) -> ModelSpec:
    spec, window = plain_decoder(fields), fields.optional_integer("sliding_window")
    experts = replace(_local_experts(fields, spec), base="block_sparse_moe", names=("w1", "w3", "w2"))
    return replace(spec, sliding_windows=(window,) * spec.num_layers, experts=experts)


def read_gpt_oss(fields: ConfigFields) -> ModelSpec:
    """gpt-oss: experts with a clamped SwiGLU, biases everywhere, sinks in attention, a window on every other layer."""
    if not fields.values.get("rope_scaling") and not fields.values.get("rope_parameters"):
        fields = fields.changed(rope_parameters=GPT_OSS_ROPE)
    spec = plain_decoder(fields)
    clamped = fields.factor("swiglu_alpha", 1.702), fields.factor("swiglu_limit", 7.0)
    experts = replace(_local_experts(fields, spec), router="router", bias=True, clamped=clamped)
    windows = windows_by_pattern(fields, spec.num_layers, every=2, window=128)
    return replace(spec, sinks=True, sliding_windows=windows, experts=experts)


def _local_experts(fields: ConfigFields, spec: ModelSpec) -> ExpertsSpec:
    count, per_token = fields.integer("num_local_experts"), fields.integer("num_experts_per_tok")
    return checked(ExpertsSpec(count, per_token, spec.intermediate_size, tuple(range(spec.num_layers))))


def checked(experts: ExpertsSpec, name: str = "num_experts_per_tok") -> ExpertsSpec:
    """Return the experts after checking per_token and the number of experts. name: the field of per_token."""
    if experts.count * len(experts.layers) > MOST_EXPERTS:
        raise UsageError(
            f"config.json has {experts.count:,} experts in each of {len(experts.layers):,} layers; the limit is "
            f"{MOST_EXPERTS:,} in all layers together",
            "correct config.json, or fetch the checkpoint again",
        )
    if experts.per_token > experts.count:
        raise wrong_value(name, experts.per_token, f"at most {experts.count}, the number of experts")
    return experts


_ROUTER = ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
_QWEN = (
    *_ROUTER, "num_experts", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
    "use_sliding_window", "sliding_window", "max_window_layers",
)  # fmt: skip
FAMILIES = (
    Family("qwen2_moe", ("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
           (*_QWEN, "shared_expert_intermediate_size", "qkv_bias", "layer_types"), read_qwen2,
           {"max_position_embeddings": 32768, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408}),
    Family("qwen3_moe", ("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
           (*_QWEN, "attention_bias", "num_local_experts"), read_qwen3,  # num_experts under transformers 5's name
           {"max_position_embeddings": 32768, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768}),
    Family("mixtral", ("MixtralForCausalLM", "MixtralModel"),
           (*_ROUTER, "num_local_experts", "sliding_window", "router_jitter_noise"), read_mixtral,
           {"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
            "num_local_experts": 8, "num_experts_per_tok": 2}),
    Family("gpt_oss", ("GptOssForCausalLM", "GptOssModel"),
           (*_ROUTER, "num_local_experts", "attention_bias", "sliding_window", "layer_types", "swiglu_alpha", "swiglu_limit",
            "experts_per_token"), read_gpt_oss,  # experts_per_token: another name for num_experts_per_tok
           {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
            "num_attention_heads": 64, "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64,
            "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "attention_bias": True, "num_local_experts": 128,
            "num_experts_per_tok": 4}),
)  # fmt: skip
