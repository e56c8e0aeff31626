"""What a run makes a GPU do: how many kernels, how long it is busy, beside the run's own time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity


def profile(run: Callable[[], object]) -> dict[str, Any]:
    """{kernels, copies, busy_ms, wall_ms} of one run. busy_ms: when at least one kernel or copy ran, on whatever stream."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
    found = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return {**summed(found), "wall_ms": wall * 1e3}


def summed(events: Iterable[tuple[str, float, float]]) -> dict[str, Any]:
    """{kernels, copies, busy_ms} of (name, start, end) in microseconds; what runs side by side counts once."""
    kernels = copies = 0
    busy, until = 0.0, float("-inf")
    for name, start, end in sorted(events, key=lambda event: event[1]):
        if name.startswith(("Memcpy", "Memset")):
            copies += 1
        else:
            kernels += 1
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return {"kernels": kernels, "copies": copies, "busy_ms": busy / 1e3}
