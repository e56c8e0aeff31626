"""Parts shared by BLOOM, MPT and Falcon: ALiBi, LayerNorms, a fused qkv_proj, an MLP without a gate, their own tensor
names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.reader import ConfigFields, plain_decoder
from cacheblend_cli.model.spec import ModelSpec

OUTER = {"model.embed_tokens": "word_embeddings", "model.layers": "h", "model.norm": "ln_f"}
NAMES = {
    "qkv_proj": "self_attention.query_key_value", "o_proj": "self_attention.dense",
    "up_proj": "mlp.dense_h_to_4h", "down_proj": "mlp.dense_4h_to_h",
}  # fmt: skip


def fused_decoder(
    fields: ConfigFields, own: Mapping[str, Sequence[str]], fixed: Mapping[str, Any], missing: Mapping[str, Any]
) -> ModelSpec:
    """Return a decoder with LayerNorms, fused q, k and v of one head size, and an MLP of up, activation and down.

    own: per size of `plain_decoder` the names a config may have for it; the first one present counts. fixed: fields
    that the family does not read from its config. The MLP is four times as wide as the hidden size unless `own` or
    `fixed` has intermediate_size.
    """
    sizes = {}
    for name, names in own.items():
        sizes[name] = fields.integer(next((n for n in names if n in fields.values), names[0]), missing.get(name))
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if hidden % heads:
        raise UsageError(f"a hidden size of {hidden} does not divide into {heads} attention heads", "check config.json")
    sizes = {"num_key_value_heads": heads, "head_dim": hidden // heads, "intermediate_size": 4 * hidden} | sizes
    spec = plain_decoder(ConfigFields({**fields.values, **sizes, **fixed}), missing, eps="layer_norm_epsilon")
    return replace(spec, layer_norm=True, gated_mlp=False, fused=("qkv_proj",))


def with_alibi(spec: ModelSpec, steepest: float = 8.0, factor: float = 1.0) -> ModelSpec:
    """Return the spec with ALiBi in place of RoPE. steepest: exponent of the last slope, see `slopes`; factor: on the
    bias."""
    alibi = tuple(slope * factor for slope in slopes(spec.num_heads, steepest))
    return replace(spec, unrotated=tuple(range(spec.num_layers)), alibi=alibi)


def slopes(num_heads: int, steepest: float = 8.0) -> list[float]:
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
