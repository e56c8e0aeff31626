"""Collect chunks by a running engine, which has the model in memory already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from typing import Protocol, cast

from cacheblend_store import ChunkStore

from cacheblend_cli.client import EngineLost
from cacheblend_cli.collect.collector import ChunkStatus, CollectedChunk, Collector, How, PlannedChunk
from cacheblend_cli.prompt.collection import Collection


class WarmEngine(Protocol):
    """A running engine over the same store, with the same model and settings: `cacheblend_cli.client.Client`."""

    def collect(
        self, keys: Iterable[bytes], codec: str, salt: str, day: date | None, *, again: bool
    ) -> Iterator[tuple[bytes, str, str]]:
        """Compute the KV of stored chunks in this order. Yield the fields of a CollectedChunk once it is durable.

        Raises the engine's errors, and EngineLost.
        again: compute chunks that have KV, too; otherwise they are left out.
        """
        ...


class WarmCollector(Collector):
    """Collects chunks by a running engine, and in this process once that ends."""

    def __init__(self, collection: Collection, store: ChunkStore, engine: WarmEngine) -> None:
        super().__init__(collection, store, only_known=True)
        self._engine: WarmEngine | None = engine

    def begin(self) -> None:
        if self._engine is None:  # it stores the prefix's KV with its first chunk
            super().begin()

    def store(
        self, chunks: Sequence[PlannedChunk], *, again: bool = False, fetch: bool = True, every_s: float | None = None
    ) -> Iterator[CollectedChunk]:
        of, left = self.collection, {planned.key: planned for planned in chunks}
        if self._engine is not None and left:
            try:
                for key, status, how in self._engine.collect(list(left), of.codec, of.salt, of.day, again=again):
                    del left[key]
                    yield CollectedChunk(key, cast(ChunkStatus, status), cast(How, how))
            except EngineLost:
                self._engine = None
        if self._engine is None:
            yield from super().store(list(left.values()), again=again, fetch=fetch, every_s=every_s)
