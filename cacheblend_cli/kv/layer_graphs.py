"""Layers of a prefill with few rows as CUDA graphs, so that the GPU does not wait for the host's launches.

A layer is two graphs: input norm and QKV projection; RoPE with the cache write, attention and MLP. `Steps` observes in
between and afterwards, as without graphs. Graphs are kept by layer and bucket of rows and context. Rows that fill a
bucket write to a spare block, attend to nothing (`cu_rows` excludes them), and no other row depends on them.

A bucket's first pass launches every kernel as usual, since a process that answers one question has no use for graphs.
The second pass runs over the buffers and captures each layer after it; later passes replay.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from cacheblend_kernels import AttentionMetadata
from torch import Tensor

from cacheblend_cli.kv.forward import Activations, FreshKV, LayerStep, Steps, attend, rotate_and_write
from cacheblend_cli.kv.pool import KVPool, upload
from cacheblend_cli.kv.rows import LEAST_KV_BUCKET, Rows, bucket
from cacheblend_cli.model.decoder import Decoder, DecoderLayer
from cacheblend_cli.model.rope import CosSin

logger = logging.getLogger("cacheblend")

MOST_ROWS = 1024  # with more, a layer of an 8B takes an H100 longer than its launches take the host
NARROW_TILE, WIDE_TILE = 64, 128  # granularity of rows up to two wide tiles, and above
MOST_BUCKETS = 32  # further ones are not captured


@dataclass(frozen=True)
class Buffers:
    """Tensors that the graphs of every bucket read and write, with MOST_ROWS rows."""

    delta: Tensor  # [rows, hidden_size]; between a layer's graphs the normed input
    residual: Tensor  # [rows, hidden_size]
    q: Tensor  # [rows, num_heads, head_dim]; rotated after the second graph
    k: Tensor  # [rows, num_kv_heads, head_dim], before RoPE
    v: Tensor  # [rows, num_kv_heads, head_dim]
    positions: Tensor  # [rows] int64
    slots: Tensor  # [rows] int64
    rotations: tuple[CosSin, ...]  # cos and sin [rows, head_dim] fp32 of each RoPE
    cu_rows: Tensor  # [2] int32
    block_table: Tensor  # [1, blocks of the longest context] int32
    kv_lens: Tensor  # [1] int32
    spare_slots: Tensor  # [WIDE_TILE] int64, of rows that fill a bucket

    @classmethod
    def of(cls, decoder: Decoder, num_blocks: int, spare_slots: list[int]) -> Buffers:
        """num_blocks: of the longest context."""
        spec, device, dtype = decoder.spec, decoder.device, decoder.dtype
        q, k, v = (
            torch.zeros(MOST_ROWS, heads, spec.head_dim, dtype=dtype, device=device)
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        delta, residual = (torch.zeros(MOST_ROWS, spec.hidden_size, dtype=dtype, device=device) for _ in range(2))
        positions, slots = (torch.zeros(MOST_ROWS, dtype=torch.int64, device=device) for _ in range(2))
        rotations = tuple(
            (torch.zeros(MOST_ROWS, cos.shape[1], device=device), torch.zeros(MOST_ROWS, sin.shape[1], device=device))
            for cos, sin in decoder.rope.tables(1)
        )
        return cls(
            delta, residual, q, k, v, positions, slots, rotations,
            cu_rows=torch.zeros(2, dtype=torch.int32, device=device),
            block_table=torch.zeros(1, num_blocks, dtype=torch.int32, device=device),
            kv_lens=torch.zeros(1, dtype=torch.int32, device=device),
            spare_slots=upload(spare_slots, device),
        )  # fmt: skip

    def first(self, num_rows: int) -> Buffers:
        """Return the first rows of every buffer."""
        rotations = tuple((cos[:num_rows], sin[:num_rows]) for cos, sin in self.rotations)
        names = ("delta", "residual", "q", "k", "v", "positions", "slots")
        return replace(self, **{name: getattr(self, name)[:num_rows] for name in names}, rotations=rotations)


@dataclass(frozen=True)
class Filled:
    """Rows in the buffers."""

    bucket: tuple[int, int]  # rows, and context
    own: Buffers
    padded: Buffers  # all rows of the bucket


class LayerGraphs:
    """Graphs of a decoder's layers over a pool, which must outlive them. spare: block of the pool whose contents do not
    matter."""

    def __init__(self, decoder: Decoder, pool: KVPool, spare: int) -> None:
        self._decoder, self.is_on = decoder, True
        self._most_tokens = min(decoder.spec.max_context, pool.allocator.num_blocks * pool.block_size)
        size = pool.block_size
        self._new_buffers = partial(
            Buffers.of, decoder, pool.blocks_for(self._most_tokens), [spare * size + i % size for i in range(WIDE_TILE)]
        )
        self._buffers: Buffers | None = None
        self._owner: Activations | None = None  # of the pass that used the buffers last
        self._rows: weakref.ref[Rows] | None = None  # of that pass; the pool they hold may end before the graphs
        self._filled: Filled | None = None  # with these rows; None: they are computed without graphs
        self._num_passes: Counter[tuple[int, int]] = Counter()  # by bucket
        self._graphs: dict[tuple[int, int], dict[tuple[int, int], Callable[[], None]]] = {}  # by bucket, layer and half
        self._stream, self._memory = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # of all captures

    def __call__(self, layer: DecoderLayer, between: Activations, rows: Rows, step: LayerStep, steps: Steps) -> bool:
        """Compute a layer: call `steps`, and put its results. Returns False, and does nothing, if it cannot."""
        simple = step.kv_rows is None and step.next_rows is None and not step.stop and layer.own_kv and layer.index > 0
        few = 0 < len(rows) <= MOST_ROWS and rows.attention.num_seqs == 1 and not rows.decode
        fits = 0 < rows.attention.max_kv_len <= self._most_tokens
        if not (self.is_on and simple and few and fits and type(steps).attended is Steps.attended):
            return False
        if self._rows is None or self._rows() is not rows:
            self._rows, self._filled = weakref.ref(rows), self._fill(rows)
        if (filled := self._filled) is None:
            return False
        own = filled.own
        if not between.shared:
            self._enter(own, between)
        self._play(filled, (layer.index, 0), partial(self._project, layer, filled))
        steps.fresh(FreshKV(layer, rows, own.delta, own.k, own.v))
        self._play(filled, (layer.index, 1), partial(self._attend, layer, filled, rows.pool))
        steps.queries(layer, own.q, rows)
        return True

    def _fill(self, rows: Rows) -> Filled | None:
        """Fill the buffers with what the graphs of the rows' bucket read in every layer. Returns None if this pass runs
        without graphs."""
        num_rows, meta = row_bucket(len(rows)), rows.attention
        key = num_rows, min(bucket(meta.max_kv_len, LEAST_KV_BUCKET), self._most_tokens)
        self._num_passes[key] += 1
        if self._num_passes[key] == 1 or (key not in self._graphs and len(self._graphs) >= MOST_BUCKETS):
            return None
        if self._buffers is None:
            try:
                self._buffers = self._new_buffers()
            except torch.OutOfMemoryError as error:
                self._stop(error)
                return None
        filled = Filled(key, self._buffers.first(len(rows)), self._buffers.first(num_rows))
        own, num_blocks = filled.own, min(self._buffers.block_table.shape[1], meta.block_table.shape[1])
        own.positions.copy_(rows.positions)
        own.slots.copy_(rows.slots)
        filled.padded.slots[len(rows) :].copy_(own.spare_slots[: num_rows - len(rows)])
        for (cos, sin), (own_cos, own_sin) in zip(own.rotations, rows.rotations, strict=True):
            cos.copy_(own_cos)
            sin.copy_(own_sin)
        own.block_table[:, :num_blocks].copy_(meta.block_table[:, :num_blocks])
        own.cu_rows.copy_(meta.cu_rows)
        own.kv_lens.copy_(meta.kv_lens)
        return filled

    def _enter(self, own: Buffers, between: Activations) -> None:
        """Move a pass's activations into the buffers, and those of the pass before it out."""
        if self._owner is not None and self._owner.shared:
            self._owner.put(*self._owner.take())
        delta, residual = between.take()
        assert residual is not None, "the first layer is not a graph"
        own.delta.copy_(delta)
        own.residual.copy_(residual)
        between.put(own.delta, own.residual, shared=True)
        self._owner = between

    def _project(self, layer: DecoderLayer, filled: Filled) -> None:
        """Compute the first half of a layer: everything before `Steps.fresh`."""
        rows = filled.padded
        h, residual = self._decoder.input_norm(layer, rows.delta, rows.residual)
        for buffer, value in zip((rows.q, rows.k, rows.v), layer.project_qkv(h), strict=True):
            buffer.copy_(value)
        rows.delta.copy_(h)
        _keep(rows.residual, residual)

    def _attend(self, layer: DecoderLayer, filled: Filled, pool: KVPool) -> None:
        """Compute the second half of a layer."""
        rows, context = filled.padded, filled.bucket[1]
        table = rows.block_table[:, : pool.blocks_for(context)]
        meta = AttentionMetadata(rows.positions, rows.cu_rows, table, rows.kv_lens, max_kv_len=context)
        launch = Rows(pool, rows.positions, rows.slots, rows.rotations, meta)
        rotated = rotate_and_write(layer, rows.q, rows.k, rows.v, launch)
        assert rotated is not None
        rows.q.copy_(layer.scale_queries(rotated, rows.positions))
        delta, residual = layer.finish(attend(layer, rows.q, launch), rows.residual)
        rows.delta.copy_(delta)
        _keep(rows.residual, residual)

    def _play(self, filled: Filled, half: tuple[int, int], function: Callable[[], None]) -> None:
        """Replay half a layer, or run it and capture it for the next pass."""
        graphs = self._graphs.setdefault(filled.bucket, {}) if self.is_on else {}
        if half in graphs:
            return graphs[half]()
        function()
        if self.is_on:
            try:
                graphs[half] = self._capture(function)
            except RuntimeError as error:
                self._stop(error)
        return None

    def _capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Capture a function that has run. Results are in the buffers, so graphs may reuse each other's memory.
        `torch.cuda.graph` would wait for the device and empty PyTorch's cache."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay

    def _stop(self, error: RuntimeError) -> None:
        """Use no graphs from now on, and free them."""
        logger.warning("layers of a prefill run without CUDA graphs from now on: %s", str(error).splitlines()[0])
        torch.cuda.synchronize(self._decoder.device)
        self.is_on = False
        self._graphs.clear()


def _keep(buffer: Tensor, value: Tensor) -> None:
    if value.data_ptr() != buffer.data_ptr():  # else it was updated in place
        buffer.copy_(value)


def row_bucket(num_rows: int) -> int:
    """Round up to whole tiles."""
    tile = NARROW_TILE if num_rows <= 2 * WIDE_TILE else WIDE_TILE
    return -(-num_rows // tile) * tile
