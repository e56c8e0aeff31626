"""Transfer from the loader threads to the computing device.

A buffer has one owner at a time: the worker that fills it; after `send` the device, until it has copied the contents;
then the next worker, which waits for that in `memory`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


class Transfer(ABC):
    """Moves buffers filled by workers to the device. Workers call `memory`, and `send` if workers_send; the computing
    thread calls the rest.

    A buffer holds one batch: up to batch_bytes, or one chunk.
    """

    workers_send = True
    most_workers: int
    buffers_a_worker: int
    batch_bytes: int

    @abstractmethod
    def open(self, num_buffers: int, num_bytes: int) -> None:
        """Allocate the buffers, num_bytes each. Transfers start after the work queued so far."""

    @abstractmethod
    def memory(self, buffer: int) -> memoryview:
        """Return the buffer's memory once its previous contents have been copied."""

    @abstractmethod
    def send(self, layer: int, buffer: int, num_bytes: int, place: Callable[[Tensor], None]) -> None:
        """Copy the buffer's first num_bytes to the device and, after that, call `place` with them (uint8)."""

    @abstractmethod
    def arrive(self, layer: int) -> None:
        """Record that computing has reached the layer; from here on, waiting counts as stall."""

    @abstractmethod
    def join(self, layer: int) -> None:
        """Order computing after the transfers of the layer. On a GPU the stream waits, not the host."""

    @abstractmethod
    def close(self) -> None:
        """Order computing after all transfers, and free the buffers."""

    @abstractmethod
    def seconds(self) -> tuple[float, float]:
        """Return (seconds from `open` until the last layer's KV arrived, seconds of it that computing waited).
        Synchronises."""


class HostTransfer(Transfer):
    """For a pool in host memory: the worker itself writes the loaded KV into the pool."""

    most_workers, buffers_a_worker = 4, 1
    batch_bytes = 0  # each chunk by itself, while it is still in the CPU's cache

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._started = self._last = self._arrived = self._stall_s = 0.0

    def open(self, num_buffers: int, num_bytes: int) -> None:
        self._buffers = list(torch.empty(num_buffers * num_bytes, dtype=torch.uint8).split(num_bytes))
        self._started = self._last = time.perf_counter()

    def memory(self, buffer: int) -> memoryview:
        return self._buffers[buffer].numpy().data

    def send(self, layer: int, buffer: int, num_bytes: int, place: Callable[[Tensor], None]) -> None:
        place(self._buffers[buffer][:num_bytes])
        self._last = time.perf_counter()

    def arrive(self, layer: int) -> None:
        self._arrived = time.perf_counter()

    def join(self, layer: int) -> None:
        self._stall_s += time.perf_counter() - self._arrived

    def close(self) -> None:
        self._buffers = []

    def seconds(self) -> tuple[float, float]:
        return self._last - self._started, self._stall_s


class StagedTransfer(HostTransfer):
    """Transfer to a device without streams of its own (MPS): one worker copies to the device and writes there."""

    most_workers = 1

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def send(self, layer: int, buffer: int, num_bytes: int, place: Callable[[Tensor], None]) -> None:
        super().send(layer, buffer, num_bytes, lambda staged: place(staged.to(self._device, copy=True)))


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the copy and write streams, created once.

    PyTorch hands out the same 32 streams in turn, and work that another thread queues on the stream of a graph capture
    would become part of the graph. The write stream has priority over the compute stream: the next layer needs its KV
    soon.
    """
    return torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1)


class CudaTransfer(Transfer):
    """A copy stream, a stream that then dequantises, rotates and writes into the pool, and an event per layer.

    Pinned and device buffers come from PyTorch's caching allocators, so a second prompt allocates none.
    """

    workers_send = False
    most_workers, buffers_a_worker = 4, 4  # some are filled while others wait to be sent, or are copied
    # A layer of 4,096 tokens of an 8B is one batch in int7 (7 MB), two in bfloat16: Python's work is per batch, and
    # workers load several layers at once. All buffers together take 128 MiB; pinned blocks are powers of two.
    batch_bytes = 8 << 20

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy, self._place = _streams(device)
        self._compute = torch.cuda.current_stream(device)
        self._host: list[Tensor] = []
        self._staged: list[Tensor] = []
        self._copied: list[torch.cuda.Event | None] = []  # per buffer, the end of its last copy
        self._placed: list[torch.cuda.Event | None] = []
        self._layers: dict[int, torch.cuda.Event] = {}
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._arrived: torch.cuda.Event | None = None
        self._opened: torch.cuda.Event | None = None

    def open(self, num_buffers: int, num_bytes: int) -> None:
        size = num_buffers * num_bytes
        self._host = list(torch.empty(size, dtype=torch.uint8, pin_memory=True).split(num_bytes))
        self._staged = list(torch.empty(size, dtype=torch.uint8, device=self._device).split(num_bytes))
        self._copied, self._placed = [None] * num_buffers, [None] * num_buffers
        self._copy.wait_stream(self._compute)  # the pool's blocks and the buffers may still be in use
        self._place.wait_stream(self._compute)
        self._opened = self._timed(self._copy)

    def memory(self, buffer: int) -> memoryview:
        copied = self._copied[buffer]
        if copied is not None:
            copied.synchronize()
        return self._host[buffer].numpy().data

    def send(self, layer: int, buffer: int, num_bytes: int, place: Callable[[Tensor], None]) -> None:
        staged, placed = self._staged[buffer][:num_bytes], self._placed[buffer]
        copied = torch.cuda.Event(blocking=True)  # a spinning thread would occupy a core that could load
        with torch.cuda.stream(self._copy):
            if placed is not None:
                self._copy.wait_event(placed)
            staged.copy_(self._host[buffer][:num_bytes], non_blocking=True)
        copied.record(self._copy)
        with torch.cuda.stream(self._place):
            self._place.wait_event(copied)
            place(staged)
        self._layers[layer] = self._timed(self._place)
        self._copied[buffer], self._placed[buffer] = copied, self._layers[layer]

    def arrive(self, layer: int) -> None:
        self._arrived = self._timed(self._compute)

    def join(self, layer: int) -> None:
        self._compute.wait_event(self._layers[layer])
        assert self._arrived is not None, "arrive comes first"
        self._waits.append((self._arrived, self._timed(self._compute)))

    def close(self) -> None:
        """Device buffers were allocated on the compute stream, so their next use is ordered after the waits here.
        PyTorch records events for the copies that read pinned buffers."""
        self._compute.wait_stream(self._copy)
        self._compute.wait_stream(self._place)
        self._host, self._staged = [], []

    def seconds(self) -> tuple[float, float]:
        if self._opened is None or not self._layers:
            return 0.0, 0.0
        last = self._layers[max(self._layers)]
        for event in (last, *(end for _, end in self._waits)):
            event.synchronize()
        stall = sum(begin.elapsed_time(end) for begin, end in self._waits)
        return self._opened.elapsed_time(last) / 1e3, stall / 1e3

    def _timed(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event
