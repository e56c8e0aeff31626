"""Open the store of the settings. Imports neither torch nor numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend_cli.settings import Settings

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore


def open_store(
    settings: Settings, *, write: bool, create: bool | None = None, max_bytes: int | None = None
) -> ChunkStore:
    """Open the store of the settings. Writing creates it unless `create` is False; reading needs an existing one.

    max_bytes: a new quota, or None to keep the store's.
    """
    from cacheblend_store import ChunkStore

    return ChunkStore.open(
        settings.store_path,
        mode="write" if write else "read",
        create=create,
        max_bytes=max_bytes,
        lock_timeout=settings.lock_timeout,
        force=settings.force_store,
    )


def store_in_use(settings: Settings, *, write: bool = True) -> ChunkStore:
    """Open an existing store for writing (to record use and save computed chunks), or for reading without
    permission."""
    from cacheblend_store import StorePermission

    if write:
        try:
            return open_store(settings, write=True, create=False)
        except StorePermission:
            pass
    return open_store(settings, write=False)
