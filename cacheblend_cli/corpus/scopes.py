"""Scopes: sets of documents that a command works on."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from cacheblend_cli.corpus.places import (
    SENT,
    is_file,
    is_stdin,
    is_within,
    place_of,
    project_folder,
    shown,
    with_parents,
)
from cacheblend_cli.errors import NotFoundError
from cacheblend_cli.types import EVERYTHING, Scope

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore, Memo

ROOTS = "root"
"""Kind of the store memos that record document roots, see collect/settings.py."""
_MAGIC = re.compile(r"[*?\[]")


def scope_of(text: str) -> Scope:
    """Parse `--source`: a document, a directory or a pattern, relative to the current directory."""
    parts = text.split("/")
    plain = next((i for i, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    if plain == len(parts):
        return Scope(place_of(text), "", text)
    head = place_of("/".join(parts[:plain]) or ("/" if text.startswith("/") else "."))
    tail = "/".join(parts[plain:]).replace("**/", "*")
    return Scope(place_of(text), f"{glob.escape(head).rstrip('/')}/{tail}", text)


def holds(scope: Scope, name: str) -> bool:
    if not scope.path:
        return not name.startswith(SENT)
    if scope.typed and not is_file(name):
        return fnmatchcase(shown(name), scope.typed)
    if is_within(name, scope.path) or (scope.linked and not scope.linked.isdisjoint(with_parents(name))):
        return True
    return bool(scope.pattern) and (fnmatchcase(name, scope.pattern) or fnmatchcase(name, f"{scope.pattern}/*"))


def roots_in(store: ChunkStore, scope: Scope = EVERYTHING) -> dict[str, list[Memo]]:
    """Return the memos of the document roots in the scope by path, sorted, without stdin."""
    found: dict[str, list[Memo]] = {}
    for memo in store.memos(ROOTS):
        path = memo.name.partition("\0")[0]
        if holds(scope, path) and not is_stdin(path):
            found.setdefault(path, []).append(memo)
    return found


def collection_scope(store: ChunkStore, name: str) -> Scope:
    """Return the paths precomputed as a collection. Raises NotFoundError with the known collections."""
    paths, names = set[str](), set[str]()
    for memo in store.memos(ROOTS):
        with suppress(KeyError, TypeError):
            names.update(memo.value["collections"])
            if name in memo.value["collections"]:
                paths |= {memo.value["path"], *memo.value["linked"]}
    if not paths:
        known = ", ".join(sorted(names)) or "none"
        hint = f"known: {known}; cacheblend precompute --collection {name} docs/"
        raise NotFoundError(f"the store has no collection {name}", hint)
    return Scope(min(paths), linked=frozenset(paths))


def project_scope(store: ChunkStore) -> Scope:
    """Return the scope of everything below the current project, following links. Without a project: all documents."""
    folder = project_folder()
    if folder is None:
        return EVERYTHING
    linked = set[str]()
    for memo in store.memos(ROOTS):
        with suppress(KeyError, TypeError):
            if folder in memo.value["projects"]:
                linked.add(memo.value["path"])
            if folder in memo.value["projects"] or is_within(memo.value["path"], folder):
                linked.update(memo.value["linked"])
    return Scope(folder, linked=frozenset(linked))


def scope_here(store: ChunkStore, names: Iterable[str]) -> tuple[Scope, str]:
    """Return the default scope of a command, and a sentence about it (empty if the scope is all documents of the
    store).

    The scope is the documents below the current project, or all documents if none of them is.
    """
    everything, scope = list(names), project_scope(store)
    if not scope.path:
        return EVERYTHING, ""
    count = sum(holds(scope, name) for name in everything)
    if not count:
        return EVERYTHING, f"searching all stored documents: none of them is below {scope.path}"
    if count == len(everything):
        return scope, ""
    return scope, f"searching {count} of {len(everything)} documents, those below {scope.path}; --all searches all"
