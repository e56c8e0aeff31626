"""What a precompute finds: the documents on disk, and what the store has of them for the model, in any codec and context."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from typing import Any

from cacheblend_store import ChunkStore, DocumentRecord
from cacheblend_store.format.blobs import CODECS

from cacheblend_cli.collect.document_records import gone_documents, stored_documents
from cacheblend_cli.collect.paths import Paths
from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.collect.source_settings import DocumentRoot, SourceSettings
from cacheblend_cli.corpus.documents import Document, Skipped, read_documents
from cacheblend_cli.corpus.places import is_within, linked_from, place_of
from cacheblend_cli.corpus.selection import Selection
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.dates import kept_dates
from cacheblend_cli.prompt.kept import ids_of_wordings
from cacheblend_cli.prompt.wording import Wording


@dataclass(frozen=True)
class CorpusDiff:
    """collection: of any codec. roots: what the store remembers.

    paths: the names of what was given -> the project that a link below it leads from, if any. documents: in order. kept:
    name -> digest of the documents that are there, "" of those that nobody could read.
    stored: key in the store -> record, under the name the document has now. gone: the same of documents that are no more,
    for any model or salt.
    codecs: by collection. worded: names of documents that are stored behind another wording of the prompt -> it, the
    latest; these stay as they are. earlier: collections behind an earlier date, and it; their documents are stored anew.
    selections: what is taken of each of the paths. name: of a collection that they are of.
    """

    collection: Collection
    paths: dict[str, str | None]
    documents: list[Document]
    kept: dict[str, str]
    stored: dict[bytes, DocumentRecord]
    gone: dict[bytes, DocumentRecord]
    codecs: dict[str, str]
    worded: dict[str, Wording]
    earlier: dict[str, date]
    roots: SourceSettings
    selections: dict[str, Selection]
    name: str = ""

    @cached_property
    def linked(self) -> dict[str, set[str]]:
        """Root -> names of the documents that links below it led to."""
        found: dict[str, set[str]] = {}
        for document in self.documents:
            if not is_within(document.source, document.root):
                found.setdefault(document.root, set()).add(document.source)
        return found

    @cached_property
    def _by_name(self) -> dict[str, list[DocumentRecord]]:
        found: dict[str, list[DocumentRecord]] = {}
        for record in self.stored.values():
            found.setdefault(record.source, []).append(record)
        return found

    @cached_property
    def left_behind(self) -> set[str]:
        """Names of documents that this run does not look at and that an earlier date hides from questions."""
        ending = {record.source for record in self.gone.values()}
        current = {r.source for r in self.stored.values() if r.collection not in self.earlier}
        names = {r.source for r in self.stored.values() if r.collection in self.earlier}
        return names - current - ending - self.kept.keys()

    def versions(self, name: str) -> list[DocumentRecord]:
        """What is stored of a document."""
        return self._by_name.get(name, [])

    def replaced(self, name: str, collection: Collection, context: str) -> list[DocumentRecord]:
        """What is stored of a document in that codec and context, also behind an earlier date."""
        return [
            r
            for r in self.versions(name)
            if r.context == context
            and (
                r.collection == collection.id
                or (r.collection in self.earlier and self.codecs[r.collection] == collection.codec)
            )
        ]

    def is_outdated(self, record: DocumentRecord) -> bool:
        """Whether a document's record says something else than the document, or stands behind an earlier date."""
        digest = self.kept.get(record.source)
        return bool(digest) and (record.content_digest != digest or record.collection in self.earlier)

    @cached_property
    def names(self) -> dict[str, str]:
        """Digest -> a name of the document that says it."""
        return {document.digest: document.source for document in self.documents}

    def settings_of(self, name: str, root: str) -> CollectSettings:
        """How a document, or a root, was cut and collected when that was last said: by what is remembered of the nearest
        root; else as the last document below the root, or one that has moved there, is stored."""
        known = self.roots.nearest(name) or self.roots.nearest(root)
        if known is not None:
            return known.settings
        records = [r for r in self.stored.values() if is_within(r.source, root)]
        records = records or [r for r in self.gone.values() if r.content_digest in self.names]
        for record in sorted(records, key=lambda r: r.updated, reverse=True):
            codec = self.codecs.get(record.collection, "auto")
            kv_dtype = "auto" if codec == self.collection.in_codec("auto").codec else codec
            if (found := CollectSettings.of_document(record, kv_dtype)) is not None:
                return found
        return CollectSettings()

    def given_roots(self, given: Mapping[str, Any]) -> list[DocumentRoot]:
        """What there is to remember of the paths. given: the settings that were asked for, as to `survey`."""
        of = self.collection
        return [
            DocumentRoot(
                path,
                of.model.fingerprint,
                of.salt_digest,
                replace(self.settings_of(path, path), **given),
                frozenset(self.linked.get(path, ())),
                frozenset(filter(None, [project])),
                selection=self.selections[path],
                collections=frozenset(filter(None, [self.name])),
            )
            for path, project in self.paths.items()
        ]


def survey(
    collection: Collection,
    store: ChunkStore | None,
    paths: Paths,
    on_skipped: Callable[[Skipped], None],
) -> CorpusDiff:
    """Read the documents at and below the paths, and compare."""
    names = {place_of(path): linked_from(path) for path in paths.all}
    roots = SourceSettings(collection, store)
    selections = {name: replace(roots.selection_of(name), **paths.select) for name in names}
    found, kept, no_documents = list[Document](), dict[str, str](), set[str]()
    for document in read_documents(
        paths.named, paths.listed, lambda path: selections[place_of(path)], paths.conversions
    ):
        if isinstance(document, Document):
            found.append(document)
            kept[document.source] = document.digest
        else:
            on_skipped(document)
            if document.unread:
                kept[document.source] = ""
            else:
                no_documents.add(document.source)
    codecs = {replace(collection, codec=codec).id: codec for codec in CODECS}
    earlier = _earlier(collection, store)
    codecs |= {of.id: of.codec for of, _ in earlier}
    records = stored_documents(store) if store else {}
    stored = {k: r for k, r in records.items() if r.collection in codecs}
    wordings = ids_of_wordings(store, collection) if store else {}
    behind = sorted((r for r in records.values() if r.collection in wordings), key=lambda r: r.updated)
    worded = {r.source: wordings[r.collection] for r in behind}
    gone = gone_documents(records, kept, no_documents, names)
    gone |= gone_documents(stored, kept, no_documents | roots.unlinked(names, kept.keys()), names)
    days = {of.id: day for of, day in earlier}
    return CorpusDiff(
        collection, names, found, kept, stored, gone, codecs, worded, days, roots, selections, paths.collection
    )


def _earlier(collection: Collection, store: ChunkStore | None) -> list[tuple[Collection, date]]:
    """The collections, in every codec, that questions had behind earlier dates."""
    dates = kept_dates(store, collection) if store is not None else None
    days = (*dates.earlier, dates.day) if dates is not None else ()
    return [
        (replace(of, codec=codec), day)
        for day in days
        if day != collection.day
        for of in [collection.on(day)]
        for codec in CODECS
    ]
