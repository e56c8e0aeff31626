"""What a process of a part knows, and the form of its cases."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu.log import Log
from gpu.plan import SLOW_STARTS

Rows = Iterator[tuple[str, dict[str, Any]]]  # (part of the result, row)
Cases = Iterator[tuple[str, Callable[[], Rows]]]  # (name, function that runs it)


@dataclass(frozen=True)
class Context:
    """Inputs of a process. until: `time.time()` after which no case starts."""

    step: str
    device: torch.device
    tiny: bool
    folder: Path
    log: Log
    until: float
    process: tuple[int, int] = (0, 1)  # which of how many

    @contextmanager
    def slow(self, what: str) -> Iterator[None]:
        """Announce a slow start, one of SLOW_STARTS."""
        self.log.write(self.step, f"({what})", "slow", limit=SLOW_STARTS[what])
        yield
        self.log.write(self.step, f"({what})", "ready")
        freeze()

    @property
    def is_over(self) -> bool:
        return time.time() >= self.until

    def synchronize(self) -> None:
        """Wait for the device; raises if a kernel has left a dead context."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def works(self) -> bool:
        """Return whether the next case can run in this process."""
        try:
            self.synchronize()
        except Exception:
            return False
        return True


def freeze() -> None:
    """Freeze what was imported and made so far, as the product does: the garbage collector would search it during a
    measurement."""
    gc.collect()
    gc.freeze()
