"""Open the store of the settings. Imports neither torch nor numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cacheblend_store

from cacheblend_cli import trust
from cacheblend_cli.cli.output import Output
from cacheblend_cli.settings import Settings

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore


def open_store(
    settings: Settings, *, write: bool, create: bool | None = None, max_bytes: int | None = None
) -> ChunkStore:
    """Open the store of the settings. Writing creates it unless `create` is False; reading needs an existing one.
    max_bytes: a new quota, or None to keep the store's. A new store in a project's `.cacheblend` is marked as this
    user's, so that later commands there use it."""
    path = settings.store_path
    is_projects = path.name == trust.STORE and path.parent.name == trust.PROJECT_FOLDER
    is_new = is_projects and not trust.has_store(path.parent)
    store = cacheblend_store.ChunkStore.open(
        path,
        mode="write" if write else "read",
        create=create,
        max_bytes=max_bytes,
        lock_timeout=settings.lock_timeout,
        force=settings.force_store,
    )
    if is_new:
        try:
            trust.stamp(path.parent)
        except OSError as error:
            Output().warn(
                f"{path.parent} cannot be marked as yours ({error.strerror}): other commands will not find the store; "
                f"name it: --store {path}"
            )
    return store


def store_in_use(settings: Settings, *, write: bool = True, create: bool = False) -> ChunkStore:
    """Open a store for writing (to record use and save computed chunks), or for reading without permission. create:
    make it if it is missing."""
    if write:
        try:
            return open_store(settings, write=True, create=create)
        except cacheblend_store.StorePermission:
            pass
    return open_store(settings, write=False)
