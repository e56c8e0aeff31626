"""The paths of a run, and the documents there compared with the store's records for the model (any codec, context)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as Names
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from typing import Any

from cacheblend_documents.ocr import check_ocr
from cacheblend_store import ChunkStore, DocumentRecord
from cacheblend_store.format.blobs import CODECS

from cacheblend_cli.collect.document_records import StoredDocument, gone_documents
from cacheblend_cli.collect.settings import CollectSettings, DocumentRoot, SourceSettings
from cacheblend_cli.corpus.documents import Conversions, Document, DocumentFile, Skipped, ocr_errors, read_documents
from cacheblend_cli.corpus.places import is_below, is_stdin, is_within, linked_from, place_of, with_parents
from cacheblend_cli.corpus.walk import Selection
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.records import CollectionRecord, kept_records
from cacheblend_cli.prompt.wording import Wording


@dataclass(frozen=True)
class Paths:
    """Documents to read."""

    named: Sequence[str]  # files and folders; "-" is stdin
    listed: Sequence[str] = ()  # files from a list; files without a converter are skipped
    # Selection fields from the command line; others are remembered
    select: Mapping[str, Any] = field(default_factory=dict)
    collection: str = ""  # name for the documents, "" for none
    conversions: Conversions = field(default_factory=Conversions)  # cache, for several runs in one process

    @property
    def all(self) -> list[str]:
        return [*self.named, *self.listed]


@dataclass(frozen=True)
class CorpusDiff:
    """Documents on disk next to the records in the store."""

    collection: Collection  # in any codec
    paths: dict[str, str | None]  # name of each given path -> project with a link to it, None without one
    documents: list[DocumentFile]  # found on disk, in order, without their text
    digests: dict[str, str]  # name -> digest of each document on disk; "" if it could not be read
    stored: dict[bytes, StoredDocument]  # key -> record, under the current name of the document
    gone: dict[bytes, StoredDocument]  # key -> record of a document that no longer exists, for any model or salt
    codecs: dict[str, str]  # collection id -> codec
    # Name of each document that is stored with a different prompt wording -> latest such wording. These records stay.
    worded: dict[str, Wording]
    # Collection id -> earlier date in its prefix, or None if an earlier version stored it. Its documents are stored
    # again.
    earlier: dict[str, date | None]
    source_settings: SourceSettings  # remembered by the store
    selections: dict[str, Selection]  # name of each given path -> which files below it to read
    given: Paths

    @cached_property
    def linked(self) -> dict[str, set[str]]:
        """Root -> names of documents outside the root, reached through links below it."""
        found: dict[str, set[str]] = {}
        for document in self.documents:
            if not is_within(document.source, document.root):
                found.setdefault(document.root, set()).add(document.source)
        return found

    def emptied(self, records: Mapping[bytes, StoredDocument]) -> dict[str, set[str]]:
        """Map each folder of which every stored document is gone to the names of these documents: its drive may not be
        mounted. A document that has moved does not count. Of nested folders, return the outermost.

        The folders are those that the store remembers, and given ones without any document. records: all documents in
        the store.
        """
        remembered = self.source_settings.links
        links = {root: linked for root, linked in remembered.items() if linked}
        lost, alive = dict[str, set[str]](), set[str]()
        for key, record in records.items():
            above, name = list(with_parents(record.source))[1:], record.source
            if key not in self.gone:
                alive.update(() if is_stdin(name) else above)
            elif record.content_digest not in self.names:
                for root in (*above, *(root for root, linked in links.items() if name in linked)):
                    lost.setdefault(root, set()).add(name)
        names = {record.source for record in records.values()}
        moved = {record.content_digest for record in self.gone.values()}
        for file in self.documents:
            if (file.source in names or file.digest in moved) and file.source != file.root:
                alive.update((file.root, *with_parents(file.source)))
        without = self.paths.keys() - {file.root for file in self.documents}
        emptied = (lost.keys() & (without | remembered.keys())) - alive
        return {root: lost[root] for root in sorted(emptied) if not any(is_below(root, other) for other in emptied)}

    def without(self, folder: str, names: Names[str]) -> CorpusDiff:
        """Return the diff without a folder's documents. names: those that are gone."""
        gone = {key: record for key, record in self.gone.items() if record.source not in names}
        left = [file for file in self.documents if file.root != folder and not is_within(file.source, folder)]
        return replace(self, gone=gone, documents=left)

    @cached_property
    def _by_name(self) -> dict[str, list[StoredDocument]]:
        found: dict[str, list[StoredDocument]] = {}
        for record in self.stored.values():
            found.setdefault(record.source, []).append(record)
        return found

    @cached_property
    def left_behind(self) -> set[str]:
        """Names of other documents that `ask` does not find, because they are stored with an earlier date."""
        ending = {record.source for record in self.gone.values()}
        current = {r.source for r in self.stored.values() if r.collection not in self.earlier}
        names = {r.source for r in self.stored.values() if r.collection in self.earlier}
        return names - current - ending - self.digests.keys()

    def versions(self, name: str) -> list[StoredDocument]:
        return self._by_name.get(name, [])

    def replaced(self, name: str, collection: Collection, context: str) -> list[StoredDocument]:
        """Return a document's records in a codec and context, including an earlier date or version of cacheblend."""
        alike = {collection.id, *(id for id in self.earlier if self.codecs[id] == collection.codec)}
        return [r for r in self.versions(name) if r.context == context and r.collection in alike]

    def is_outdated(self, record: StoredDocument | DocumentRecord) -> bool:
        """Return whether the document has changed, or its record has an earlier date."""
        digest = self.digests.get(record.source)
        return bool(digest) and (record.content_digest != digest or record.collection in self.earlier)

    @cached_property
    def names(self) -> dict[str, str]:
        """Digest of a text -> name of a document with it."""
        return {document.digest: document.source for document in self.documents}

    def settings_of(self, name: str, root: str) -> CollectSettings:
        """Return the remembered settings of a document or root.

        Source, in this order: the nearest root in the store, the latest record below the root, a record of a document
        that has moved there, the defaults.
        """
        known = self.source_settings.nearest(name) or self.source_settings.nearest(root)
        if known is not None:
            return known.settings
        records = [r for r in self.stored.values() if is_within(r.source, root)]
        records = records or [r for r in self.gone.values() if r.content_digest in self.names]
        for record in sorted(records, key=lambda r: r.updated, reverse=True):
            codec = self.codecs.get(record.collection, "auto")
            kv_dtype = "auto" if codec == self.collection.in_codec("auto").codec else codec
            if (found := CollectSettings.of_document(record.settings, record.context, kv_dtype)) is not None:
                return found
        return CollectSettings()

    def given_roots(self, given: Mapping[str, Any]) -> Iterator[DocumentRoot]:
        """Yield the roots to remember for the given paths. given: settings from the command line, by name."""
        of, names = self.collection, frozenset(filter(None, [self.given.collection]))
        for path, project in self.paths.items():
            settings, linked = replace(self.settings_of(path, path), **given), frozenset(self.linked.get(path, ()))
            about = path, of.model.fingerprint, of.salt_digest, settings, linked, frozenset(filter(None, [project]))
            yield DocumentRoot(*about, selection=self.selections[path], collections=names)


def diff_corpus(
    collection: Collection,
    store: ChunkStore | None,
    paths: Paths,
    on_skipped: Callable[[Skipped], None],
    on_found: Callable[[DocumentFile], None],
    records: Mapping[bytes, StoredDocument],
) -> CorpusDiff:
    """Read the documents at and below the paths, and compare them with the store. Unchanged files are not read again.

    on_skipped: called for each file that is not a document.
    on_found: called for each document.
    records: all documents in the store.
    """
    names = {place_of(path): linked_from(path) for path in paths.all}
    source_settings = SourceSettings(collection, store)
    selections = {name: replace(source_settings.selection_of(name), **paths.select) for name in names}
    with ocr_errors():
        for languages in {selection.ocr for selection in selections.values()} - {""}:
            check_ocr(languages)
    documents, digests = list[DocumentFile](), dict[str, str]()
    for found in read_documents(
        paths.named, paths.listed, lambda path: selections[place_of(path)], paths.conversions, _known_files(records)
    ):
        if not isinstance(found, Skipped):
            file = DocumentFile.of(found) if isinstance(found, Document) else found
            documents.append(file)
            on_found(file)
            digests[file.source] = file.digest
        else:
            on_skipped(found)
            digests[found.source] = ""
    codecs = {replace(collection, codec=codec).id: codec for codec in CODECS}
    wordings, earlier = dict[str, Wording](), dict[str, date | None]()
    if store is not None:
        own, known = CollectionRecord.of(collection), kept_records(store)
        for record in known.values():
            if record.id in codecs or not record.is_same(own):
                continue
            if record.wording.beginning != own.wording.beginning:
                wordings[record.id] = record.wording
            elif record.day != own.day or record.prefix == own.prefix:
                earlier[record.id] = record.day if record.day != own.day else None
                codecs[record.id] = record.codec
        for name, codec in _unrecorded(store, own, records.values(), known.keys() | codecs.keys()):
            earlier[name], codecs[name] = None, codec
    stored = {k: r for k, r in records.items() if r.collection in codecs}
    behind = sorted((r for r in records.values() if r.collection in wordings), key=lambda r: r.updated)
    worded = {r.source: wordings[r.collection] for r in behind}
    unlinked = source_settings.unlinked(names, digests.keys())
    gone = gone_documents(records, digests, names) | gone_documents(stored, digests, names, unlinked)
    return CorpusDiff(
        collection, names, documents, digests, stored, gone, codecs, worded, earlier, source_settings, selections, paths
    )


def _unrecorded(
    store: ChunkStore, own: CollectionRecord, documents: Iterable[StoredDocument], known: Names[str]
) -> Iterator[tuple[str, str]]:
    """Yield (id, codec) of each collection of this model without a record: an earlier version stored it."""
    first = {d.collection: d.chunk_keys[0] for d in documents if d.collection not in known and d.keys}
    with store.read() as reader:
        for name, key in first.items():
            chunk = reader.undamaged(key)
            if chunk is not None and (chunk.model, chunk.tokenizer) == (own.model, own.tokenizer):
                yield name, chunk.codec


def _known_files(records: Mapping[bytes, StoredDocument]) -> dict[str, DocumentFile]:
    """Map document names to the files as last read."""
    read = [(record.file, record) for record in records.values() if record.file is not None]
    return {  # of several records of a document, the latest stays
        record.source: DocumentFile(record.source, "", record.content_digest, record.omissions, state=state)
        for state, record in sorted(read, key=lambda pair: pair[0].read_ns)
    }
