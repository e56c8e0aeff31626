"""BLOOM: ALiBi, LayerNorms with biases, another LayerNorm on the embedding, biases everywhere, q, k and v fused head by
head."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.model.families.alibi import NAMES, OUTER, fused_decoder, transformer, with_alibi
from cacheblend_cli.model.families.reader import ConfigFields, Family
from cacheblend_cli.model.spec import ModelSpec

SIZES = {
    "hidden_size": ("n_embed", "hidden_size"),
    "num_hidden_layers": ("n_layer", "num_hidden_layers"),
    "num_attention_heads": ("n_head", "num_attention_heads"),
    "max_position_embeddings": ("seq_length",),
}
FIELDS = (
    *(name for names in SIZES.values() for name in names), "layer_norm_epsilon", "hidden_dropout",
    "slow_but_exact", "pretraining_tp",  # the order of sums
    # options of BLOOM's training code; transformers ignores them
    "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "skip_bias_add",
    "skip_bias_add_qkv",
)  # fmt: skip
MISSING = {
    "vocab_size": 250880, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
FIXED = {"hidden_act": "gelu_pytorch_tanh", "mlp_bias": True, "attention_bias": True}
EMBEDDING_NORM = {"model.embedding_norm": "word_embeddings_layernorm"}


def read(fields: ConfigFields) -> ModelSpec:
    spec = replace(fused_decoder(fields, SIZES, FIXED, MISSING), norm_bias=True, embedding_norm=True, qkv_by_group=True)
    return with_alibi(replace(spec, renamed=tuple(NAMES.items()), outer=transformer(OUTER | EMBEDDING_NORM)))


BLOOM = Family("bloom", ("BloomForCausalLM", "BloomModel"), FIELDS, read)
