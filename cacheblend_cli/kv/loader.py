"""Loading a prompt's stored KV: threads copy it from its source and check it, and it goes to the pool."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from threading import Lock
from typing import Self

import torch
from cacheblend_kernels import Slots
from cacheblend_store import LayerReads, StoreError
from torch import Tensor

from cacheblend_cli.kv.load_queue import LoadQueue, Part, num_workers, workers
from cacheblend_cli.kv.source import BadChunk, ChunkReader
from cacheblend_cli.kv.stored_prompt import Heads, StoredPrompt, layer_groups


class KVLoader:
    """Loads KV layer by layer, ahead of compute, from `open` to `close`. This one has nothing to load.

    The figures are final after the last wait. On a GPU, reading the seconds synchronises.
    """

    num_bytes = 0  # of stored KV that is loaded
    next_layer = 0  # after the one that was waited for last
    bad: BadChunk | None = None  # with tensor parallelism, a chunk that this rank could not read; its KV is zeros

    @property
    def load_s(self) -> float:
        """Seconds from the start, on a GPU from the first copy to it, until the last layer was loaded."""
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

    def is_ready(self, layer: int) -> bool:
        """Return whether `wait` returns without blocking the host."""
        return True

    def wait(self, layer: int) -> None:
        """Return when the layer's KV is in the pool for the work queued next. Raises BadChunk, except with tensor
        parallelism."""


class StoredLoader(KVLoader):
    """Loads stored KV with worker threads: parts, each of a chunk and a group of layers, in the order of layers.

    most_layers: of a group. most_workers: threads.
    """

    def __init__(self, stored: StoredPrompt, most_layers: int, most_workers: int) -> None:
        self._stored, self._most = stored, most_layers
        self._num_workers = num_workers(most_workers)
        self._groups = layer_groups(stored.decoder, most_layers)
        self._group_of = [number for number, group in enumerate(self._groups) for _ in group.layers]
        self._running: list[Future[None]] = []
        self._reading, self._readers, self._leaving = ExitStack(), 0, Lock()  # workers that still read
        self._reader: ChunkReader | None = None
        self._queue = LoadQueue(())
        self.num_bytes = stored.num_bytes

    def open(self) -> Self:
        self._queue = LoadQueue([(n, i) for n in range(len(self._groups)) for i in self._chunks_to_read()])
        if not self._queue.is_taken:
            try:
                self._begin(self._snapshot())
            except BaseException:
                self._reading.close()
                raise
            self._start(self._num_workers)
        return self

    def _snapshot(self) -> ChunkReader:
        self._reader = self._reader or self._reading.enter_context(self._stored.source.read())
        return self._reader

    def _chunks_to_read(self) -> Sequence[int]:
        """Return the numbers of the chunks that the source is read for."""
        return range(len(self._stored.chunks))

    def _begin(self, reader: ChunkReader) -> None:
        """Look up where the chunks are, in the computing thread: look-ups by workers would block it on the GIL."""
        for chunk in self._chunks_to_read():
            for heads in {group.heads for group in self._groups}:
                reads = self._reads(chunk, heads)
                if reads.compiled is None:
                    with suppress(StoreError):  # `_read` finds what is wrong
                        reader.locate(reads)

    def _start(self, count: int) -> None:
        with self._leaving:
            self._snapshot()
            self._readers += count
        self._running += [workers(self._num_workers).submit(self._work) for _ in range(count)]

    def close(self) -> None:
        self._queue.stop()
        for running in self._running:
            running.result()
        self._reading.close()

    def is_ready(self, layer: int) -> bool:
        return all(self._queue.is_ready(group) for group in range(self._group_of[layer] + 1))

    @torch.inference_mode()  # inference mode is per thread, and the pool may be an inference tensor
    def _work(self) -> None:
        try:
            self._load()
        except BaseException as error:
            self._queue.stop(error)
        finally:
            self._leave()

    @abstractmethod
    def _load(self) -> None:
        """Load parts of the queue, until none is left, or none may begin now."""

    def _leave(self) -> None:
        """The last worker closes the snapshot: the computing thread may need the store without an open one before the
        prompt ends, to open it again where its file was replaced. Workers that go on later have another."""
        with self._leaving:
            self._readers -= 1
            if not self._readers:
                self._reading.close()
                self._reader = None

    def _reads(self, chunk: int, heads: Heads) -> LayerReads:
        return self._stored.chunks[chunk].reads_of(self._groups, heads, self._most)

    def _read(self, part: Part, memory: memoryview) -> bool:
        """Copy a part to memory, and check it. Returns False for zeros: with tensor parallelism, not BadChunk."""
        (number, chunk), reader = part, self._reader
        group = self._groups[number]
        assert reader is not None
        try:
            reader.read_layers(self._reads(chunk, group.heads), group.number, memory)
        except StoreError as error:
            bad = BadChunk(self._stored.chunks[chunk].manifest.key, error.message)
            if self._stored.decoder.part.is_whole:
                raise bad from error
            self.bad = bad  # the other ranks do not know of it, so the pass goes on
            memory[:] = bytes(len(memory))
            return False
        return True


class HostLoader(StoredLoader):
    """For a pool in host memory, or on a device without streams of its own (MPS): the worker that has read a part, a
    layer of a chunk, also writes it into the pool, while it is in the CPU's cache."""

    def __init__(self, stored: StoredPrompt) -> None:
        super().__init__(stored, most_layers=1, most_workers=4 if stored.decoder.device.type == "cpu" else 1)
        self._started = self._last = self._stall_s = 0.0
        self._slots: list[tuple[Slots, ...]] = []
        self._buffers: SimpleQueue[Tensor] = SimpleQueue()

    @property
    def load_s(self) -> float:
        return self._last - self._started

    @property
    def stall_s(self) -> float:
        return self._stall_s

    def _begin(self, reader: ChunkReader) -> None:
        stored, kinds = self._stored, {group.heads for group in self._groups}
        self._slots = [stored.slots([span]) for span in stored.spans]
        super()._begin(reader)
        largest = max(stored.layout(chunk, heads).num_bytes for chunk in self._chunks_to_read() for heads in kinds)
        for buffer in torch.empty(self._num_workers * largest, dtype=torch.uint8).split(largest):
            self._buffers.put(buffer)
        self._started = self._last = time.perf_counter()

    def close(self) -> None:
        super().close()
        self._slots, self._buffers = [], SimpleQueue()  # a loader outlives the load because of its figures

    def wait(self, layer: int) -> None:
        arrived = time.perf_counter()
        self._queue.wait(self._group_of[layer])
        self._stall_s += time.perf_counter() - arrived
        self.next_layer = layer + 1

    def _load(self) -> None:
        buffer = self._buffers.get_nowait()  # there is one for each worker
        while (part := self._queue.take()) is not None:
            (number, chunk), [layer] = part, self._groups[part[0]].layers
            memory = buffer[: self._stored.layout(chunk, self._groups[number].heads).num_bytes]
            self._read(part, memory.numpy().data)
            self._stored.place(layer, chunk, self._slots[chunk], self._on_device(memory))
            self._last = time.perf_counter()
            self._queue.arrived(number)

    def _on_device(self, memory: Tensor) -> Tensor:
        return memory if memory.device == self._stored.decoder.device else memory.to(self._stored.decoder.device)
