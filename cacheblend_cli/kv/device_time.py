"""Time of work on a device, read after the work was queued."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

Mark = float | torch.cuda.Event
"""A moment of a device's work: perf_counter, or on a GPU an event of the current stream."""


def mark(device: torch.device) -> Mark:
    """Return the moment at which the work queued so far is done. Does not wait for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True)
class DeviceTime:
    """Time of several pieces of work, without what is between them."""

    pieces: tuple[tuple[Mark, Mark], ...] = ()

    def plus(self, begin: Mark, end: Mark) -> DeviceTime:
        return DeviceTime((*self.pieces, (begin, end)))

    @property
    def seconds(self) -> float:
        """Seconds of all pieces. On a GPU this waits for the last one."""
        return sum((_seconds(begin, end) for begin, end in self.pieces), 0.0)


def _seconds(begin: Mark, end: Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float), "both are marks of one device"
        assert isinstance(end, float), "both are marks of one device"
        return end - begin
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
