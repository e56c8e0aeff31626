"""MPT: ALiBi, LayerNorms and projections without biases, and in some models q, k and v clipped to a range."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.alibi import fused_decoder, transformer, with_alibi
from cacheblend_cli.model.families.reader import OTHER_FIELDS, ConfigFields, Family
from cacheblend_cli.model.families.values import shown, wrong_value
from cacheblend_cli.model.spec import ModelSpec

SIZES = {
    "hidden_size": ("d_model", "hidden_size"),
    "num_hidden_layers": ("n_layers", "num_hidden_layers"),
    "num_attention_heads": ("n_heads", "num_attention_heads"),
    "max_position_embeddings": ("max_seq_len",),
}
FIELDS = (
    *(name for names in SIZES.values() for name in names), "layer_norm_epsilon", "attn_config", "no_bias", "norm_type",
    "expansion_ratio", "learned_pos_emb", "resid_pdrop", "emb_pdrop", "init_device", "embedding_fraction",
)  # fmt: skip
MISSING = {
    "vocab_size": 50368, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
    "max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
FIXED = {"hidden_act": "gelu", "mlp_bias": False, "attention_bias": False}
# Fields of attn_config with their implemented values; other fields do not affect the forward pass.
ATTENTION: dict[str, tuple[Any, ...]] = {
    "attn_type": ("multihead_attention",),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "attn_uses_sequence_id": (False,),
    "alibi": (True,),
    "rope": (False,),
    "qk_gn": (False,),
    "sliding_window_size": (-1,),
}
FREE = ("attn_pdrop", "attn_impl", "clip_qkv", "softmax_scale", "alibi_bias_max", "rope_impl", "rope_theta", "rope_dail_config",
        "rope_hf_config")  # fmt: skip
OUTER = {"model.embed_tokens": "wte", "model.layers": "blocks", "model.norm": "norm_f"}
NAMES = (
    ("qkv_proj", "attn.Wqkv"),
    ("o_proj", "attn.out_proj"),
    ("up_proj", "ffn.up_proj"),
    ("down_proj", "ffn.down_proj"),
)
NORMS = (("attention_in", "norm_1"), ("mlp_in", "norm_2"))


def read(fields: ConfigFields) -> ModelSpec:
    for name, value in (("no_bias", True), ("norm_type", "low_precision_layernorm"), ("expansion_ratio", 4)):
        if fields.values.get(name, value) != value:
            raise wrong_value(name, fields.values[name], f"{shown(value)}: transformers computes no other MPT")
    attention = _attention(fields)
    spec = replace(fused_decoder(fields, SIZES, FIXED, MISSING), norms=NORMS, renamed=NAMES, outer=transformer(OUTER))
    spec = with_alibi(spec, attention.factor("alibi_bias_max", 8))
    return replace(
        spec,
        attention_scale=attention.optional_factor("softmax_scale", None),
        qkv_clip=attention.optional_factor("clip_qkv", None) if attention.values.get("clip_qkv") else None,
    )


def _attention(fields: ConfigFields) -> ConfigFields:
    """Return the fields of attn_config. Raises UsageError naming a field that is not implemented."""
    given = fields.values.get("attn_config") or {}
    if not isinstance(given, dict):
        raise wrong_value("attn_config", given, "an object or null")
    for name, value in given.items():
        known = (
            name in (*FREE, *OTHER_FIELDS)
            or name.startswith("_")
            or value in (None, *ATTENTION.get(name, (False, 0, "", {}, [])))
        )
        if not known:
            raise UsageError(
                f"attn_config in config.json has {name} = {shown(value)}, which is not implemented",
                "use another model; or take the field out of config.json, if the model was made without it",
            )
    return ConfigFields(given)


MPT = Family("mpt", ("MptForCausalLM", "MptModel", "MPTForCausalLM"), FIELDS, read)
