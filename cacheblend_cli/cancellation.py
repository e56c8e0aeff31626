"""Cancellation of work in another thread or process whose result is no longer needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Check = Callable[[], None]
"""Called between two steps of a computation. Raises Cancelled to give it up."""


class Cancelled(Exception):
    """Raised in cancelled work."""


class Cancellation:
    """A flag that ends work. Any thread may cancel and check it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._acts: list[Callable[[], object]] = []

    def cancel(self) -> None:
        """Set the flag, and call what `ended_by` registered, in this thread. It must not block."""
        with self._lock:
            acts, self._acts, self._cancelled = self._acts, [], True
        for act in acts:
            act()

    def check(self) -> None:
        """Raise Cancelled if the work is cancelled."""
        if self._cancelled:
            raise Cancelled

    @contextmanager
    def ended_by(self, act: Callable[[], object]) -> Iterator[None]:
        """Call `act` if the work is cancelled inside this context: for instance to kill a process that it waits for.

        Raises Cancelled on entry if the work is cancelled, and on an error inside if it was cancelled meanwhile.
        """
        with self._lock:
            self.check()
            self._acts.append(act)
        try:
            yield
        except Exception:
            self.check()
            raise
        finally:
            with self._lock:
                if act in self._acts:
                    self._acts.remove(act)


def go_on() -> None:
    """Never cancel."""
