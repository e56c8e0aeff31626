"""Transfer of stored KV from pinned host memory to a GPU's pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

STAGES = 2  # staging buffers: one is filled while the other is written to the pool


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the copy and write streams, created once.

    PyTorch hands out the same 32 streams in turn, and work that another thread queues on the stream of a graph capture
    would become part of the graph. The write stream has priority over the compute stream: the next layers need their KV
    soon.
    """
    return torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1)


class CudaTransfer:
    """A copy stream, a stream that then dequantises, rotates and writes into the pool, and events per group of layers.

    Groups are numbered, and sent in order. Staging buffers come from PyTorch's caching allocator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy, self._place = _streams(device)
        self._compute = torch.cuda.current_stream(device)
        self._num_bytes = 0
        self._staged: list[Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._placed: list[torch.cuda.Event] = []
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._arrived: torch.cuda.Event | None = None
        self._began: torch.cuda.Event | None = None

    def open(self, num_bytes: int) -> None:
        """num_bytes: of a staging buffer."""
        self._num_bytes = num_bytes

    def send(self, group: int, parts: Sequence[tuple[int, Tensor]], place: Callable[[Tensor], None]) -> None:
        """Copy parts (start, pinned memory) to a staging buffer, and then call `place` with it (uint8). The first
        transfer starts after the work queued so far."""
        if not self._staged:  # a prompt that reads ahead of its turn has none
            size = STAGES * self._num_bytes
            self._staged = list(torch.empty(size, dtype=torch.uint8, device=self._device).split(self._num_bytes))
            self._copy.wait_stream(self._compute)  # the pool's blocks and the buffers may still be in use
            self._place.wait_stream(self._compute)
            self._began = self._timed(self._copy)
        staged = self._staged[group % STAGES]
        with torch.cuda.stream(self._copy):
            if group >= STAGES:
                self._copy.wait_event(self._placed[group - STAGES])
            for start, memory in parts:
                staged[start : start + len(memory)].copy_(memory, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # a spinning thread would occupy a core that could load
        copied.record(self._copy)
        with torch.cuda.stream(self._place):
            self._place.wait_event(copied)
            place(staged)
        self._copied.append(copied)
        self._placed.append(self._timed(self._place))

    def copied(self, group: int) -> torch.cuda.Event | None:
        """Return the end of the copies of a group that was sent; None for a number below 0."""
        return self._copied[group] if group >= 0 else None

    def arrive(self) -> None:
        """Record that computing has reached a group; from here on, waiting counts as stall."""
        self._arrived = self._timed(self._compute)

    def join(self, group: int) -> None:
        """Order computing after the transfers of the group. The stream waits, not the host."""
        self._compute.wait_event(self._placed[group])
        assert self._arrived is not None, "arrive comes first"
        self._waits.append((self._arrived, self._timed(self._compute)))

    def close(self) -> torch.cuda.Event | None:
        """Order computing after all transfers, and free the buffers. Returns the end of the copies, None if there were
        none. Device buffers were allocated on the compute stream, so their next use is ordered after the waits here."""
        self._compute.wait_stream(self._copy)
        self._compute.wait_stream(self._place)
        self._staged = []
        return self._copied[-1] if self._copied else None

    def seconds(self) -> tuple[float, float]:
        """Return (seconds from the first transfer until the last group's KV arrived, seconds of it that computing
        waited). Synchronises."""
        if self._began is None:
            return 0.0, 0.0
        last = self._placed[-1]
        for event in (last, *(end for _, end in self._waits)):
            event.synchronize()
        stall = sum(begin.elapsed_time(end) for begin, end in self._waits)
        return self._began.elapsed_time(last) / 1e3, stall / 1e3

    def _timed(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event
