"""Open the store of the settings, and remember its model. Imports neither torch nor numpy."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import cacheblend_store

from cacheblend_cli import trust, user_cache
from cacheblend_cli.cli.output import Output
from cacheblend_cli.model.named import NOTES
from cacheblend_cli.settings import Resolved, Settings

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

OF_THE_STORE = "the store"
"""Origin of a model that no setting names."""


def open_store(
    settings: Settings, *, write: bool, create: bool | None = None, max_bytes: int | None = None
) -> ChunkStore:
    """Open the store of the settings. Writing creates it unless `create` is False; reading needs an existing one.
    max_bytes: a new quota, or None to keep the store's. A new store in a project's `.cacheblend` is marked as this
    user's, so that later commands there use it; a store that replaced it is refused."""
    path = settings.store_path
    is_projects = path.name == trust.STORE and path.parent.name == trust.PROJECT_FOLDER
    is_new = is_projects and not trust.has_store(path.parent)
    if is_new and write:
        with suppress(OSError):
            trust.unstamp(path.parent)
    store = cacheblend_store.ChunkStore.open(
        path,
        mode="write" if write else "read",
        create=create,
        max_bytes=max_bytes,
        lock_timeout=settings.lock_timeout,
        force=settings.force_store,
        accept=partial(_accept, path.parent) if is_projects else None,
    )
    if is_new or (is_projects and trust.stamped(path.parent) == ""):
        try:
            trust.stamp(path.parent, store.identity)
        except OSError as error:
            if is_new:
                Output().warn(
                    f"{path.parent} cannot be marked as yours ({error.strerror}): other commands will not find the store; "
                    f"name it: --store {path}"
                )
    return store


def _accept(folder: Path, identity: str) -> None:
    """Raise StoreFormat if a `.cacheblend` of this user holds a store with another identity than the user's."""
    if trust.stamped(folder) not in (None, "", identity):
        raise cacheblend_store.StoreFormat(
            f"the store at {folder / trust.STORE} is not the one that you made: it was replaced, as git pull can do",
            f"remove it: rm -r {folder / trust.STORE}, then precompute again; or, if you trust it: cacheblend trust",
        )


def store_in_use(
    settings: Settings, *, write: bool = True, create: bool = False, note: Callable[[str], None] = lambda text: None
) -> ChunkStore:
    """Open a store for writing (to record use and save computed chunks), or for reading without permission. create:
    make it if it is missing. note: called with the reason for reading only."""
    if write:
        try:
            return open_store(settings, write=True, create=create)
        except cacheblend_store.StorePermission as error:
            path = settings.store_path
            if create and (not path.exists() or os.access(path, os.W_OK)):  # cannot be created, or is not safe
                raise
            note(f"{error.message}: documents and computed KV are not stored")
    return open_store(settings, write=False)


def with_model_of_store(resolved: Resolved) -> Resolved:
    """Return the settings; if they name no model, with the one that this user last precomputed with into the store."""
    name = "" if resolved.settings.model else user_cache.recall(_model_file(resolved.settings))
    if not name or (os.path.isabs(name) and not os.path.exists(name)):
        return resolved
    origin = {**resolved.origin, "model": OF_THE_STORE}
    return replace(resolved, settings=replace(resolved.settings, model=name), origin=origin)


def remember_model(resolved: Resolved) -> None:
    """Remember a model that was given as a flag. The user's cache has it, not the store, which may come from others."""
    name = resolved.settings.model
    if resolved.origin["model"] == "flag":
        path = Path(name).expanduser()
        is_path = name not in NOTES and path.exists()  # a built-in name goes before a path
        user_cache.keep(_model_file(resolved.settings), os.path.abspath(path) if is_path else name)


def _model_file(settings: Settings) -> Path:
    return user_cache.place("models", os.path.realpath(settings.store_path))
