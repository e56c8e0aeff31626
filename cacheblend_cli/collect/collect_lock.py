"""The lock of a store's missing KV, so that precompute and idle engines never compute the same chunk.

precompute shares it while it computes KV. An idle engine holds it alone during each launch. After either has taken it,
chunks that have KV meanwhile are skipped.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from cacheblend_store import ChunkStore
from cacheblend_store.private_files import open_file

NAME = "collect.lock"


@contextmanager
def collecting(store: ChunkStore) -> Iterator[None]:
    """Share the lock. Waits for the launch of an idle engine."""
    with _held(store, fcntl.LOCK_SH):
        yield


@contextmanager
def collecting_alone(store: ChunkStore) -> Iterator[bool]:
    """Hold the lock alone, without waiting. Yields whether it is held."""
    with _held(store, fcntl.LOCK_EX | fcntl.LOCK_NB) as held:
        yield held


@contextmanager
def _held(store: ChunkStore, kind: int) -> Iterator[bool]:
    """Yield whether the lock is held: never in another user's store, and on a filesystem without locks."""
    handle, held = None, False
    try:
        if store.is_own:
            handle = open_file(store.path / NAME, os.O_RDWR | os.O_CREAT, anywhere=True)
            fcntl.flock(handle, kind)
            held = True
    except OSError:
        pass
    try:
        yield held
    finally:
        if handle is not None:
            os.close(handle)
