"""A store for one measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from cacheblend_store import ChunkStore


@contextmanager
def temporary_store(name: str) -> Iterator[ChunkStore]:
    """Open a new store in a temporary folder, and remove the folder at the end."""
    with (
        TemporaryDirectory(prefix=f"cacheblend-{name}-") as folder,
        ChunkStore.open(Path(folder) / "store", mode="write", force=True) as store,  # wherever TMPDIR is
    ):
        yield store
