"""The blobs of a prompt in the order in which they are needed, and which layers are there."""

from __future__ import annotations

import threading
import time


class LoadQueue:
    """Threads take blobs (layer, chunk) layer by layer, so that layer 0 is complete first, and say what has arrived; the
    computing thread waits for a layer. An error of any thread reaches whoever waits."""

    def __init__(self, num_layers: int, num_chunks: int) -> None:
        self._num_chunks, self._num_blobs = num_chunks, num_layers * num_chunks
        self._taken = 0
        self._missing = [num_chunks] * num_layers
        self._stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self.last_arrival = time.perf_counter()

    def take(self) -> tuple[int, int] | None:
        """The next (layer, chunk). None: there is nothing left to do."""
        with self._changed:
            if self._stopped or self._taken == self._num_blobs:
                return None
            self._taken += 1
            return divmod(self._taken - 1, self._num_chunks)

    def arrived(self, layer: int, num_chunks: int = 1) -> None:
        """So many more chunks of the layer are there."""
        with self._changed:
            self.last_arrival = time.perf_counter()
            self._missing[layer] -= num_chunks
            if self._missing[layer] == 0:
                self._changed.notify_all()

    def stop(self, error: BaseException | None = None) -> None:
        """Nothing more is taken. Whoever waits gets the first error there was."""
        with self._changed:
            self._stopped, self._error = True, self._error or error
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Return when all of the layer is there. Raises the error that stopped the queue."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._missing[layer] == 0)
            if self._error is not None:
                raise self._error
