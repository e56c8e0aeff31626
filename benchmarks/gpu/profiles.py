"""Where a run's time goes: kernels by name, gaps between them on the stream that computes, and stamps of the host."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any, NamedTuple
from unittest import mock

import torch

from cacheblend_cli.blend.prefill import BlendSteps
from cacheblend_cli.engine.request import request
from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.stored_prompt import StoredPrompt

ACTIVITIES = [torch.profiler.ProfilerActivity.CUDA]
TOP = 15
GAP_MS = 0.03
STAMPED: dict[str, tuple[Any, str]] = {
    "plan": (request, "plan_prompt"),
    "find": (StoredPrompt, "find"),
    "open": (KVLoader, "open"),
    "wait": (KVLoader, "wait"),
    "choose": (BlendSteps, "_choose"),
}
"""Functions, and methods with those of subclasses."""


class Event(NamedTuple):
    """Work of a GPU, in milliseconds."""

    start: float
    end: float
    name: str
    stream: int


def profile(run: Callable[[], object]) -> list[dict[str, Any]]:
    """Return the rows of `rows_of` for a run of what is compiled and captured already."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=ACTIVITIES, acc_events=True) as profiler:
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
    return rows_of(
        [
            Event(event.time_range.start / 1e3, event.time_range.end / 1e3, event.name, event.device_resource_id)
            for event in profiler.events() or ()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ],
        wall * 1e3,
    )


def rows_of(events: list[Event], wall_ms: float) -> list[dict[str, Any]]:
    """Return {kernels, copies, busy_ms, wall_ms, busy_share, gaps, gap_ms}, then {kernel, count, ms} of those that take
    most. busy_ms: time with at least one kernel or copy running, on any stream; gaps: longer than GAP_MS on the
    stream with most kernels."""
    events = sorted(events)
    kernels = [event for event in events if not event.name.startswith(("Memcpy", "Memset"))]
    computes = statistics.mode([event.stream for event in kernels] or [0])
    gaps = [gap for gap in _gaps([event for event in events if event.stream == computes]) if gap > GAP_MS]
    busy = max((e.end for e in events), default=0.0) - min((e.start for e in events), default=0.0) - sum(_gaps(events))
    row = {"kernels": len(kernels), "copies": len(events) - len(kernels), "busy_ms": busy, "wall_ms": wall_ms}
    row |= {"busy_share": busy / wall_ms, "gaps": len(gaps), "gap_ms": sum(gaps)}
    took: dict[str, list[float]] = {}
    for event in events:
        took.setdefault(event.name, []).append(event.end - event.start)
    named = [{"kernel": name, "count": len(times), "ms": sum(times)} for name, times in took.items()]
    return [row, *sorted(named, key=lambda row: row["ms"], reverse=True)[:TOP]]


def _gaps(events: Sequence[Event]) -> list[float]:
    """Return the milliseconds in which none of the events ran, between the first and the last."""
    ends = accumulate((event.end for event in events), max)
    return [after.start - end for end, after in zip(ends, events[1:], strict=False) if after.start > end]


def stamps(run: Callable[[], object]) -> list[dict[str, Any]]:
    """Return {host, count, first_ms, ms, stamps} of the functions in STAMPED during a run, and of the whole run.
    stamps: begin and duration of each call in milliseconds."""
    found: dict[str, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        for what, (owner, name) in STAMPED.items():
            calls = found.setdefault(what, [])
            for one in _owners(owner, name):
                stack.enter_context(_watched(one, name, calls))
        begun = time.perf_counter()
        run()
        found["run"] = [(begun, time.perf_counter())]
    rows = []
    for what, calls in ((what, calls) for what, calls in found.items() if calls):
        of_call = [[round((start - begun) * 1e3, 3), round((end - start) * 1e3, 3)] for start, end in calls]
        ms = sum(took for _, took in of_call)
        rows.append({"host": what, "count": len(calls), "first_ms": of_call[0][0], "ms": ms, "stamps": of_call})
    return rows


def _owners(owner: Any, name: str) -> list[Any]:
    """Return the module, or the class and its subclasses, that define the name."""
    more = owner.__subclasses__() if inspect.isclass(owner) else []
    return [owner] * (name in vars(owner)) + [one for other in more for one in _owners(other, name)]


@contextmanager
def _watched(owner: Any, name: str, calls: list[tuple[float, float]]) -> Iterator[None]:
    """Time the calls of a function; one within another, as of a base class, counts once."""
    function = getattr(owner, name)

    def timed(*arguments: Any, **named: Any) -> Any:
        start, before = time.perf_counter(), len(calls)
        try:
            return function(*arguments, **named)
        finally:
            calls[before:] = [(start, time.perf_counter())]

    with mock.patch.object(owner, name, staticmethod(timed) if inspect.ismethod(function) else timed):
        yield
