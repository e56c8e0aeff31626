"""Salvage: a store with damaged pages is copied, as far as it reads, into a new file that takes its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cacheblend_store.store import ChunkStore


def salvage(store: ChunkStore, progress: Callable[[int, int], None] | None = None) -> None:
    raise NotImplementedError
