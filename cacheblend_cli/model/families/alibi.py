"""BLOOM, MPT and Falcon: ALiBi, LayerNorms, a fused qkv_proj, an MLP without a gate, their own tensor names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.reader import OTHER_FIELDS, ConfigFields, Family, plain_decoder
from cacheblend_cli.model.families.values import shown, wrong_value
from cacheblend_cli.model.spec import ModelSpec

Sizes = Mapping[str, Sequence[str]]
"""Name in `plain_decoder` -> names that a config may have for it; the first one present counts."""
BLOOM_SIZES = {
    "hidden_size": ("n_embed", "hidden_size"),
    "num_hidden_layers": ("n_layer", "num_hidden_layers"),
    "num_attention_heads": ("n_head", "num_attention_heads"),
    "max_position_embeddings": ("seq_length",),
}
MPT_SIZES = {
    "hidden_size": ("d_model", "hidden_size"),
    "num_hidden_layers": ("n_layers", "num_hidden_layers"),
    "num_attention_heads": ("n_heads", "num_attention_heads"),
    "max_position_embeddings": ("max_seq_len",),
}
FALCON_SIZES = {
    "hidden_size": ("n_embed", "hidden_size"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
}
OUTER = {"model.embed_tokens": "word_embeddings", "model.layers": "h", "model.norm": "ln_f"}
NAMES = (
    ("qkv_proj", "self_attention.query_key_value"),
    ("o_proj", "self_attention.dense"),
    ("up_proj", "mlp.dense_h_to_4h"),
    ("down_proj", "mlp.dense_4h_to_h"),
)
MPT_NAMES = (
    ("qkv_proj", "attn.Wqkv"),
    ("o_proj", "attn.out_proj"),
    ("up_proj", "ffn.up_proj"),
    ("down_proj", "ffn.down_proj"),
)
# Fields of MPT's attn_config with their implemented values; other fields do not affect the forward pass.
MPT_ATTENTION: dict[str, tuple[Any, ...]] = {
    "attn_type": ("multihead_attention",),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "attn_uses_sequence_id": (False,),
    "alibi": (True,),
    "rope": (False,),
    "qk_gn": (False,),
    "sliding_window_size": (-1,),
}
MPT_FREE = ("attn_pdrop", "attn_impl", "clip_qkv", "softmax_scale", "alibi_bias_max", "rope_impl", "rope_theta", "rope_dail_config",
        "rope_hf_config")  # fmt: skip


def fused_decoder(fields: ConfigFields, own: Sizes, **fixed: Any) -> ModelSpec:
    """Return a decoder with LayerNorms, fused q, k and v of one head size, and an MLP of up, activation and down.

    fixed: fields that the family does not read from its config. The MLP is four times as wide as the hidden size unless
    `fixed` has intermediate_size.
    """
    sizes = {}
    for name, names in own.items():
        found = next((n for n in names if n in fields.values), names[0])
        sizes[name] = fields.integer(found, fields.missing.get(name))
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if hidden % heads:
        raise UsageError(f"a hidden size of {hidden} does not divide into {heads} attention heads", "check config.json")
    sizes |= {"num_key_value_heads": heads, "head_dim": hidden // heads, "intermediate_size": 4 * hidden}
    spec = plain_decoder(fields.changed(**{**sizes, **fixed}), eps="layer_norm_epsilon")
    return replace(spec, layer_norm=True, gated_mlp=False, fused=("qkv_proj",))


def with_alibi(spec: ModelSpec, steepest: float = 8.0, factor: float = 1.0) -> ModelSpec:
    """Return the spec with ALiBi instead of RoPE. steepest: exponent of the last slope; factor: on the bias."""
    alibi = tuple(slope * factor for slope in slopes(spec.num_heads, steepest))
    return replace(spec, unrotated=tuple(range(spec.num_layers)), alibi=alibi)


def slopes(num_heads: int, steepest: float) -> list[float]:
    """Return the slope of each head: 2 ** (-steepest * i / n) for n heads, i from 1 (ALiBi, arXiv 2108.12409, section
    3).

    If n is not a power of two: the slopes of the next smaller one, followed by every other slope of the next larger
    one.
    """
    larger = 1 << math.ceil(math.log2(num_heads))
    every = [2.0 ** (-steepest * i / larger) for i in range(1, larger + 1)]
    return every if larger == num_heads else (every[1::2] + every[::2])[:num_heads]


def transformer(names: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return `ModelSpec.outer` for a module named `transformer`."""
    return tuple((ours, f"transformer.{theirs}") for ours, theirs in names.items())


def read_bloom(fields: ConfigFields) -> ModelSpec:
    """BLOOM: LayerNorms with biases, another LayerNorm on the embedding, biases everywhere, q, k and v fused head by
    head."""
    outer = transformer(OUTER | {"model.embedding_norm": "word_embeddings_layernorm"})
    spec = fused_decoder(fields, BLOOM_SIZES, hidden_act="gelu_pytorch_tanh", mlp_bias=True, attention_bias=True)
    spec = replace(spec, norm_bias=True, embedding_norm=True, qkv_by_group=True, renamed=NAMES, outer=outer)
    return with_alibi(spec)


def read_mpt(fields: ConfigFields) -> ModelSpec:
    """MPT: LayerNorms and projections without biases, and in some models q, k and v clipped to a range."""
    for name, value in (("no_bias", True), ("norm_type", "low_precision_layernorm"), ("expansion_ratio", 4)):
        if fields.values.get(name, value) != value:
            raise wrong_value(name, fields.values[name], f"{shown(value)}: transformers computes no other MPT")
    attention = _mpt_attention(fields)
    spec = replace(
        fused_decoder(fields, MPT_SIZES, hidden_act="gelu", mlp_bias=False, attention_bias=False),
        norms=(("attention_in", "norm_1"), ("mlp_in", "norm_2")),
        renamed=MPT_NAMES,
        outer=transformer({"model.embed_tokens": "wte", "model.layers": "blocks", "model.norm": "norm_f"}),
    )
    return replace(
        with_alibi(spec, attention.factor("alibi_bias_max", 8)),
        attention_scale=attention.optional_factor("softmax_scale"),
        qkv_clip=attention.optional_factor("clip_qkv") if attention.values.get("clip_qkv") else None,
    )


def _mpt_attention(fields: ConfigFields) -> ConfigFields:
    """Return the fields of attn_config. Raises UsageError naming a field that is not implemented."""
    given = fields.values.get("attn_config") or {}
    if not isinstance(given, dict):
        raise wrong_value("attn_config", given, "an object or null")
    for name, value in given.items():
        known = (
            name in (*MPT_FREE, *OTHER_FIELDS)
            or name.startswith("_")
            or value in (None, *MPT_ATTENTION.get(name, (False, 0, "", {}, [])))
        )
        if not known:
            raise UsageError(
                f"attn_config in config.json has {name} = {shown(value)}, which is not implemented",
                "use another model; or take the field out of config.json, if the model was made without it",
            )
    return ConfigFields(given, {})


def read_falcon(fields: ConfigFields) -> ModelSpec:
    """Falcon: LayerNorms with biases, q, k and v fused by KV head, and RoPE or, in Falcon-RW, ALiBi.

    Falcon-7B has one KV head, and parallel attention and MLP. The new decoder (40B, 180B, 11B) has several KV heads,
    and usually separate norms for attention and MLP. Falcon-RW has as many KV heads as query heads, and attention
    before the MLP.

    ALiBi's bias is added before the scores are divided by sqrt(head_dim). transformers rounds slopes and biases to
    bfloat16, which shifts a bias by up to 1/256 of itself, so the error grows along the prompt; here they are exact.
    """
    new, parallel = fields.flag("new_decoder_architecture"), fields.flag("parallel_attn", True)
    norms = fields.optional_integer("num_ln_in_parallel_attn") or (2 if new else 1)
    if norms > (2 if new else 1):
        raise wrong_value("num_ln_in_parallel_attn", norms, "1, or 2 in the new decoder")
    if new and not parallel:
        raise UsageError("config.json has new_decoder_architecture and no parallel_attn", "check config.json")
    bias = fields.flag("bias")
    fixed = {"attention_bias": bias, "mlp_bias": bias, "hidden_act": fields.value("activation", "gelu")}
    if fields.values.get("ffn_hidden_size") is not None:
        fixed["intermediate_size"] = fields.integer("ffn_hidden_size")
    if new or fields.flag("multi_query", True):
        fixed["num_key_value_heads"] = fields.optional_integer("num_kv_heads") if new else 1
    spec = replace(
        fused_decoder(fields, FALCON_SIZES, **fixed), norm_bias=True, renamed=NAMES, outer=transformer(OUTER)
    )
    spec = replace(spec, parallel=parallel, qkv_by_group=spec.num_kv_heads > 1)
    if parallel:
        both = (("attention_in", "ln_attn"), ("mlp_in", "ln_mlp"))
        spec = replace(spec, norms=both if norms == 2 else spec.norms[:1])
    return with_alibi(spec, factor=spec.head_dim**-0.5) if fields.flag("alibi") else spec


def _names(sizes: Sizes) -> tuple[str, ...]:
    return tuple(name for names in sizes.values() for name in names)


FAMILIES = (
    Family("bloom", ("BloomForCausalLM", "BloomModel"),
           (*_names(BLOOM_SIZES), "layer_norm_epsilon", "hidden_dropout",
            "slow_but_exact", "pretraining_tp",  # the order of sums
            # options of BLOOM's training code; transformers ignores them
            "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "skip_bias_add",
            "skip_bias_add_qkv"), read_bloom,
           {"vocab_size": 250880, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
            "layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048, "tie_word_embeddings": True}),
    Family("mpt", ("MptForCausalLM", "MptModel", "MPTForCausalLM"),
           (*_names(MPT_SIZES), "layer_norm_epsilon", "attn_config", "no_bias", "norm_type", "expansion_ratio",
            "learned_pos_emb", "resid_pdrop", "emb_pdrop", "init_device", "embedding_fraction"), read_mpt,
           {"vocab_size": 50368, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
            "max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}),
    Family("falcon", ("FalconForCausalLM", "FalconModel"),
           (*_names(FALCON_SIZES), "layer_norm_epsilon", "alibi", "bias", "multi_query", "num_kv_heads", "parallel_attn",
            "new_decoder_architecture", "num_ln_in_parallel_attn", "ffn_hidden_size", "activation", "hidden_dropout"),
           read_falcon,
           {"vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
            "max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}),
)  # fmt: skip
