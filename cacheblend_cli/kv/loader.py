"""Stored KV into the paged pool, layer by layer, ahead of compute.

Threads read blobs out of the LMDB map inside their own read transaction and verify them. On CPU they write straight
into the pool: dequantise, rotate K to its new positions, scatter. For a GPU they copy them, still compressed, into a
pinned ring (`staging.py`); a submitter queues the copies and the same write behind them on streams of their own, with
an event a layer that the compute stream waits for. The computing thread waits until a layer's work is *queued*, never
for the device.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from functools import partial

import torch
from cacheblend_kernels import Slots
from cacheblend_store import ChunkManifest, ChunkStore, StoreError, StoreReader
from cacheblend_store.format.codecs import view_kv
from torch import Tensor

from cacheblend_cli.kv.batch import KVBatch, Rows, batches_of, place_kv, slots_of
from cacheblend_cli.kv.pool import KVPool, PagedSequence
from cacheblend_cli.kv.staging import StagingRing, Transfer, transfer_to
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.prompt.plan import Segment

NUM_SLOTS = 6


class BadChunk(Exception):
    """A cached chunk whose KV cannot be used: missing, corrupt or foreign. The caller computes it instead."""

    def __init__(self, key: bytes, reason: str) -> None:
        super().__init__(reason)
        self.key, self.reason = key, reason


class KVLoader:
    """Loads the cached segments of one prompt. Use as a context manager; `wait(layer)` before a layer's KV is read.

    transfer: how KV gets to the device; by default what the device needs, on CPU nothing. Raises BadChunk where it is
    entered and from `wait`. After the last wait: `num_bytes` read from the store, `load_s` from start to the last layer,
    `stall_s` of it that computing waited (on a GPU measured with events on the compute stream; asking waits for it).
    """

    def __init__(
        self,
        decoder: Decoder,
        store: ChunkStore | None,
        pool: KVPool,
        sequence: PagedSequence,
        segments: Sequence[Segment],
        rope_len: int,
        num_threads: int | None = None,
        transfer: Transfer | None = None,
    ) -> None:
        self._decoder, self._store, self._pool, self._sequence = decoder, store, pool, sequence
        self._segments = [s for s in segments if s.cached and s.token_ids]
        self._rope_len = rope_len
        self._num_layers = decoder.spec.num_layers
        self._transfer = (transfer or transfer_to(decoder.device)) if self._segments else None
        self._ring: StagingRing | None = None
        self._lock = threading.Lock()
        self._next = 0  # tasks handed out: layer-major, so layer 0 is complete first
        self._remaining = [len(self._segments)] * self._num_layers
        self._there = [threading.Event() for _ in range(self._num_layers)]  # the layer's KV, or an error
        self._error: BaseException | None = None
        self._stop = False
        self._started = time.perf_counter()
        self._loaded_at = self._started
        self._stall_s = 0.0
        self.num_bytes = 0
        cores = os.cpu_count() or 1
        most = 4 if self._transfer is None else 8
        wanted = num_threads or (1 if cores <= 2 else min(most, cores // 2))
        target = self._work if self._transfer else self._work_alone
        self._threads = [
            threading.Thread(target=target, name=f"kv-loader-{i}", daemon=True)
            for i in range(min(wanted, len(self._segments)))
        ]
        self._alone = threading.Barrier(len(self._threads) + 1)

    def __enter__(self) -> KVLoader:
        if not self._segments:
            return self
        assert self._store is not None
        with self._store.read() as reader:
            self._manifests = [self._manifest(reader, segment) for segment in self._segments]
        rows = [Rows(s.start, s.end, m.codec) for s, m in zip(self._segments, self._manifests, strict=True)]
        if self._transfer is None:
            self._rows, self._own_places = rows, dict[int, Slots]()
            self._decoder.rope.table(self._rope_len)  # so that threads find it made
        else:
            self._open(self._transfer, rows)
        self._start()
        return self

    def _start(self) -> None:
        """Start the threads. On CPU each runs torch's operations by itself: its OpenMP team would fight that of the
        computing thread for the cores. `set_num_threads` holds for the thread that calls it and for threads that are
        born later, so for the latter it is put back."""
        before = torch.get_num_threads()
        for thread in self._threads:
            thread.start()
        if self._transfer is None:
            self._alone.wait()
            torch.set_num_threads(before)

    def _open(self, transfer: Transfer, rows: Sequence[Rows]) -> None:
        spec = self._decoder.spec
        self._batches = batches_of(rows, spec.num_kv_heads, spec.head_dim)
        self._places = [slots_of(self._decoder, self._sequence, b.rows, self._rope_len) for b in self._batches]
        self._batch_of = [i for i, batch in enumerate(self._batches) for _ in batch.rows]
        num_slots = min(NUM_SLOTS, self._num_layers * len(self._batches))
        self._ring = StagingRing(num_slots, [len(b.rows) for b in self._batches] * self._num_layers)
        transfer.open(num_slots, max(b.num_bytes for b in self._batches))
        self._buffers = [memoryview(slot.numpy().data) for slot in transfer.host]
        submitter = partial(self._submit, transfer)
        self._threads.append(threading.Thread(target=submitter, name="kv-submitter", daemon=True))

    def __exit__(self, *exc: object) -> None:
        self._give_up(None)
        for thread in self._threads:
            thread.join()
        if self._transfer is not None:
            self._transfer.close()
            self._buffers, self._places = [], []  # whoever keeps the loader for its figures keeps no memory

    @property
    def load_s(self) -> float:
        if self._transfer is not None:
            return self._transfer.seconds()[0]
        return self._loaded_at - self._started if self._segments else 0.0

    @property
    def stall_s(self) -> float:
        return self._transfer.seconds()[1] if self._transfer is not None else self._stall_s

    def wait(self, layer: int) -> None:
        """Return when the layer's KV is in the pool for whatever is queued next. Raises BadChunk."""
        if not self._segments:
            return
        if self._transfer is not None:
            self._transfer.arrive(layer)
        begin = time.perf_counter()
        self._there[layer].wait()
        if self._error is not None:
            raise self._error
        self._stall_s += time.perf_counter() - begin
        if self._transfer is not None:
            self._transfer.join(layer)

    def _work_alone(self) -> None:
        torch.get_num_threads()  # a new thread takes the number for all when it first asks: not after it has its own
        torch.set_num_threads(1)
        self._alone.wait()
        self._work()

    @torch.inference_mode()  # it holds for a thread, and the pool may have been made in it
    def _work(self) -> None:
        assert self._store is not None
        try:
            with self._store.read() as reader:
                while (task := self._take()) is not None:
                    load = self._load if self._transfer is None else self._stage
                    load(reader, *task)
        except BaseException as error:
            self._give_up(error)

    def _load(self, reader: StoreReader, layer: int, index: int) -> None:
        """A blob straight into the pool."""
        segment, manifest, spec = self._segments[index], self._manifests[index], self._decoder.spec
        try:
            parts = reader.layer(manifest, layer)
        except StoreError as error:
            raise self._bad(index, error) from error
        encoded = view_kv(parts, manifest.codec, len(segment.token_ids), spec.num_kv_heads, spec.head_dim)
        place = self._own_places.get(index)
        if place is None:  # made here, not by the computing thread; when two threads make it, it is the same
            place = slots_of(self._decoder, self._sequence, [self._rows[index]], self._rope_len)
            self._own_places[index] = place
        place_kv(self._decoder, self._pool, layer, encoded.tensors, place)
        self._done(layer, 1, sum(part.nbytes for part in parts.values()))

    def _stage(self, reader: StoreReader, layer: int, index: int) -> None:
        """A blob to its place in the ring."""
        assert self._ring is not None
        which = self._batch_of[index]
        batch, number = self._batches[which], layer * len(self._batches) + which
        slot = self._ring.acquire(number)
        if slot is None:
            return
        targets = batch.targets(index - batch.first, self._buffers[slot])
        try:
            reader.copy_layer(self._manifests[index], layer, targets)
        except StoreError as error:
            raise self._bad(index, error) from error
        with self._lock:
            self.num_bytes += sum(target.nbytes for target in targets.values())
        self._ring.filled(number)

    @torch.inference_mode()
    def _submit(self, transfer: Transfer) -> None:
        """Queue batch after batch; a layer is done, for the computing thread, when all of it is queued."""
        assert self._ring is not None
        try:
            for number in range(self._num_layers * len(self._batches)):
                slot = self._ring.wait_filled(number)
                if slot is None:
                    return
                layer, which = divmod(number, len(self._batches))
                batch = self._batches[which]
                event = transfer.send(slot, batch.num_bytes, partial(self._place, layer, batch, self._places[which]))
                self._ring.submitted(number, event)
                if which == len(self._batches) - 1:
                    transfer.finish_layer(layer)
                    self._done(layer, len(self._segments))
        except BaseException as error:
            self._give_up(error)

    def _place(self, layer: int, batch: KVBatch, place: Slots, buffer: Tensor) -> None:
        place_kv(self._decoder, self._pool, layer, batch.tensors(buffer), place)

    def _manifest(self, reader: StoreReader, segment: Segment) -> ChunkManifest:
        """The segment's manifest, its token ids compared: a key is a digest, and digests are not taken on trust."""
        assert segment.key is not None
        try:
            manifest = reader.manifest(segment.key)
        except StoreError as error:
            raise BadChunk(segment.key, error.message) from error
        if manifest is None:
            raise BadChunk(segment.key, "it is no longer in the store")
        spec = self._decoder.spec
        shape = (manifest.num_layers, manifest.num_kv_heads, manifest.head_dim)
        if manifest.token_ids != segment.token_ids or shape != (
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_dim,
        ):
            raise BadChunk(segment.key, "its record is of other tokens or another model")
        return manifest

    def _bad(self, index: int, error: StoreError) -> BadChunk:
        key = self._segments[index].key
        assert key is not None
        return BadChunk(key, error.message)

    def _take(self) -> tuple[int, int] | None:
        with self._lock:
            if self._stop or self._next == self._num_layers * len(self._segments):
                return None
            task = divmod(self._next, len(self._segments))
            self._next += 1
            return task

    def _done(self, layer: int, num_segments: int, num_bytes: int = 0) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            self._remaining[layer] -= num_segments
            self._loaded_at = time.perf_counter()
            if self._remaining[layer] == 0:
                self._there[layer].set()

    def _give_up(self, error: BaseException | None) -> None:
        """No more work is taken; with an error, whoever waits gets it."""
        with self._lock:
            self._stop = True
            self._error = self._error or error
        if error is not None:
            for there in self._there:
                there.set()
        if self._ring is not None:
            self._ring.stop()
