"""Layers of a prefill with few rows as CUDA graphs, so that the GPU does not wait for the host's launches.

A layer is one graph, with what `Steps` do in it (`LayerWork`). Graphs are kept by layer, work, and bucket of rows and
context. Rows that fill a bucket write to a spare block, attend to nothing (`cu_rows` excludes them), and no other row
depends on them.

A layer without a graph launches every kernel as usual, and `capture_next` captures it when the engine is idle: a
question waits for one capture at most, and a process that answers one question makes none. Only if several prompts in a
row have found neither a graph nor an idle engine, each of them captures a few layers."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from cacheblend_kernels import AttentionMetadata
from torch import Tensor

from cacheblend_cli.kv.forward import Activations, FreshKV, LayerStep, LayerWork, Steps, attend, rotate_and_write
from cacheblend_cli.kv.pool import KVPool, upload
from cacheblend_cli.kv.rows import LEAST_KV_BUCKET, Rows, bucket
from cacheblend_cli.model.decoder import Decoder, DecoderLayer
from cacheblend_cli.model.rope import CosSin

logger = logging.getLogger("cacheblend")

MOST_ROWS = 1024  # with more, a layer of an 8B takes an H100 longer than its launches take the host
NARROW_TILE, WIDE_TILE = 64, 128  # granularity of rows up to two wide tiles, and above
MOST_BUCKETS = 48
PATIENCE = 8  # passes without a layer's graph, after which one captures it
CAPTURES_A_PASS = 2


@dataclass(frozen=True)
class Buffers:
    """Tensors that the graphs of every bucket read and write, with MOST_ROWS rows."""

    delta: Tensor  # [rows, hidden_size]
    residual: Tensor  # [rows, hidden_size]
    positions: Tensor  # [rows] int64
    slots: Tensor  # [rows] int64
    rotations: tuple[CosSin, ...]  # cos and sin [rows, head_dim] fp32 of each RoPE
    cu_rows: Tensor  # [2] int32
    block_table: Tensor  # [1, blocks of the longest context] int32
    kv_lens: Tensor  # [1] int32
    spare_slots: Tensor  # [rows] int64, of rows that fill a bucket

    @classmethod
    def of(cls, decoder: Decoder, num_blocks: int, spare_slots: list[int]) -> Buffers:
        """num_blocks: of the longest context."""
        device = decoder.device
        delta, residual = (
            torch.zeros(MOST_ROWS, decoder.spec.hidden_size, dtype=decoder.dtype, device=device) for _ in range(2)
        )
        positions, slots = (torch.zeros(MOST_ROWS, dtype=torch.int64, device=device) for _ in range(2))
        rotations = tuple(
            (torch.zeros(MOST_ROWS, cos.shape[1], device=device), torch.zeros(MOST_ROWS, sin.shape[1], device=device))
            for cos, sin in decoder.rope.tables(1)
        )
        return cls(
            delta, residual, positions, slots, rotations,
            cu_rows=torch.zeros(2, dtype=torch.int32, device=device),
            block_table=torch.zeros(1, num_blocks, dtype=torch.int32, device=device),
            kv_lens=torch.zeros(1, dtype=torch.int32, device=device),
            spare_slots=upload(spare_slots, device),
        )  # fmt: skip

    def first(self, num_rows: int) -> Buffers:
        """Return the first rows of every buffer."""
        rotations = tuple((cos[:num_rows], sin[:num_rows]) for cos, sin in self.rotations)
        names = ("delta", "residual", "positions", "slots")
        return replace(self, **{name: getattr(self, name)[:num_rows] for name in names}, rotations=rotations)

    def reset(self) -> None:
        """Let a layer write to the spare block alone."""
        self.slots.copy_(self.spare_slots)
        self.cu_rows.zero_()
        self.kv_lens.zero_()


class Bucket(NamedTuple):
    """Passes that share graphs."""

    num_rows: int
    context: int
    work: Hashable  # key of a layer's work


class Part(NamedTuple):
    """What a graph computes: a layer, or its queries alone if the pass stops after them."""

    layer: DecoderLayer
    stop: bool


@dataclass
class Captured:
    """Graphs of a bucket, and the work they hold."""

    twin: LayerWork
    replays: dict[Part, Callable[[], None]] = field(default_factory=dict)
    missing: dict[Part, int] = field(default_factory=dict)  # number of passes that found no graph


class LayerGraphs:
    """Graphs of a decoder's layers over a pool, which must outlive them. spare: block of the pool whose contents do not
    matter."""

    def __init__(self, decoder: Decoder, pool: KVPool, spare: int) -> None:
        self._decoder, self._pool, self.is_on = decoder, weakref.ref(pool), True
        self.num_missed = self.num_in_passes = 0  # layers without a graph, and captures that a pass waited for
        self._most_tokens = min(decoder.spec.max_context, pool.allocator.num_blocks * pool.block_size)
        size = pool.block_size
        self._new_buffers = partial(
            Buffers.of, decoder, pool.blocks_for(self._most_tokens), [spare * size + i % size for i in range(MOST_ROWS)]
        )
        self._buffers: Buffers | None = None
        self._owner: Activations | None = None  # of the pass that used the buffers last
        self._rows: weakref.ref[Rows] | None = None  # of the pass whose values the buffers hold
        self._works = weakref.WeakSet[LayerWork]()  # of that pass, whose values the twins hold
        self._buckets: dict[Bucket, Captured] = {}
        self._stream, self._memory = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # of all captures

    def __call__(self, layer: DecoderLayer, between: Activations, rows: Rows, step: LayerStep, steps: Steps) -> bool:
        """Compute a layer: replay its graph, and put its results. Returns False, and does nothing, if it cannot."""
        if not (self.is_on and layer.own_kv and layer.index > 0 and step.kv_rows is None and step.next_rows is None):
            return False
        few = 0 < len(rows) <= MOST_ROWS and rows.attention.num_seqs == 1 and not rows.decode
        if not (few and 0 < rows.attention.max_kv_len <= self._most_tokens) or (work := steps.work(layer)) is None:
            return False
        context = min(bucket(rows.attention.max_kv_len, LEAST_KV_BUCKET), self._most_tokens)
        key, part = Bucket(row_bucket(len(rows)), context, work.key), Part(layer, step.stop)
        try:
            captured = self._captured(key, work)
            if part not in captured.replays and not self._captures(captured, part):
                return False
            self._fill(rows, key)
        except torch.OutOfMemoryError as error:
            self._stop(error)
            return False
        if work is not captured.twin and work not in self._works:
            work.enter(captured.twin, rows)
            self._works.add(work)
        if not between.shared:
            self._enter(len(rows), between)
        self._play(key, part)
        return True

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture a layer's graph that a pass has missed. Returns False if there is none. For an idle engine: no pass
        may be in the middle of a layer."""
        missing = [(key, part) for key, captured in self._buckets.items() for part in captured.missing]
        if not (missing and self.is_on):
            return False
        key, part = missing[0]
        try:
            self._leave()
            if self._owner is not None and self._owner.shared:
                self._owner.put(*self._owner.take())
            self._buffers = self._buffers or self._new_buffers()
            self._buffers.reset()
            self._buckets[key].twin.reset()
            self._play(key, part)
        except RuntimeError as error:
            self._stop(error)
        return self.is_on

    def _captured(self, key: Bucket, work: LayerWork) -> Captured:
        """Return the bucket's graphs. A new bucket takes the place of the one used least recently."""
        captured = self._buckets.pop(key, None)
        if captured is None:
            if len(self._buckets) >= MOST_BUCKETS:
                self._leave()  # the twins of a paused pass may be among those that go
                del self._buckets[next(iter(self._buckets))]
            captured = Captured(work.twin(key.num_rows, key.context))
        self._buckets[key] = captured
        return captured

    def _captures(self, captured: Captured, part: Part) -> bool:
        """Record that the part has no graph. Returns whether this pass makes it."""
        captured.missing[part] = misses = captured.missing.get(part, 0) + 1
        self.num_missed += 1
        is_due = misses > PATIENCE + part.layer.index // CAPTURES_A_PASS  # a few layers in each pass
        self.num_in_passes += is_due
        return is_due

    def _fill(self, rows: Rows, key: Bucket) -> None:
        """Fill the buffers with what the graphs read in every layer of a pass."""
        if self._rows is not None and self._rows() is rows:
            return
        self._leave()
        self._buffers = self._buffers or self._new_buffers()
        self._rows = weakref.ref(rows)
        own, padded, meta = self._buffers.first(len(rows)), self._buffers.first(key.num_rows), rows.attention
        num_blocks = min(own.block_table.shape[1], meta.block_table.shape[1])
        there = [own.positions, own.slots, padded.slots[len(rows) :], *chain(*own.rotations)]
        here = [rows.positions, rows.slots, own.spare_slots[: key.num_rows - len(rows)], *chain(*rows.rotations)]
        there += [own.block_table[:, :num_blocks], own.cu_rows, own.kv_lens]
        here += [meta.block_table[:, :num_blocks], meta.cu_rows, meta.kv_lens]
        torch._foreach_copy_(there, here)

    def _leave(self) -> None:
        """Take the values of a pass out of the buffers and twins."""
        self._rows = None
        for work in self._works:
            work.leave()
        self._works.clear()

    def _enter(self, num_rows: int, between: Activations) -> None:
        """Move a pass's activations into the buffers, and those of the pass before it out."""
        if self._owner is not None and self._owner.shared:
            self._owner.put(*self._owner.take())
        assert self._buffers is not None
        own, (delta, residual) = self._buffers.first(num_rows), between.take()
        assert residual is not None, "the first layer is not a graph"
        own.delta.copy_(delta)
        own.residual.copy_(residual)
        between.put(own.delta, own.residual, shared=True)
        self._owner = between

    def _compute(self, part: Part, key: Bucket, twin: LayerWork, buffers: Buffers, pool: KVPool) -> None:
        """Compute a layer over the buffers."""
        layer = part.layer
        rows, table = buffers.first(key.num_rows), buffers.block_table[:, : pool.blocks_for(key.context)]
        meta = AttentionMetadata(rows.positions, rows.cu_rows, table, rows.kv_lens, max_kv_len=key.context)
        launch = Rows(pool, rows.positions, rows.slots, rows.rotations, meta)
        h, residual = self._decoder.input_norm(layer, rows.delta, rows.residual)
        q, k, v = layer.project_qkv(h)
        twin.fresh(FreshKV(layer, launch, h, k, v))
        rotated = rotate_and_write(layer, q, k, v, launch)
        assert rotated is not None
        q = layer.scale_queries(rotated, rows.positions)
        twin.queries(layer, q, launch)
        if part.stop:
            return
        delta, residual = layer.finish(attend(layer, q, launch), residual)
        rows.delta.copy_(delta)
        if residual.data_ptr() != rows.residual.data_ptr():  # else it was updated in place
            rows.residual.copy_(residual)

    def _play(self, key: Bucket, part: Part) -> None:
        """Replay a layer, or run it and capture it."""
        captured, pool = self._buckets[key], self._pool()
        if part in captured.replays:
            return captured.replays[part]()
        assert self._buffers is not None
        assert pool is not None
        function = partial(self._compute, part, key, captured.twin, self._buffers, pool)
        function()
        try:
            captured.replays[part] = self._capture(function)
            del captured.missing[part]
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
        self._leave()
        self._buckets.clear()


def row_bucket(num_rows: int) -> int:
    """Round up to whole tiles."""
    tile = NARROW_TILE if num_rows <= 2 * WIDE_TILE else WIDE_TILE
    return -(-num_rows // tile) * tile
