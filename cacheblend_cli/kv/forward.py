"""A plain pass of rows through all layers: what collect and decode use. Blending is in blend.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from cacheblend_cli.kv.device import upload
from cacheblend_cli.kv.pool import KVPool, PagedSequence
from cacheblend_cli.kv.rows import Rows, packed_rows
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
        k_scale=pool.k_scales[layer.index],
        v_scale=pool.v_scales[layer.index],
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
        q_rotated = _rotate_and_write(layer, q, k, v, pool, rows)
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
    _rotate_and_write(layer, None, k, v, pool, rows)


def _rotate_and_write(
    layer: DecoderLayer, q: Tensor | None, k: Tensor, v: Tensor, pool: KVPool, rows: Rows | DecodeRows
) -> Tensor | None:
    """The rotated q; K, rotated, and V are in the rows' slots of the layer."""
    return layer.kernels.rope_and_cache(
        q,
        k,
        v,
        rows.cos,
        rows.sin,
        pool.k[layer.index],
        pool.v[layer.index],
        rows.slots,
        k_scale=pool.k_scales[layer.index],
        v_scale=pool.v_scales[layer.index],
    )


@dataclass(frozen=True)
class DecodeRows:
    """One new row a sequence, at position kv_len - 1.

    slots: [num_seqs] int64; cos, sin: [num_seqs, head_dim] fp32; block_table: [num_seqs, max_blocks] int32; kv_lens:
    [num_seqs] int32; max_kv_len: at least the longest; contiguous_slot: as in AttentionMetadata.
    """

    slots: Tensor
    cos: Tensor
    sin: Tensor
    block_table: Tensor
    kv_lens: Tensor
    max_kv_len: int
    contiguous_slot: int = -1


def decode_step(decoder: Decoder, pool: KVPool, rows: DecodeRows, token_ids: Tensor) -> Tensor:
    """Status DECODE: one row a sequence through all layers, paged attention over everything before it.

    token_ids: [num_seqs] int64. Returns fp32 logits [num_seqs, vocab_size]. Nothing in it looks at a value on the host
    (the torch backend's attention aside), so a CUDA graph can hold it.
    """
    delta, residual = decoder.embed(token_ids), None
    for layer in decoder.layers:
        h, residual = decoder.input_norm(layer, delta, residual)
        q, k, v = layer.project_qkv(h)
        q_rotated = _rotate_and_write(layer, q, k, v, pool, rows)
        assert q_rotated is not None
        attended = decoder.kernels.decode_attention(
            q_rotated,
            pool.k[layer.index],
            pool.v[layer.index],
            rows.block_table,
            rows.kv_lens,
            scale=decoder.spec.head_dim**-0.5,
            sliding_window=layer.sliding_window,
            contiguous_slot=rows.contiguous_slot,
            max_kv_len=rows.max_kv_len,
            k_scale=pool.k_scales[layer.index],
            v_scale=pool.v_scales[layer.index],
        )
        delta, residual = layer.finish(attended, residual)
    assert residual is not None
    return decoder.logits(delta, residual)


def next_rows(decoder: Decoder, sequences: Sequence[PagedSequence], kv_lens: Sequence[int]) -> DecodeRows:
    """The rows after the kv_lens tokens the sequences hold; their blocks are grown and made theirs alone."""
    parts = []
    for sequence, kv_len in zip(sequences, kv_lens, strict=True):
        sequence.ensure(kv_len + 1)
        sequence.make_writable(kv_len, kv_len + 1, decoder.kernels)
        parts.append((sequence, upload([kv_len], decoder.device), kv_len + 1))
    assert len({decoder.rope.regime(n + 1) for n in kv_lens}) == 1, "one launch has one set of RoPE frequencies"
    rows = packed_rows(decoder, parts, max(kv_lens) + 1)
    meta = rows.attention
    return DecodeRows(
        rows.slots, rows.cos, rows.sin, meta.block_table, meta.kv_lens, meta.max_kv_len, meta.contiguous_slot
    )
