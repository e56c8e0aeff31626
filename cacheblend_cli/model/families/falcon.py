"""Falcon: LayerNorms with biases, q, k and v fused by KV head, and RoPE or, in Falcon-RW, ALiBi.

Falcon-7B has one KV head, and parallel attention and MLP. The new decoder (40B, 180B, 11B) has several KV heads, and
usually separate norms for attention and MLP. Falcon-RW has as many KV heads as query heads, and attention before the
MLP.

ALiBi's bias is added before the scores are divided by sqrt(head_dim). transformers rounds slopes and biases to
bfloat16, which shifts a bias by up to 1/256 of itself, so the error grows along the prompt; here they are exact.
"""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.alibi import NAMES, OUTER, fused_decoder, transformer, with_alibi
from cacheblend_cli.model.families.reader import ConfigFields, Family
from cacheblend_cli.model.families.values import wrong_value
from cacheblend_cli.model.spec import ModelSpec

SIZES = {
    "hidden_size": ("n_embed", "hidden_size"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
}
FIELDS = (
    *(name for names in SIZES.values() for name in names), "layer_norm_epsilon", "alibi", "bias", "multi_query", "num_kv_heads",
    "parallel_attn", "new_decoder_architecture", "num_ln_in_parallel_attn", "ffn_hidden_size", "activation", "hidden_dropout",
)  # fmt: skip
MISSING = {
    "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
    "max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
TWO_NORMS = (("attention_in", "ln_attn"), ("mlp_in", "ln_mlp"))


def read(fields: ConfigFields) -> ModelSpec:
    values = fields.values
    new, parallel = fields.flag("new_decoder_architecture"), fields.flag("parallel_attn", True)
    norms = fields.optional_integer("num_ln_in_parallel_attn", None) or (2 if new else 1)
    if norms > (2 if new else 1):
        raise wrong_value("num_ln_in_parallel_attn", norms, "1, or 2 in the new decoder")
    if new and not parallel:
        raise UsageError("config.json has new_decoder_architecture and no parallel_attn", "check config.json")
    bias, act = fields.flag("bias"), values.get("activation", "gelu")
    fixed = {"attention_bias": bias, "mlp_bias": bias, "hidden_act": act}
    if values.get("ffn_hidden_size") is not None:
        fixed["intermediate_size"] = fields.integer("ffn_hidden_size")
    if new or fields.flag("multi_query", True):
        fixed["num_key_value_heads"] = fields.optional_integer("num_kv_heads", None) if new else 1
    spec = replace(fused_decoder(fields, SIZES, fixed, MISSING), norm_bias=True, renamed=tuple(NAMES.items()))
    spec = replace(spec, parallel=parallel, outer=transformer(OUTER), qkv_by_group=spec.num_kv_heads > 1)
    if parallel:
        spec = replace(spec, norms=TWO_NORMS if norms == 2 else spec.norms[:1])
    return with_alibi(spec, factor=spec.head_dim**-0.5) if fields.flag("alibi") else spec


FALCON = Family("falcon", ("FalconForCausalLM", "FalconModel"), FIELDS, read)
