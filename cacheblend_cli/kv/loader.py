"""Loading a prompt's stored KV: threads copy it from its source, and a transfer moves it to the pool's device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Self

import torch
from cacheblend_kernels import StoredKV
from cacheblend_store import ChunkManifest, StoreError

from cacheblend_cli.kv.load_queue import LoadQueue, num_workers, workers
from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.kv.source import BadChunk, ChunkReader, KVSource
from cacheblend_cli.kv.stored_prompt import (
    BatchRows,
    KVBatch,
    StoredPrompt,
    batches_of,
    row_chunks_of,
    slots_of,
    stored_kv,
)
from cacheblend_cli.kv.transfer import CudaTransfer, HostTransfer, StagedTransfer, Transfer
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.prompt.plan import PromptPlan, Segment

if TYPE_CHECKING:
    from cacheblend_cli.model.states import SequenceState

Copy = Callable[[int, memoryview], None]  # see `ChunkReader.copies`


class KVLoader:
    """Loads KV layer by layer, ahead of compute, from `open` to `close`. This one has nothing to load.

    The figures are final after the last wait. On a GPU, reading the seconds synchronises.
    """

    num_bytes = 0  # read from the source
    next_layer = 0  # after the one that was waited for last
    bad: BadChunk | None = None  # with tensor parallelism, a chunk that this rank could not read; its KV is zeros

    @property
    def load_s(self) -> float:
        """Seconds from the start until the last layer was loaded."""
        return 0.0

    @property
    def stall_s(self) -> float:
        """Seconds of load_s that computing waited."""
        return 0.0

    def open(self) -> Self:
        """Start loading. Raises BadChunk."""
        return self

    def close(self) -> None:
        """Stop loading."""

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def wait(self, layer: int) -> None:
        """Return when the layer's KV is in the pool for the work queued next. Raises BadChunk, except with tensor
        parallelism."""

    def is_ready(self, layer: int) -> bool:
        """Return whether `wait` returns without blocking the host."""
        return True


class StoredLoader(KVLoader):
    """Load stored KV with worker threads, one batch after another, layer by layer.

    A worker waits for a free buffer of the transfer, and copies the batch's blobs into it, still compressed, and
    checked. The transfer then dequantises, rotates and writes the rows to their slots: sent by the worker, or, on a
    GPU, by the computing thread while it waits, since threads that queue work compete for the GIL at every operation.
    The computing thread waits until the whole layer is sent, and then for the transfer.
    """

    def __init__(self, stored: StoredPrompt, transfer: Transfer) -> None:
        self._stored, self._transfer = stored, transfer
        self._num_workers = num_workers(transfer.most_workers)
        self._workers = workers(self._num_workers)
        self._shapes = stored.decoder.spec.kv_shapes
        self._batches = batches_of(stored.spans, self._shapes, transfer.batch_bytes)
        self._queue = LoadQueue(len(self._shapes), len(self._batches))
        self._rows: list[BatchRows] = []
        self._copies_of: list[dict[tuple[int, ...], Copy]] = []
        self._free: SimpleQueue[int | None] = SimpleQueue()  # buffers not held by a worker; None: stop
        self._running: list[Future[None]] = []
        self._reading, self._readers, self._leaving = ExitStack(), 0, Lock()  # workers that still read
        self.num_bytes = stored.num_bytes

    @property
    def load_s(self) -> float:
        return self._transfer.seconds()[0]

    @property
    def stall_s(self) -> float:
        return self._transfer.seconds()[1]

    def open(self) -> StoredLoader:
        self._rows = [self._stored.rows(batch[self._shapes[0]].spans) for batch in self._batches]
        num_batches = len(self._shapes) * len(self._batches)
        num_buffers = min(num_batches, self._num_workers * self._transfer.buffers_a_worker)
        reader = self._reading.enter_context(self._stored.source.read())
        try:
            self._copies_of = [self._copies(reader, batch) for batch in self._batches]
            self._transfer.open(num_buffers, max(of.num_bytes for batch in self._batches for of in batch.values()))
        except BaseException:
            self._reading.close()
            raise
        for buffer in range(num_buffers):
            self._free.put(buffer)
        self._readers = min(self._num_workers, num_batches)
        self._running = [self._workers.submit(self._work, reader) for _ in range(self._readers)]
        return self

    def close(self) -> None:
        self._queue.stop()
        for _ in self._running:
            self._free.put(None)
        for running in self._running:
            running.result()
        self._transfer.close()
        self._rows, self._copies_of = [], []  # a loader outlives the load because of its figures: drop the tables

    def wait(self, layer: int) -> None:
        self._transfer.arrive(layer)
        self._queue.wait(layer)
        self._transfer.join(layer)
        self.next_layer = layer + 1

    def is_ready(self, layer: int) -> bool:
        return self._queue.is_ready(layer)

    @torch.inference_mode()  # inference mode is per thread, and the pool may be an inference tensor
    def _work(self, reader: ChunkReader) -> None:
        try:
            # a buffer first: parts are taken in order, so the first ones never wait for a buffer behind later ones
            while (buffer := self._free.get()) is not None:
                part = self._queue.take()
                if part is None:
                    self._free.put(buffer)
                    return
                self._load(reader, *part, buffer)
        except BaseException as error:
            self._queue.stop(error)
        finally:
            self._leave()

    def _leave(self) -> None:
        """The last worker closes the snapshot: the computing thread may need the store without an open one before the
        prompt ends, to open it again where its file was replaced."""
        with self._leaving:
            self._readers -= 1
            is_last = not self._readers
        if is_last:
            self._reading.close()

    def _load(self, reader: ChunkReader, layer: int, which: int, buffer: int) -> None:
        batch = self._batches[which][self._shapes[layer]]
        self._copy(reader, layer, which, self._transfer.memory(buffer))
        send = partial(self._send, layer, batch, self._rows[which], buffer)
        if self._transfer.workers_send:
            send()
            self._queue.arrived(layer)
        else:
            self._queue.arrived(layer, send)

    def _send(self, layer: int, batch: KVBatch, rows: BatchRows, buffer: int) -> None:
        self._transfer.send(layer, buffer, batch.num_bytes, partial(self._stored.place, layer, batch, rows))
        self._free.put(buffer)

    def _copies(self, reader: ChunkReader, batch: dict[tuple[int, ...], KVBatch]) -> dict[tuple[int, ...], Copy]:
        """Return the functions that copy a batch, by the shape of a layer, except where a chunk's place cannot be read.
        Built beforehand by the computing thread, because the look-ups of workers would block it on the GIL."""
        copies = dict[tuple[int, ...], Copy]()
        for shape, of_shape in batch.items():
            layers = [layer for layer, other in enumerate(self._shapes) if other == shape]
            with suppress(StoreError):  # of a chunk that `_copy` finds
                copies[shape] = reader.copies(self._manifests(of_shape), layers, of_shape.places)
        return copies

    def _manifests(self, batch: KVBatch) -> Sequence[ChunkManifest]:
        return self._stored.manifests[batch.first : batch.first + len(batch.spans)]

    def _copy(self, reader: ChunkReader, layer: int, which: int, memory: memoryview) -> None:
        batch, copy = self._batches[which][self._shapes[layer]], self._copies_of[which].get(self._shapes[layer])
        with suppress(StoreError):  # one by one, the loop below finds the chunk
            if copy is not None:
                copy(layer, memory)
                return
        for manifest, places in zip(self._manifests(batch), batch.places, strict=True):
            try:
                reader.copies([manifest], [layer], [places])(layer, memory)
            except StoreError as error:
                bad = BadChunk(manifest.key, error.message)
                if self._stored.decoder.part.is_whole:
                    raise bad from error
                self.bad = bad  # the other ranks do not know of it, so the pass goes on
                for start, end in places.values():
                    memory[start:end] = bytes(end - start)


class ZeroLoader(KVLoader):
    """Places zeros for the plan's cached segments, in the waiting thread, for prompts that run only to compile or time
    kernels."""

    def __init__(self, decoder: Decoder, sequence: PagedSequence, plan: PromptPlan, codec: str) -> None:
        """codec: the format to dequantise from."""
        spec = decoder.own_spec
        self._kernels, self._pool = decoder.kernels, sequence.pool
        self._rope_of = decoder.rope.of_layer
        self._rows = []
        self._heads = spec.kv_shapes
        for segment in plan.stored:
            span = replace(segment, codec=codec)
            of_heads = {heads: zeros(span, heads, decoder.device) for heads in set(self._heads)}
            self._rows.append((of_heads, slots_of(decoder, sequence, [span], plan.num_tokens)))

    def wait(self, layer: int) -> None:
        for of_heads, slots in self._rows:
            stored = of_heads[self._heads[layer]]
            own = slots[self._rope_of[layer]]
            for where in (own, replace(own, first_slot=-1)):  # consecutive slots, and scattered ones
                self._kernels.load_kv(stored, self._pool.layers[layer], where)


def zeros(span: Segment, heads: tuple[int, ...], device: torch.device) -> StoredKV:
    """Return stored KV of zeros in the span's codec. heads: (KV heads, head_dim) of the layer."""
    batch = KVBatch(0, [span], *heads)
    tensors = batch.tensors(torch.zeros(batch.num_bytes, dtype=torch.uint8, device=device))
    return stored_kv(span.codec, tensors, row_chunks_of([span], device), *heads[1:])


def make_loader(decoder: Decoder, source: KVSource | None, sequence: PagedSequence, plan: PromptPlan) -> KVLoader:
    """Return the loader of the plan's cached segments. Raises BadChunk if the source no longer has one of them.

    source: may be None for a plan without cached segments.
    """
    if not plan.stored:
        return KVLoader()
    missing: BadChunk | None = None
    try:
        stored = StoredPrompt.find(decoder, source, sequence, plan)
    except BadChunk as error:
        missing = error
    agree(decoder, plan, missing)
    return StoredLoader(stored, transfer_to(decoder.device))


def stored_state(decoder: Decoder, source: KVSource | None, segment: Segment) -> SequenceState:
    """Return the recurrent state after a stored segment. Raises BadChunk."""
    assert decoder.state_layout is not None
    assert segment.key is not None
    try:
        if source is None:
            raise StoreError("the store cannot be read")
        with source.read() as reader:
            manifest = reader.manifest(segment.key)
            if manifest is None or manifest.state != decoder.state_layout.stored:
                raise StoreError("it has no state of this model's recurrent layers in this dtype")
            return decoder.state_layout.from_bytes(reader.state_of(manifest), decoder.device)
    except StoreError as error:
        raise BadChunk(segment.key, error.message) from error


def agree(decoder: Decoder, plan: PromptPlan, bad: BadChunk | None) -> None:
    """Raise BadChunk on all ranks if one of them could not read a chunk. bad: the chunk that this rank could not
    read."""
    if decoder.part.is_whole:
        if bad is not None:
            raise bad
        return
    cached = plan.stored
    if not cached:
        return
    ranks = decoder.part.ranks
    own = 0 if bad is None else 1 + next(i for i, s in enumerate(cached) if s.key == bad.key)
    code = int(ranks.largest(torch.tensor([own * ranks.size + ranks.rank if own else 0], device=decoder.device)))
    if code:
        key = cached[code // ranks.size - 1].key
        assert key is not None
        raise (
            bad if bad is not None and bad.key == key else BadChunk(key, f"rank {code % ranks.size} could not read it")
        )


def transfer_to(device: torch.device) -> Transfer:
    match device.type:
        case "cuda":
            return CudaTransfer(device)
        case "cpu":
            return HostTransfer()
        case _:
            return StagedTransfer(device)
