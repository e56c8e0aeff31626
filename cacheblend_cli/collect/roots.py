"""Document roots: what the store remembers of the paths that were given to precompute."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from cacheblend_store import ChunkStore, Memo

from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.corpus.places import is_below
from cacheblend_cli.prompt.collection import Collection

_KIND = "root"


@dataclass(frozen=True)
class DocumentRoot:
    """A path that was given to precompute, for one model and salt, and how what is below it is cut and collected.

    path: its name, see corpus/places.py. linked: names of documents elsewhere that links below it lead to.
    """

    path: str
    model: str
    salt: str
    settings: CollectSettings
    linked: frozenset[str] = frozenset()
    updated: float = field(default=0.0, compare=False)

    def covers(self, name: str) -> bool:
        """Whether a document is at or below the path."""
        return name == self.path or is_below(name, self.path)

    def memo(self) -> Memo:
        value = {
            "path": self.path, "model": self.model, "salt": self.salt,
            "settings": vars(self.settings), "linked": sorted(self.linked),
        }  # fmt: skip
        return Memo(_KIND, f"{self.path}\0{self.model}\0{self.salt}", value, self.updated)

    @classmethod
    def of_memo(cls, memo: Memo) -> DocumentRoot | None:
        """None for one that makes no sense here."""
        value: Mapping[str, Any] = memo.value
        try:
            path, model, salt = (str(value[name]) for name in ("path", "model", "salt"))
            settings, linked = CollectSettings.remembered(value["settings"]), frozenset(map(str, value["linked"]))
        except (KeyError, TypeError, AttributeError):
            return None
        return None if settings is None else cls(path, model, salt, settings, linked, memo.updated)


class Roots:
    """The roots a store remembers for a salt. A model for which a path was never given takes what another model has."""

    def __init__(self, collection: Collection, store: ChunkStore | None) -> None:
        self._model, self._salt = collection.model.fingerprint, collection.salt_digest
        found = map(DocumentRoot.of_memo, store.memos(_KIND) if store is not None else ())
        self._known = [root for root in found if root is not None and root.salt == self._salt]

    def nearest(self, name: str) -> DocumentRoot | None:
        """The root that a document, or another root, is at or below."""
        own = [r for r in self._known if r.covers(name) and r.model == self._model]
        others = [r for r in self._known if r.covers(name)]
        return max(own or others, key=lambda r: (len(r.path), r.updated), default=None)

    def unlinked(self, paths: Iterable[str], kept: Set[str]) -> set[str]:
        """Names of documents that a link below one of the paths led to and none does now, nor is any other root's.

        kept: names of the documents that were found below the paths."""
        looked_at = set(paths)
        own = [r for r in self._known if r.model == self._model]
        lost = {name for r in own if r.path in looked_at for name in r.linked} - kept
        return {
            name
            for name in lost
            if not any(r.covers(name) or (name in r.linked and r.path not in looked_at) for r in own)
        }

    def remember(
        self,
        store: ChunkStore,
        settings: Mapping[str, CollectSettings],
        given: Mapping[str, Any],
        linked: Mapping[str, Set[str]],
        *,
        done: bool,
    ) -> None:
        """Write down how the paths are collected from now on. given: what was asked for, which counts for roots below
        them too. linked: by path. done: the run is at its end; before it, documents it may yet remove stay linked."""
        now = time.time()
        known = {r.path: r for r in self._known if r.model == self._model}
        after = dict(known)
        for path, wanted in settings.items():
            names = frozenset(linked.get(path, ()))
            if path in known and not done:
                names |= known[path].linked
            above = self.nearest(path)
            if path in known or names or above is None or above.model != self._model or above.settings != wanted:
                after[path] = DocumentRoot(path, self._model, self._salt, wanted, names, now)
            for root in known.values():
                if is_below(root.path, path) and root.path not in settings:
                    after[root.path] = replace(root, settings=replace(root.settings, **given), updated=now)
        changed = [root for path, root in after.items() if root != known.get(path)]
        store.put_memos([root.memo() for root in changed])
        self._known = [r for r in self._known if r.model != self._model] + list(after.values())
