"""A plain pass of rows through all layers: what collect, decode and teacher forcing use. Blending is in blend.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cacheblend_cli.engine.kv_pool import KVPool, PagedSequence
from cacheblend_cli.engine.rows import Rows, rows_of
from cacheblend_cli.model.decoder import Decoder, DecoderLayer

Capture = Callable[[int, Tensor, Tensor], None]
"""(layer, k before RoPE, v), both [num_rows, num_kv_heads, head_dim]: called once a layer."""


def attend(layer: DecoderLayer, q: Tensor, pool: KVPool, rows: Rows) -> Tensor:
    """Scattered-row attention of rotated q [num_rows, num_heads, head_dim] over the layer's pool."""
    return layer.kernels.prefill_attention(
        q,
        pool.k[layer.index],
        pool.v[layer.index],
        rows.attention,
        scale=layer.spec.head_dim**-0.5,
        sliding_window=layer.sliding_window,
    )


def forward(
    decoder: Decoder,
    pool: KVPool,
    rows: Rows,
    token_ids: Tensor,
    *,
    capture: Capture | None = None,
    attended: Callable[[int, Tensor], None] | None = None,
    output: bool = True,
) -> Tensor | None:
    """Compute every row at every layer, writing K and V to the pool. token_ids: [num_rows] int64.

    attended: called with (layer, attention output [num_rows, num_heads, head_dim] before o_proj).
    Returns fp32 logits [num_rows, vocab_size], or None with output False (collect needs none, and then the last
    layer stops after its K and V).
    """
    delta, residual = decoder.embed(token_ids), None
    for layer in decoder.layers:
        h, residual = decoder.input_norm(layer, delta, residual)
        del delta  # what is not needed any more goes before the MLP: activations are most of a pass's memory
        last = layer.index == len(decoder.layers) - 1
        if last and not output:
            k, v = layer.project_kv(h)
            if capture:
                capture(layer.index, k, v)
            write_kv(layer, k, v, pool, rows)
            return None
        q, k, v = layer.project_qkv(h)
        del h
        if capture:
            capture(layer.index, k, v)
        q_rotated = decoder.kernels.rope_and_cache(
            q, k, v, rows.cos, rows.sin, pool.k[layer.index], pool.v[layer.index], rows.slots
        )
        assert q_rotated is not None
        del q, k, v
        delta, residual = layer.finish(_shown(layer, attend(layer, q_rotated, pool, rows), attended), residual)
    assert residual is not None
    return decoder.logits(delta, residual)


def _shown(layer: DecoderLayer, output: Tensor, attended: Callable[[int, Tensor], None] | None) -> Tensor:
    """The attention output, passed on; nothing here holds it longer than the caller does."""
    if attended:
        attended(layer.index, output)
    return output


def write_kv(layer: DecoderLayer, k: Tensor, v: Tensor, pool: KVPool, rows: Rows) -> None:
    """Rotate K and write both to the rows' slots of the layer."""
    layer.kernels.rope_and_cache(None, k, v, rows.cos, rows.sin, pool.k[layer.index], pool.v[layer.index], rows.slots)


def decode_one_token(decoder: Decoder, pool: KVPool, sequence: PagedSequence, token_id: int, position: int) -> Tensor:
    """Status DECODE: one row a sequence, paged attention over everything before it. Returns fp32 logits [vocab_size]."""
    sequence.ensure(position + 1)
    sequence.make_writable(position, position + 1)
    rows = rows_of(
        decoder,
        sequence,
        torch.tensor([position], device=decoder.device),
        kv_len=position + 1,
        rope_len=position + 1,
    )
    delta, residual = decoder.embed(torch.tensor([token_id], device=decoder.device)), None
    for layer in decoder.layers:
        h, residual = decoder.input_norm(layer, delta, residual)
        q, k, v = layer.project_qkv(h)
        q_rotated = decoder.kernels.rope_and_cache(
            q, k, v, rows.cos, rows.sin, pool.k[layer.index], pool.v[layer.index], rows.slots
        )
        assert q_rotated is not None
        attended = decoder.kernels.decode_attention(
            q_rotated,
            pool.k[layer.index],
            pool.v[layer.index],
            rows.attention.block_table,
            rows.attention.kv_lens,
            scale=decoder.spec.head_dim**-0.5,
            sliding_window=layer.sliding_window,
            contiguous_slot=rows.attention.contiguous_slot,
            max_kv_len=position + 1,
        )
        delta, residual = layer.finish(attended, residual)
    assert residual is not None
    return decoder.logits(delta, residual)[0]
