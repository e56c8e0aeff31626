"""The fake device: its streams, events, graphs and memory, and what it counts."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from fake_gpu.order import Clock, Region, knows, merge
from fake_gpu.tensors import DEVICE, DeviceTensor, Memory, PinnedTensor

ROOT = Path(__file__).parents[3]
_PROJECT = tuple(f"{ROOT}/{part}/" for part in ("cacheblend_cli", "kernels", "store"))
_TESTS, _OWN = f"{ROOT}/tests/", str(Path(__file__).parent)


class Stream:
    """A queue of work. clock: what is finished before its next work begins."""

    def __init__(self, gpu: FakeGpu, priority: int = 0) -> None:
        self.gpu, self.id, self.priority, self.device = gpu, next(gpu.numbers), priority, DEVICE
        self.clock: Clock = {}
        self.cuda_stream = self.id
        gpu.streams.append(self)

    def tick(self) -> int:
        """Queue work, and return its time."""
        merge(self.clock, self.gpu.host_clock)
        self.clock[self.id] = self.clock.get(self.id, 0) + 1
        return self.clock[self.id]

    def record_event(self, event: Event | None = None) -> Event:
        event = event or torch.cuda.Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        with self.gpu.lock:
            if self.gpu.capturing and event.clock and not event.captured:
                self.gpu.error("a capture waits for an event from outside")
            merge(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.gpu.synchronise("stream.synchronize", self)

    def query(self) -> bool:
        merge(self.gpu.host_clock, self.clock)
        return True


class Event:
    def __init__(self, gpu: FakeGpu, enable_timing: bool = False, **_: Any) -> None:
        self.gpu, self.timing, self.clock, self.captured = gpu, enable_timing, Clock(), False

    def record(self, stream: Stream | None = None) -> None:
        with self.gpu.lock:
            stream = stream or self.gpu.current_stream()
            stream.tick()
            self.clock, self.captured = dict(stream.clock), self.gpu.capturing

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        with self.gpu.lock:
            self.gpu.note("event wait")
            if self.gpu.capturing:
                self.gpu.error("event.synchronize in a capture")
            merge(self.gpu.host_clock, self.clock)

    def query(self) -> bool:
        merge(self.gpu.host_clock, self.clock)
        return True

    def elapsed_time(self, end: Event) -> float:
        if not (self.timing and end.timing and self.clock and end.clock):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True', and recorded")
        known = self.gpu.host_clock
        if not all(knows(known, stream, time) for stream, time in end.clock.items()):
            self.gpu.error("elapsed_time of an event that may not have happened")
        return self.gpu.milliseconds


class Graph:
    """A captured graph: `replay` queues its work again."""

    def __init__(self, gpu: FakeGpu, *_: Any, **__: Any) -> None:
        self.work: list[Callable[[], None]] = []
        self.gpu, self.is_captured = gpu, False
        self._capture = ExitStack()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._capture.enter_context(self.gpu.captured(self))

    def capture_end(self) -> None:
        self._capture.close()

    def replay(self) -> None:
        assert self.is_captured, "nothing was captured"
        with self.gpu.lock:
            self.gpu.note("graph replay")
            for run in self.work:
                run()

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def reset(self) -> None:
        self.work = []


class Journal:
    """Contents of memory before its first write, to undo writes."""

    def __init__(self, born: int) -> None:
        self._born, self._saved = born, dict[int, tuple[Memory, torch.UntypedStorage]]()

    def before_write(self, memory: Memory) -> None:
        if memory.number < self._born and memory.number not in self._saved:
            self._saved[memory.number] = memory, memory.storage.clone()

    def undo(self) -> None:
        for memory, contents in self._saved.values():
            memory.storage.copy_(contents)
        self._saved.clear()


class _Thread(threading.local):
    """State of a host thread. clock: the work it has seen finished."""

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.stream: Stream | None = None
        self.graph: Graph | None = None
        self.journals: list[Journal] = []
        self.silent = 0  # launches inside a kernel backend's method are replayed by the method


class FakeGpu:
    """A device and its record.

    counts: (phase, kind, call site) -> number; kinds: synchronisation, pageable copy, event wait, stream, pinned
    allocation, graph replay, launch. errors: (phase, message, call site) -> number.
    phases: code object -> phase; the first one that is on the stack names the phase of a call.
    """

    def __init__(self, phases: Mapping[CodeType, str] | None = None, capability: tuple[int, int] = (9, 0)) -> None:
        self.phases, self.capability, self.total, self.milliseconds = phases or {}, capability, 80 << 30, 1.0
        self.lock, self.numbers = threading.RLock(), itertools.count(1)
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.errors: Counter[tuple[str, str, str]] = Counter()
        self.labels: Counter[tuple[str, str]] = Counter()  # (call site, what was waited for)
        self.streams: list[Stream] = []
        self.used = self.peak = 0
        self._thread = _Thread()
        self.default_stream = Stream(self)

    # Counting

    def note(self, kind: str, label: str = "") -> None:
        phase, site = self._where()
        self.counts[phase, kind, site] += 1
        if label:
            self.labels[site, f"{kind}: {label}"] += 1

    def error(self, message: str) -> None:
        phase, site = self._where()
        self.errors[phase, message, site] += 1

    def found(self, kind: str, *phases: str) -> dict[str, int]:
        """Return call site -> number of this kind in the phases, in all without any."""
        sites: Counter[str] = Counter()
        for (phase, of, site), count in self.counts.items():
            if of == kind and (not phases or phase in phases):
                sites[site] += count
        return dict(sites)

    def clear(self) -> None:
        for kept in (self.counts, self.errors, self.labels):
            kept.clear()

    def origin(self) -> str:
        """Return the call site: of the innermost frame of the project, or of a test."""
        frame: FrameType | None = sys._getframe(1)
        test = ""
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(_PROJECT):
                return f"{name.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
            if not test and name.startswith(_TESTS) and not name.startswith(_OWN):
                test = f"{name.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
            frame = frame.f_back
        return test

    def _where(self) -> tuple[str, str]:
        """Return the phase and the call site."""
        frame: FrameType | None = sys._getframe(1)
        codes = set()
        while frame is not None:
            codes.add(frame.f_code)
            frame = frame.f_back
        return next((phase for code, phase in self.phases.items() if code in codes), "other"), self.origin()

    # Order

    @property
    def host_clock(self) -> Clock:
        return self._thread.clock

    def current_stream(self, device: Any = None) -> Stream:
        return self._thread.stream or self.default_stream

    @contextmanager
    def on_stream(self, stream: Stream | None) -> Iterator[None]:
        before, self._thread.stream = self._thread.stream, stream or self._thread.stream
        try:
            yield
        finally:
            self._thread.stream = before

    def synchronise(self, label: str, stream: Stream | None = None) -> None:
        """Let the host wait for a stream, None for all."""
        with self.lock:
            self.note("synchronisation", label)
            if self.capturing:
                self.error(f"synchronisation in a capture: {label}")
            for each in self.streams if stream is None else [stream]:
                merge(self.host_clock, each.clock)

    def pageable(self, label: str) -> None:
        self.note("pageable copy", label)
        if self.capturing:
            self.error("pageable copy in a capture")

    def access(self, memory: Memory, region: Region, write: bool, on_host: bool = False) -> None:
        """Queue an access on the current stream; on_host: pageable copies are made by the host, in order."""
        if write:
            self.before_write(memory)
        if on_host:
            return self.host_access(memory, region, write, "copy")
        stream = self.current_stream()
        time = stream.tick()
        if region.start == region.end:
            return None
        for kind, other in memory.accesses.conflicts(region, write, stream.clock):
            kind = (
                f"{'write' if write else 'read'} on stream {stream.id} is not ordered after a {kind} on stream {other}"
            )
            self.error(f"race: {kind}, of memory from {memory.born}")
        memory.accesses.add(region, write, stream.id, time)
        return None

    def host_access(self, memory: Memory, region: Region, write: bool, name: str) -> None:
        """Access pinned memory in the calling thread, at once."""
        if any(memory.accesses.conflicts(region, write, self.host_clock)):
            what = "writes to" if write else "reads"
            self.error(f"race: the host {what} pinned memory that a copy may use ({name}), from {memory.born}")

    # Memory

    def tensor(self, elem: torch.Tensor) -> DeviceTensor:
        """Wrap CPU memory as a new allocation of the device."""
        return DeviceTensor.of(elem, Memory(self, elem))

    def pinned(self, elem: torch.Tensor) -> PinnedTensor:
        self.note("pinned allocation")
        if self.capturing:
            self.error("pinned allocation in a capture")
        return PinnedTensor.of(elem, Memory(self, elem, pinned=True))

    def upload(self, source: torch.Tensor, dtype: torch.dtype | None, non_blocking: bool) -> DeviceTensor:
        with self.lock:
            made = self.tensor(torch.empty(source.shape, dtype=dtype or source.dtype))
            made.copy_(source, non_blocking=non_blocking)
        return made

    def allocated(self, num_bytes: int) -> int:
        """Count an allocation, and return its number."""
        self.used += num_bytes
        self.peak = max(self.peak, self.used)
        return next(self.numbers)

    def freed(self, memory: Memory) -> None:
        """Check that memory that returns to its stream is not in use on others. Pinned memory waits for its copies."""
        with self.lock:
            self.used -= memory.num_bytes
            if memory.pinned:
                return
            known = dict(memory.stream.clock)
            merge(known, self.host_clock)
            left = memory.accesses.unknown_streams(known) - {memory.stream.id} - memory.recorded
            for stream in left:
                self.error(f"freed while stream {stream} may use it, without record_stream: memory from {memory.born}")

    # Capture

    @property
    def capturing(self) -> bool:
        return self._thread.graph is not None

    def record(self, run: Callable[[], None]) -> None:
        """Add work to the graph that is captured."""
        if self._thread.graph is not None and not self._thread.silent:
            self._thread.graph.work.append(run)

    def before_write(self, memory: Memory) -> None:
        for journal in self._thread.journals:
            journal.before_write(memory)

    @contextmanager
    def journal(self) -> Iterator[Journal]:
        """Undo writes to memory that exists already, once `undo` is called."""
        journal = Journal(next(self.numbers))
        self._thread.journals.append(journal)
        try:
            yield journal
        finally:
            self._thread.journals.remove(journal)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Record no work."""
        self._thread.silent += 1
        try:
            yield
        finally:
            self._thread.silent -= 1

    @property
    def is_silent(self) -> bool:
        return self._thread.silent > 0

    @contextmanager
    def capture(self, graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
        """torch.cuda.graph, which waits for the device first."""
        self.synchronise("graph capture")
        with self.captured(graph):
            yield

    @contextmanager
    def captured(self, graph: Graph) -> Iterator[None]:
        """Record the work of the calling thread instead of running it: what it wrote is undone."""
        stream = Stream(self)
        merge(stream.clock, self.current_stream().clock)
        with self.journal() as journal, self.on_stream(stream):
            self._thread.graph = graph
            try:
                yield
            finally:
                self._thread.graph = None
        journal.undo()
        graph.is_captured = True
        for other in (self.current_stream(), self.default_stream):  # the work did not run: they need not wait for it
            merge(other.clock, stream.clock)
