"""CUDA streams and events without a GPU: queued work runs late, in any order that streams and events allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from cacheblend_cli.kv import transfer


class FakeCuda:
    """Replaces the parts of torch.cuda that `CudaTransfer` uses. `seed` determines the order of execution."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.streams: list[FakeStream] = []
        self.compute = FakeStream(self)
        self.current = self.compute
        self.on_copy: Callable[[], None] = lambda: None  # called when a copy to the device is made

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", lambda device=None, priority=0: FakeStream(self))
        monkeypatch.setattr(transfer, "_streams", cache(transfer._streams.__wrapped__))  # none of another test's
        monkeypatch.setattr(torch.cuda, "Event", lambda **options: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        empty = torch.empty

        def allocate(size: int, dtype: torch.dtype, device: Any = None, pin_memory: bool = False) -> Any:
            memory = empty(size, dtype=dtype)
            return memory if pin_memory else DeviceTensor(self, memory)

        monkeypatch.setattr(torch, "empty", allocate)

    @contextmanager
    def _on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def run(self, until: Callable[[], bool] | None = None, steps: int = 1 << 30) -> None:
        """Run the next step of random streams, until nothing can run, `until` holds or the steps are used up."""
        for _ in range(steps):
            ready = [s for s in self.streams if s.queue and s.queue[0].ready()]
            if not ready or (until is not None and until()):
                return
            self._rng.choice(ready).queue.popleft().run()

    def some(self) -> None:
        self.run(steps=self._rng.randint(0, 6))


class Step:
    def __init__(self, run: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        self.run, self.ready = run, ready


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.queue: deque[Step] = deque()
        self._cuda = cuda
        cuda.streams.append(self)

    def launch(self, work: Callable[[], None]) -> None:
        self.queue.append(Step(work))

    def wait_event(self, event: FakeEvent) -> None:
        mark = event.mark  # a later record does not matter
        self.queue.append(Step(lambda: None, lambda: mark.reached))

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._cuda)
        event.record(self)
        return event


class Mark:
    reached = True  # an event that was never recorded holds nobody up


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self.mark = cuda, Mark()

    def record(self, stream: FakeStream) -> None:
        self.mark = mark = Mark()
        mark.reached = False
        stream.launch(lambda: setattr(mark, "reached", True))

    def synchronize(self) -> None:
        self._cuda.run(lambda: self.mark.reached)
        assert self.mark.reached, "the host waits for ever"

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.mark.reached
        assert end.mark.reached
        return 1.0


class DeviceTensor:
    """Device memory. Copies into it are queued on the current stream."""

    def __init__(self, cuda: FakeCuda, memory: torch.Tensor) -> None:
        self._cuda, self.memory = cuda, memory

    def split(self, size: int) -> list[DeviceTensor]:
        return [DeviceTensor(self._cuda, part) for part in self.memory.split(size)]

    def __getitem__(self, index: slice) -> DeviceTensor:
        return DeviceTensor(self._cuda, self.memory[index])

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking

        def copy() -> None:
            self._cuda.on_copy()
            self.memory.copy_(source)

        self._cuda.current.launch(copy)
