"""Multi-head latent attention (MLA): DeepSeek V2 and V3, GLM-4.7-Flash, MiniCPM3 and Youtu-LLM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.moe import checked
from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder
from cacheblend_cli.model.families.values import is_number, wrong_value
from cacheblend_cli.model.spec import ExpertsSpec, LatentSpec, ModelSpec, Routing

MOST_PREDICTORS = 16


def read_v2(fields: ConfigFields) -> ModelSpec:
    spec = replace(_latent_decoder(fields), interleaved=True)
    _expect(fields, "scoring_func", "softmax")
    method = fields.values.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise wrong_value("topk_method", method, "greedy or group_limited_greedy")
    routing = Routing(sigmoid=False, factor=fields.factor("routed_scaling_factor", 1.0))
    if method != "greedy":
        routing = replace(routing, groups=fields.integer("n_group"), groups_kept=fields.integer("topk_group"))
    return _with_experts(spec, fields, routing, normed=False)


def read_v3(fields: ConfigFields) -> ModelSpec:
    spec = replace(_latent_decoder(fields), interleaved=fields.flag("rope_interleave", True))
    _expect(fields, "scoring_func", "sigmoid")
    _expect(fields, "topk_method", "noaux_tc")
    groups, kept = fields.integer("n_group"), fields.integer("topk_group")
    factor = fields.factor("routed_scaling_factor", 1.0)
    routing = Routing(sigmoid=True, groups=groups, groups_kept=kept, factor=factor)
    return _with_experts(spec, fields, routing, normed=fields.flag("norm_topk_prob", True))


def read_glm(fields: ConfigFields) -> ModelSpec:
    dense = fields.integer("first_k_dense_replace", least=0)
    if fields.values.get("mlp_layer_types") is None and dense != 1:
        raise wrong_value("first_k_dense_replace", dense, "1, or mlp_layer_types given: transformers uses only that")
    return read_v3(fields)


def read_minicpm(fields: ConfigFields) -> ModelSpec:
    spec, depth = _latent_decoder(fields), fields.optional_factor("scale_depth", 1.4)
    base = fields.optional_integer("dim_model_base", 256)
    residual = 1.0 if depth is None else depth / math.sqrt(spec.num_layers)
    logits, embedding = 1.0 if base is None else base / spec.hidden_size, fields.factor("scale_emb", 12)
    return replace(spec, embedding_scale=embedding, residual_scale=residual, logit_scale=logits)


def read_youtu(fields: ConfigFields) -> ModelSpec:
    return replace(_latent_decoder(fields), interleaved=fields.flag("rope_interleave", True))


def _latent_decoder(fields: ConfigFields) -> ModelSpec:
    heads, kv_heads = fields.integer("num_attention_heads"), fields.optional_integer("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise wrong_value(
            "num_key_value_heads", kv_heads, f"equal to num_attention_heads, {heads}: all heads share one latent"
        )
    rotated = fields.integer("qk_rope_head_dim")  # transformers too uses it as head_dim
    spec = plain_decoder(fields.changed(num_key_value_heads=1, head_dim=rotated))
    rank, nope_dim = fields.integer("kv_lora_rank"), fields.integer("qk_nope_head_dim")
    value_dim = fields.optional_integer("v_head_dim") or spec.hidden_size // heads
    query_rank = fields.optional_integer("q_lora_rank") or 0
    latent = LatentSpec(rank=rank, nope_dim=nope_dim, value_dim=value_dim, query_rank=query_rank)
    if not latent.value_dim:
        raise UsageError(f"{heads} attention heads are more than hidden_size, {spec.hidden_size}", "check config.json")
    if spec.qkv_bias and not latent.query_rank:
        raise UsageError(
            "attention_bias = true with q_lora_rank = null is not implemented: k has a bias there, and q has none",
            "use another model",
        )
    scale = (latent.nope_dim + rotated) ** -0.5 * _sharper(spec.rope) ** 2
    return replace(spec, latent=latent, attention_scale=scale)


def _sharper(rope: Mapping[str, Any]) -> float:
    """Return YaRN's factor on q and k for `mscale_all_dim`, in addition to the one on cos and sin."""
    share: Any = rope.get("mscale_all_dim")
    factor: Any = rope.get("factor")
    if rope["rope_type"] == "default" or not share:
        return 1.0
    if not is_number(factor):
        raise wrong_value("factor", factor, "a number if mscale_all_dim is set")
    return 1.0 if factor <= 1 else float(0.1 * share * math.log(factor) + 1.0)


def _with_experts(spec: ModelSpec, fields: ConfigFields, routing: Routing, *, normed: bool) -> ModelSpec:
    """Return the spec with experts on its sparse layers, and with the name prefixes of multi-token prediction (MTP)
    layers after the model's own, which are not read."""
    if layers := _sparse_layers(fields, spec):
        count, width = fields.integer("n_routed_experts"), fields.integer("moe_intermediate_size")
        per_token, shared_width = fields.integer("num_experts_per_tok"), width * fields.integer("n_shared_experts")
        experts = ExpertsSpec(count, per_token, width, layers, normed=normed, shared_width=shared_width)
        experts = replace(experts, shared="shared_experts", shared_gate=False, routing=routing)
        groups, kept = routing.groups, routing.groups_kept
        if count % groups or (routing.sigmoid and count // groups < 2):
            raise wrong_value("n_group", groups, f"a divisor of the {count} experts, with two or more in a group")
        if kept > groups or experts.per_token > count // groups * kept:
            raise wrong_value(
                "topk_group",
                kept,
                f"a number of the {groups} groups with at least {experts.per_token} experts in total",
            )
        spec = replace(spec, experts=checked(experts))
    names = [n for n in ("num_nextn_predict_layers", "num_mtp_layers") if fields.values.get(n) is not None]
    predictors = fields.integer(names[0], least=0) if names else int(routing.sigmoid)  # V3 has one by default
    numbers = range(spec.num_layers, spec.num_layers + min(predictors, MOST_PREDICTORS))
    return replace(spec, other_parts=tuple(f"{base}layers.{i}." for i in numbers for base in ("", "model.")))


def _sparse_layers(fields: ConfigFields, spec: ModelSpec) -> tuple[int, ...]:
    """Return the layers that have experts."""
    dense = fields.integer("first_k_dense_replace", least=0)
    types = fields.values.get("mlp_layer_types")
    if types is None:
        return tuple(range(dense, spec.num_layers))
    known = isinstance(types, list) and all(kind in ("dense", "sparse") for kind in types)
    if not known or len(types) != spec.num_layers:
        raise wrong_value("mlp_layer_types", types, f"dense or sparse for each of the {spec.num_layers} layers")
    return tuple(layer for layer, kind in enumerate(types) if kind == "sparse")


def _expect(fields: ConfigFields, name: str, only: str) -> None:
    if (found := fields.values.get(name, only)) != only:
        raise wrong_value(name, found, f"{only}: no other is implemented for this family")


_LATENT = (
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attention_bias",
    "qk_head_dim",  # always the sum of the other two, whatever the config says
)  # fmt: skip
_MOE = (
    *_LATENT, "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group",
    "routed_scaling_factor", "output_router_logits",
    "pretraining_tp", "scoring_func", "topk_method", "first_k_dense_replace", "num_nextn_predict_layers",
)  # fmt: skip
FAMILIES = (
    Family("deepseek_v2", ("DeepseekV2ForCausalLM", "DeepseekV2Model"), _MOE, read_v2),
    Family("deepseek_v3", ("DeepseekV3ForCausalLM", "DeepseekV3Model"), (*_MOE, "norm_topk_prob", "rope_interleave", "num_mtp_layers"),
           read_v3, {"routed_scaling_factor": 2.5}),
    Family("glm4_moe_lite", ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteModel"), (*_MOE, "norm_topk_prob", "rope_interleave", "mlp_layer_types"),
           read_glm, {"routed_scaling_factor": 1.8, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5}),
    Family("minicpm3", ("MiniCPM3ForCausalLM", "MiniCPM3Model"),
           (*_LATENT, "scale_emb", "scale_depth", "dim_model_base", "mlp_bias", "pretraining_tp"), read_minicpm,
           {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    Family("youtu", ("YoutuForCausalLM", "YoutuModel"), (*_LATENT, "rope_interleave", "embedding_initializer_range"),
           read_youtu, {"tie_word_embeddings": True}),
)  # fmt: skip
