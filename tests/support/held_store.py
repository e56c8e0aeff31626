"""A store whose reads of some layers wait until they are let go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

from cacheblend_store import ChunkStore, LayerReads

WAIT_S = 10.0


class HeldStore:
    """A chunk store that reads layers below a limit, and others once that is raised."""

    def __init__(self, store: ChunkStore) -> None:
        self._store, self._held_from, self._changed = store, inf, threading.Condition()
        self._begun = set[bytes]()  # keys of chunks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def hold_from(self, layer: float) -> None:
        with self._changed:
            self._held_from = layer
            self._changed.notify_all()

    def let_go(self) -> None:
        self.hold_from(inf)

    def begins(self, key: bytes) -> bool:
        """Wait until a chunk begins to be read, and return whether it does."""
        with self._changed:
            return self._changed.wait_for(lambda: key in self._begun, WAIT_S)

    @contextmanager
    def read(self) -> Iterator[HeldReader]:
        with self._store.read() as reader:
            yield HeldReader(self, reader)

    def read_layer(self, layer: int, key: bytes) -> None:
        with self._changed:
            self._begun.add(key)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: layer < self._held_from, WAIT_S)


class HeldReader:
    def __init__(self, held: HeldStore, reader: Any) -> None:
        self._held, self._reader = held, reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read_layers(self, reads: LayerReads, group: int, buffer: memoryview) -> None:
        self._held.read_layer(reads.groups[group][0], reads.manifest.key)
        self._reader.read_layers(reads, group, buffer)
