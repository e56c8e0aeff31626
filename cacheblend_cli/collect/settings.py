"""Settings for cutting and collecting documents, and those that the store remembers for given paths."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from cacheblend_store import ChunkStore, Memo
from cacheblend_store.conversion import convert
from msgspec import to_builtins

from cacheblend_cli.corpus.places import is_below, is_stdin, is_within
from cacheblend_cli.corpus.scopes import ROOTS
from cacheblend_cli.corpus.search import CONTEXTS
from cacheblend_cli.corpus.walk import ALL, Selection
from cacheblend_cli.errors import UsageError, check_known
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.settings.fields import REMOVED_KV_DTYPES, check_kv_dtype


@dataclass(frozen=True)
class CollectSettings:
    """Settings of a document or root."""

    chunk_tokens: int = 512  # maximum tokens of a chunk
    context: str = "document"  # left context of a chunk, see corpus/contexts.py
    window: int = 2048  # maximum tokens of a chunk and its left context
    neighbours: int = 3  # number of similar chunks for context `neighbours`
    kv_dtype: str = "auto"  # see `collection.codec_of`
    overlap: int = 0  # maximum tokens of the preceding text that a chunk repeats
    state_every: int = 1  # of a hybrid's document: the state is stored for every N-th chunk, and for the last one

    def __post_init__(self) -> None:
        check_known("context", self.context, CONTEXTS)
        for name in ("chunk_tokens", "window", "neighbours", "state_every"):
            if (value := getattr(self, name)) < 1:
                default = getattr(CollectSettings, name)
                raise UsageError(f"--{name.replace('_', '-')} {value} is not 1 or more", f"{default} is the default")
        if not 0 <= self.overlap <= self.chunk_tokens // 2:
            raise UsageError(
                f"--overlap {self.overlap} is not between 0 and half of --chunk-tokens {self.chunk_tokens}",
                "a tenth of a chunk is usually enough",
            )
        check_kv_dtype(self.kv_dtype)

    def of_record(self) -> dict[str, int]:
        """Return the settings that determine a document's chunks, apart from text, context and codec."""
        counts = {
            "chunk_tokens": True,
            "overlap": self.overlap > 0,
            "state_every": self.state_every != 1,
            "window": self.context != "sink",
            "neighbours": self.context == "neighbours",
        }
        return {name: getattr(self, name) for name, does in counts.items() if does}

    @classmethod
    def of_document(cls, recorded: Mapping[str, Any], context: str, kv_dtype: str) -> CollectSettings | None:
        """Return the settings in a document's record, or None if they are not valid in this version."""
        try:
            return convert(_current({**recorded, "context": context, "kv_dtype": kv_dtype}), cls)
        except (ValueError, UsageError):
            return None


def _current(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings with the KV dtype to use in place of a removed one."""
    recorded = {"kv_dtype": "auto", **recorded}
    return {**recorded, "kv_dtype": REMOVED_KV_DTYPES.get(recorded["kv_dtype"], recorded["kv_dtype"])}


@dataclass(frozen=True)
class DocumentRoot:
    """A path given to precompute, with its settings for one model and salt."""

    path: str  # document name, see corpus/places.py
    model: str  # fingerprint
    salt: str  # digest
    settings: CollectSettings
    linked: frozenset[str] = frozenset()  # documents elsewhere, reached through links below the path
    projects: frozenset[str] = frozenset()  # projects with a link to the path
    updated: float = field(default=0.0, compare=False)  # seconds since the epoch
    selection: Selection = ALL  # which files of a folder to read
    collections: frozenset[str] = frozenset()  # names of the collections that the path belongs to

    def memo(self) -> Memo:
        value = to_builtins(replace(self, updated=0.0), order="sorted")
        return Memo(ROOTS, f"{self.path}\0{self.model}\0{self.salt}", value, self.updated)

    @classmethod
    def of_memo(cls, memo: Memo) -> DocumentRoot | None:
        """Return the root of a memo, or None if its settings are not valid in this version."""
        try:
            value = {**memo.value, "settings": _current(memo.value["settings"])}
            return replace(convert(value, cls), updated=memo.updated)
        except (ValueError, KeyError, TypeError, UsageError):
            return None


class SourceSettings:
    """Roots that a store remembers for a salt. If a model has no root for a path, roots of other models apply."""

    def __init__(self, collection: Collection, store: ChunkStore | None) -> None:
        self._model, salt = collection.model.fingerprint, collection.salt_digest
        found = map(DocumentRoot.of_memo, store.memos(ROOTS) if store is not None else ())
        self._every = [root for root in found if root is not None]
        known = [root for root in self._every if root.salt == salt]
        self._own = [root for root in known if root.model == self._model]
        self._others = [root for root in known if root.model != self._model]

    @property
    def paths(self) -> list[str]:
        """Sorted paths that were given for this model."""
        return sorted({r.path for r in self._own if not is_stdin(r.path)})

    @property
    def links(self) -> dict[str, frozenset[str]]:
        """Map paths that were given, for any model and salt, to the documents elsewhere that links below them led
        to."""
        return {r.path: r.linked for r in (*self._every, *self._own)}

    def nearest(self, name: str) -> DocumentRoot | None:
        """Return the nearest root at or above a document or root."""
        own, others = ([r for r in roots if is_within(name, r.path)] for roots in (self._own, self._others))
        return max(own or others, key=lambda r: (len(r.path), r.updated), default=None)

    def selection_of(self, name: str) -> Selection:
        """Return the remembered selection of a folder, or of the nearest root above it."""
        known = self.nearest(name)
        return ALL if known is None else known.selection

    def unlinked(self, paths: Iterable[str], kept: Set[str]) -> set[str]:
        """Return documents that were reached through a link below one of the paths, and that no link or root reaches
        now.

        kept: names of the documents found below the paths.
        """
        looked_at = set(paths)
        lost = {name for r in self._own if r.path in looked_at for name in r.linked} - kept

        def is_reached(name: str) -> bool:
            return any(is_within(name, r.path) or (name in r.linked and r.path not in looked_at) for r in self._own)

        return {name for name in lost if not is_reached(name)}

    def remember(
        self, store: ChunkStore, roots: Iterable[DocumentRoot], given: Mapping[str, Any], *, done: bool
    ) -> None:
        """Store the settings of the roots.

        given: settings from the command line, also applied to roots below these.
        done: the run is complete. Before that, documents that it may still remove stay linked.
        """
        now = time.time()
        known = {r.path: r for r in self._own}
        after, wanted = dict(known), {root.path: root for root in roots}
        for path, root in wanted.items():
            above, old = self.nearest(path), known.get(path)
            if old is not None:
                linked = root.linked if done else root.linked | old.linked
                root = replace(root, linked=linked, projects=root.projects | old.projects)
                root = replace(root, collections=root.collections | old.collections)
            wants = self._model, root.settings, root.selection
            inherits = above is not None and (above.model, above.settings, above.selection) == wants
            if old is not None or root.linked or root.projects or root.collections or not inherits:
                after[path] = replace(root, updated=now)
            for below in known.values():
                if is_below(below.path, path) and below.path not in wanted:
                    after[below.path] = replace(below, settings=replace(below.settings, **given), updated=now)
        store.put_memos([root.memo() for path, root in after.items() if root != known.get(path)])
        self._own = list(after.values())
