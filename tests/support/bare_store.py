"""Change a store without going through ChunkStore."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cacheblend_store import ChunkStore


@contextmanager
def bare_writing(store: ChunkStore) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield py-lmdb's write transaction and its database handles."""
    with store._environment().writing(store.lock_timeout) as (transaction, dbs, _):
        yield transaction, dbs
