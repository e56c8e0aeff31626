"""From the threads that load to the device that computes.

A buffer belongs to one after another: to the worker that fills it; from `send` on to the device, until it has copied it; and
to the next worker, which `memory` has wait for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor


class Transfer(Protocol):
    """Moves what workers have put into buffers to the device. Every worker calls `memory` and `send`, the computing thread the
    others. A batch, of batch_bytes or one chunk, is in one buffer."""

    most_workers: int
    buffers_a_worker: int
    batch_bytes: int

    def open(self, num_buffers: int, num_bytes: int) -> None:
        """Make the buffers, each of num_bytes. What is sent starts after the work queued so far."""
        ...

    def memory(self, buffer: int) -> memoryview:
        """The buffer, once what was sent of it before is copied."""
        ...

    def send(self, layer: int, buffer: int, num_bytes: int, place: Callable[[Tensor], None]) -> None:
        """Bring the buffer's first num_bytes to the device and, behind it, call place with them, uint8."""
        ...

    def arrive(self, layer: int) -> None:
        """Computing gets to the layer; from here on what it waits counts as stall."""
        ...

    def join(self, layer: int) -> None:
        """Computing goes on behind what was sent of the layer, which is all of it. On a GPU the stream waits, not the host."""
        ...

    def close(self) -> None:
        """Computing goes on behind whatever was sent, and the buffers go."""
        ...

    def seconds(self) -> tuple[float, float]:
        """(from `open` to the last layer's KV, of it waited by whoever computes). Waits for the device."""
        ...


class HostTransfer:
    """Where the device is the host: the worker itself writes what it has loaded into the pool."""

    most_workers, buffers_a_worker = 4, 1
    batch_bytes = 0  # each chunk by itself: it is still in the processor's cache

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


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """To copy and to write on, for good: PyTorch hands out the same 32 in turn, and what another thread queues on the one that a
    graph is captured on ends in the graph. The write goes before the blocks of a layer that is computed: the next layer needs
    it soon."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1)


class CudaTransfer:
    """A copy stream, and a stream that dequantises, rotates and writes into the pool behind it; an event a layer.

    Pinned and device buffers come from PyTorch's caching allocators, so a second prompt makes none anew.
    """

    most_workers, buffers_a_worker = 8, 2  # one is filled while the other is copied
    batch_bytes = 6 << 20  # some chunks: one copy and one launch for all of them, and yet several batches a layer

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy, self._place = _streams(device)
        self._compute = torch.cuda.current_stream(device)
        self._sending = threading.Lock()
        self._host: list[Tensor] = []
        self._staged: list[Tensor] = []
        self._copied: list[torch.cuda.Event | None] = []  # of what was sent of each buffer last
        self._placed: list[torch.cuda.Event | None] = []
        self._layers: dict[int, torch.cuda.Event] = {}
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._arrived: torch.cuda.Event | None = None
        self._started: torch.cuda.Event | None = None

    def open(self, num_buffers: int, num_bytes: int) -> None:
        size = num_buffers * num_bytes
        self._host = list(torch.empty(size, dtype=torch.uint8, pin_memory=True).split(num_bytes))
        self._staged = list(torch.empty(size, dtype=torch.uint8, device=self._device).split(num_bytes))
        self._copied, self._placed = [None] * num_buffers, [None] * num_buffers
        self._copy.wait_stream(self._compute)  # the pool's blocks and the buffers may still be in use
        self._place.wait_stream(self._compute)
        self._started = self._timed(self._copy)

    def memory(self, buffer: int) -> memoryview:
        copied = self._copied[buffer]
        if copied is not None:
            copied.synchronize()
        return self._host[buffer].numpy().data

    def send(self, layer: int, buffer: int, num_bytes: int, place: Callable[[Tensor], None]) -> None:
        staged, placed = self._staged[buffer][:num_bytes], self._placed[buffer]
        copied = torch.cuda.Event(blocking=True)  # threads wait for it, and a core that spins is one that loads nothing
        with self._sending:
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
        """The device buffers were taken on the compute stream: who gets them next there comes after what is waited for
        here. Of the pinned ones PyTorch keeps events behind the copies that read them."""
        self._compute.wait_stream(self._copy)
        self._compute.wait_stream(self._place)
        self._host, self._staged = [], []

    def seconds(self) -> tuple[float, float]:
        if self._started is None or not self._layers:
            return 0.0, 0.0
        last = self._layers[max(self._layers)]
        for event in (last, *(end for _, end in self._waits)):
            event.synchronize()
        stall = sum(begin.elapsed_time(end) for begin, end in self._waits)
        return self._started.elapsed_time(last) / 1e3, stall / 1e3

    def _timed(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event
