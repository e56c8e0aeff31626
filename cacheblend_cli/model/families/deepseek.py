"""Multi-head latent attention (MLA): DeepSeek V2 and V3, GLM-4.7-Flash, MiniCPM3 and Youtu-LLM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.moe import checked
from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder
from cacheblend_cli.model.families.values import is_number, shown, wrong_value
from cacheblend_cli.model.spec import ExpertsSpec, LatentSpec, ModelSpec, Routing

FIELDS = (
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attention_bias",
    "qk_head_dim",  # always the sum of the other two, whatever the config says
)  # fmt: skip
MOE_FIELDS = (
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group",
    "routed_scaling_factor", "norm_topk_prob", "output_router_logits",
    "pretraining_tp", "scoring_func", "topk_method", "moe_layer_freq", "first_k_dense_replace", "num_nextn_predict_layers",
)  # fmt: skip
V2_FIELDS = (*FIELDS, *MOE_FIELDS, "mlp_bias")
V3_FIELDS = (*FIELDS, *MOE_FIELDS, "rope_interleave", "num_mtp_layers")
GLM_FIELDS = (*FIELDS, *MOE_FIELDS, "rope_interleave", "mlp_layer_types")
MINICPM_FIELDS = (*FIELDS, "scale_emb", "scale_depth", "dim_model_base", "mlp_bias", "pretraining_tp")
YOUTU_FIELDS = (*FIELDS, "rope_interleave", "embedding_initializer_range")

MOST_PREDICTORS = 16
# Defaults of the families' config classes.
V2 = {
    "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "max_position_embeddings": 2048, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.0, "first_k_dense_replace": 0,
}  # fmt: skip
V3 = V2 | {
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128,
    "max_position_embeddings": 4096, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
}  # fmt: skip
GLM = V3 | {
    "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 47, "num_attention_heads": 20,
    "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
    "n_routed_experts": 64, "moe_intermediate_size": 1536, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.8, "first_k_dense_replace": 1,
}  # fmt: skip
MINICPM = {
    "vocab_size": 73448, "hidden_size": 2560, "intermediate_size": 6400, "num_hidden_layers": 62, "num_attention_heads": 40,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "kv_lora_rank": 256, "q_lora_rank": 768,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": None,
}  # fmt: skip
YOUTU_LLM = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 16,
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def read_v2(fields: ConfigFields) -> ModelSpec:
    spec = replace(_latent_decoder(fields, V2), interleaved=True)
    _expect(fields, "scoring_func", "softmax")
    if fields.flag("mlp_bias"):
        raise UsageError("mlp_bias = true of a deepseek_v2 is not implemented", "use another model")
    if fields.flag("norm_topk_prob"):
        raise UsageError(
            "norm_topk_prob = true of a deepseek_v2 is not implemented: transformers reads it but does not use it",
            "use another model",
        )
    method = fields.values.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise wrong_value("topk_method", method, "greedy or group_limited_greedy")
    routing = Routing(sigmoid=False, factor=fields.factor("routed_scaling_factor", 1.0))
    if method != "greedy":
        routing = replace(
            routing, groups=fields.integer("n_group", None), groups_kept=fields.integer("topk_group", None)
        )
    experts = _experts(fields, V2, _sparse_layers(fields, spec, V2), routing)
    return replace(spec, experts=experts, other_parts=_predictors(fields, spec, 0))


def read_v3(fields: ConfigFields, missing: Mapping[str, Any] = V3) -> ModelSpec:
    spec = replace(_latent_decoder(fields, missing), interleaved=fields.flag("rope_interleave", True))
    _expect(fields, "scoring_func", "sigmoid")
    _expect(fields, "topk_method", "noaux_tc")
    routing = Routing(
        sigmoid=True,
        groups=fields.integer("n_group", missing["n_group"]),
        groups_kept=fields.integer("topk_group", missing["topk_group"]),
        factor=fields.factor("routed_scaling_factor", missing["routed_scaling_factor"]),
    )
    experts = _experts(fields, missing, _sparse_layers(fields, spec, missing), routing)
    if experts is not None:
        experts = replace(experts, normed=fields.flag("norm_topk_prob", True))
    return replace(spec, experts=experts, other_parts=_predictors(fields, spec, 1))


def read_glm(fields: ConfigFields) -> ModelSpec:
    rotated = fields.values.get("qk_rope_head_dim", GLM["qk_rope_head_dim"])
    if fields.values.get("head_dim", rotated) != rotated:  # two names for one field there
        raise wrong_value("head_dim", fields.values["head_dim"], "what qk_rope_head_dim is")
    return read_v3(fields, GLM)


def read_minicpm(fields: ConfigFields) -> ModelSpec:
    spec = _latent_decoder(fields, MINICPM)
    depth = fields.optional_factor("scale_depth", 1.4)
    base = fields.optional_integer("dim_model_base", 256)
    return replace(
        spec,
        embedding_scale=fields.factor("scale_emb", 12),
        residual_scale=1.0 if depth is None else depth / math.sqrt(spec.num_layers),
        logit_scale=1.0 if base is None else base / spec.hidden_size,
    )


def read_youtu(fields: ConfigFields) -> ModelSpec:
    return replace(_latent_decoder(fields, YOUTU_LLM), interleaved=fields.flag("rope_interleave", True))


def _latent_decoder(fields: ConfigFields, missing: Mapping[str, Any]) -> ModelSpec:
    """Return the decoder with latent attention. missing: defaults of the family's config class."""
    heads = fields.integer("num_attention_heads", missing["num_attention_heads"])
    kv_heads = fields.optional_integer("num_key_value_heads", None)
    if kv_heads not in (None, heads):
        raise wrong_value(
            "num_key_value_heads", kv_heads, f"what num_attention_heads is, {heads}: all are made of one latent"
        )
    rotated = fields.integer("qk_rope_head_dim", missing["qk_rope_head_dim"])
    alone = {"num_key_value_heads": 1, "head_dim": rotated}  # transformers too uses qk_rope_head_dim as head_dim
    spec = plain_decoder(ConfigFields(fields.values | alone), missing)
    latent = LatentSpec(
        rank=fields.integer("kv_lora_rank", missing["kv_lora_rank"]),
        nope_dim=fields.integer("qk_nope_head_dim", missing["qk_nope_head_dim"]),
        value_dim=fields.optional_integer("v_head_dim", missing["v_head_dim"]) or spec.hidden_size // heads,
        query_rank=fields.optional_integer("q_lora_rank", missing["q_lora_rank"]) or 0,
    )
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
        raise wrong_value("factor", factor, "a number, where there is an mscale_all_dim")
    return 1.0 if factor <= 1 else float(0.1 * share * math.log(factor) + 1.0)


def _sparse_layers(fields: ConfigFields, spec: ModelSpec, missing: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers that have experts."""
    if fields.values.get("moe_layer_freq", 1) != 1:
        raise wrong_value("moe_layer_freq", fields.values["moe_layer_freq"], "1: transformers does not use it")
    dense = fields.integer("first_k_dense_replace", missing["first_k_dense_replace"], least=0)
    layers = tuple(range(dense, spec.num_layers))
    types = fields.values.get("mlp_layer_types")
    if types is None:
        if missing is GLM and dense != 1:
            raise wrong_value(
                "first_k_dense_replace", dense, "1, or mlp_layer_types given: transformers uses only that"
            )
        return layers
    if (
        not isinstance(types, list)
        or len(types) != spec.num_layers
        or any(kind not in ("dense", "sparse") for kind in types)
    ):
        raise wrong_value("mlp_layer_types", types, f"dense or sparse for each of the {spec.num_layers} layers")
    return tuple(layer for layer, kind in enumerate(types) if kind == "sparse")


def _experts(
    fields: ConfigFields, missing: Mapping[str, Any], layers: tuple[int, ...], routing: Routing
) -> ExpertsSpec | None:
    if not layers:
        return None
    count = fields.integer("n_routed_experts", missing["n_routed_experts"])
    width = fields.integer("moe_intermediate_size", missing["moe_intermediate_size"])
    experts = ExpertsSpec(
        count=count,
        per_token=fields.integer("num_experts_per_tok", missing.get("num_experts_per_tok")),
        width=width,
        layers=layers,
        normed=False,
        shared_width=width * fields.integer("n_shared_experts", missing["n_shared_experts"]),
        shared="shared_experts",
        shared_gate=False,
        routing=routing,
    )
    if count % routing.groups or (routing.sigmoid and count // routing.groups < 2):
        raise wrong_value("n_group", routing.groups, f"a divisor of the {count} experts, with two or more in a group")
    if routing.groups_kept > routing.groups or experts.per_token > count // routing.groups * routing.groups_kept:
        raise wrong_value(
            "topk_group",
            routing.groups_kept,
            f"some of {routing.groups} groups, with {experts.per_token} experts in them",
        )
    return checked(experts)


def _predictors(fields: ConfigFields, spec: ModelSpec, missing: int) -> tuple[str, ...]:
    """Return the name prefixes of multi-token prediction (MTP) layers after the model's own; they are not read."""
    named = next((n for n in ("num_nextn_predict_layers", "num_mtp_layers") if fields.values.get(n) is not None), "")
    count = fields.integer(named, least=0) if named else missing
    return tuple(
        f"{base}layers.{spec.num_layers + i}." for i in range(min(count, MOST_PREDICTORS)) for base in ("", "model.")
    )


def _expect(fields: ConfigFields, name: str, only: str) -> None:
    found = fields.values.get(name, only)
    if found != only:
        raise UsageError(
            f"{name} in config.json is {shown(found)}, and only {only} is implemented for this family",
            "use another model",
        )


DEEPSEEK_V2 = Family("deepseek_v2", ("DeepseekV2ForCausalLM", "DeepseekV2Model"), V2_FIELDS, read_v2)
DEEPSEEK_V3 = Family("deepseek_v3", ("DeepseekV3ForCausalLM", "DeepseekV3Model"), V3_FIELDS, read_v3)
GLM4_MOE_LITE = Family("glm4_moe_lite", ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteModel"), GLM_FIELDS, read_glm)
MINICPM3 = Family("minicpm3", ("MiniCPM3ForCausalLM", "MiniCPM3Model"), MINICPM_FIELDS, read_minicpm)
YOUTU = Family("youtu", ("YoutuForCausalLM", "YoutuModel"), YOUTU_FIELDS, read_youtu)
