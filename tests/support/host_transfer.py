"""The way of KV to a device, on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from cacheblend_cli.kv.staging import Event


class HostTransfer:
    """A `Transfer` that does one thing after another."""

    def __init__(self) -> None:
        self.host: list[Tensor] = []
        self._started = self._last = self._arrived = 0.0
        self._stall = 0.0

    def open(self, num_slots: int, slot_bytes: int) -> None:
        self.host = [torch.empty(slot_bytes, dtype=torch.uint8) for _ in range(num_slots)]
        self._started = time.perf_counter()

    def send(self, slot: int, num_bytes: int, place: Callable[[Tensor], None]) -> Event:
        place(self.host[slot][:num_bytes].clone())
        return _Reached()

    def finish_layer(self, layer: int) -> None:
        self._last = time.perf_counter()

    def arrive(self, layer: int) -> None:
        self._arrived = time.perf_counter()

    def join(self, layer: int) -> None:
        self._stall += time.perf_counter() - self._arrived

    def close(self) -> None:
        self.host = []

    def seconds(self) -> tuple[float, float]:
        return self._last - self._started, self._stall


class _Reached:
    def synchronize(self) -> None:
        return
