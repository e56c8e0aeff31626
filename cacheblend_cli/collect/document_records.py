"""Document records: what is stored of a document, whether it changed, and which documents are gone."""

from __future__ import annotations

import os
import time
from collections.abc import Collection as Names
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cacheblend_store import ChunkStore, DocumentChunk, DocumentRecord, DocumentSummary
from cacheblend_store.format.keys import pack_ids
from cacheblend_store.format.records import document_key

from cacheblend_cli.collect.summaries import sound_summaries, split_keys
from cacheblend_cli.corpus.cutting import CUT_VERSION
from cacheblend_cli.corpus.file_state import FileState
from cacheblend_cli.corpus.places import is_below, is_file, is_on_disk, is_stdin, place_of, place_within

if TYPE_CHECKING:
    from cacheblend_cli.collect.collector import PlannedChunk
    from cacheblend_cli.collect.settings import CollectSettings
    from cacheblend_cli.corpus.documents import Document, DocumentFile
    from cacheblend_cli.prompt.collection import Collection


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document record without its chunks' places. key: its key in the store. keys: its chunks' keys, joined. settings: shared by
    documents that have the same. tokens: of a document with a summary, its chunks' numbers of tokens (uint32), joined; else None,
    and chunks may be missing or lack KV. file: state of the file when it was read."""

    key: bytes
    source: str
    collection: str
    context: str
    content_digest: str
    updated: float
    settings: Mapping[str, Any]
    keys: bytes
    tokens: bytes | None = None
    file: FileState | None = None

    @property
    def place(self) -> tuple[str, str, str]:
        return self.collection, self.source, self.context

    @property
    def chunk_keys(self) -> list[bytes]:
        return split_keys(self.keys)


def document_record(
    collection: Collection, document: Document | DocumentFile, chunks: list[PlannedChunk], settings: CollectSettings
) -> DocumentRecord:
    """Return the record of a document that was cut and collected with these settings."""
    places = tuple(DocumentChunk(p.key, p.chunk.index, p.chunk.start, p.chunk.end, p.chunk.locator) for p in chunks)
    kept = record_settings(collection, settings)
    return DocumentRecord(document.source, collection.id, document.digest, places, time.time(), kept, settings.context)


def record_settings(collection: Collection, settings: CollectSettings) -> dict[str, Any]:
    """Return what a document's chunks depend on beside its text, context and codec, as it is recorded."""
    head = collection.template.wording.head
    return settings.of_record() | ({"head": head} if head else {}) | {"cut": CUT_VERSION}


def is_current(record: StoredDocument | None, digest: str, settings: Mapping[str, Any]) -> bool:
    """Return whether cutting the document again would give the record's chunks. settings: as `record_settings` gives."""
    return record is not None and record.content_digest == digest and record.settings == settings


def is_news(record: DocumentRecord, old: DocumentRecord | None) -> bool:
    """Return whether a record differs from the old one in more than the time it was written."""
    return old is None or replace(old, updated=record.updated) != record


def document_summary(
    collection: Collection, file: DocumentFile, settings: CollectSettings, sizes: Iterable[tuple[bytes, int]]
) -> DocumentSummary:
    """Return the summary of a document that is stored as the file is now. sizes: keys and numbers of tokens of its chunks."""
    keys, tokens = zip(*sizes, strict=True)
    kept, state = record_settings(collection, settings), {} if file.state is None else file.state.record()
    return DocumentSummary(
        file.source, collection.id, settings.context, file.digest, kept, b"".join(keys), pack_ids(tokens), 0.0, state
    )


def stored_documents(store: ChunkStore, *, trust: bool = True) -> dict[bytes, StoredDocument]:
    """Return all documents by their records' keys in the store, under the documents' current names, sorted by place.

    A name changes when a link takes the place of a folder on its path. trust: take summaries for what they say; else records are
    read, and what is damaged in the store shows.
    """
    folders: dict[str, str] = {}
    shared: dict[object, Any] = {}
    found = list[StoredDocument]()

    def share(value: Any, key: object = None) -> Any:
        return shared.setdefault(value if key is None else key, value)

    with store.read() as reader:
        summaries = sound_summaries(reader) if trust else {}
        for key in reader.keys_from(b"", "documents"):
            r: DocumentRecord | DocumentSummary | None = summaries.pop(key, None) or reader.document(key)
            if r is None:
                continue
            about = (
                share(r.collection),
                share(r.context),
                r.content_digest,
                r.updated,
                share(r.settings, repr(r.settings)),
            )
            if isinstance(r, DocumentSummary):
                file = FileState.of_summary(r.file)
                file = None if file is None else replace(file, reader=share(file.reader))
                one = StoredDocument(key, _name_now(r.source, folders), *about, r.keys, r.tokens, file)
            else:
                one = StoredDocument(key, _name_now(r.source, folders), *about, b"".join(c.key for c in r.chunks))
            found.append(one)
    return {d.key: d for d in sorted(found, key=lambda d: (d.source, d.collection, d.context))}


def rename_documents(store: ChunkStore, stored: Mapping[bytes, StoredDocument]) -> bool:
    """Store the records under their documents' current names. Of two records of one document the later one stays. Returns whether
    there were any to rename."""
    latest = {d.place: d for d in sorted(stored.values(), key=lambda d: d.updated)}
    moved = {key: d.place for key, d in stored.items() if document_key(*d.place) != key}
    store.put_documents(list(_under_names(store, [latest[place] for place in sorted(set(moved.values()))])), moved)
    return bool(moved)


def _under_names(store: ChunkStore, documents: Iterable[StoredDocument]) -> Iterator[DocumentRecord]:
    """Yield the documents' whole records, under the names that they have here."""
    for document in documents:
        with store.read() as reader:
            record = reader.document(document.key)
        if record is not None:
            yield replace(record, source=document.source)


def _name_now(name: str, folders: dict[str, str]) -> str:
    """Return a document's current name. folders: cache of the names of folders."""
    if not is_file(name) or is_stdin(name):
        return name
    folder, _, file = name.rpartition("/")
    if os.path.islink(name) or file in ("", ".", ".."):
        return place_of(name)
    return place_within(folder or "/", file, folders)


def gone_documents(
    stored: Mapping[bytes, StoredDocument], digests: Mapping[str, str], no_documents: Names[str], roots: Names[str]
) -> dict[bytes, StoredDocument]:
    """Return the stored documents (by key of their records) that no longer exist, in any collection and context.

    digests: name -> digest of the documents this run found. no_documents: names of files that are not documents any more.
    roots: paths it looked below.

    Gone is a document below one of the roots that is not on disk, and one anywhere that is not on disk and turned up under
    another name. A file that the walk passed over, because only naming it brings it in, is not gone.
    """
    found = set(digests.values())

    def is_gone(record: StoredDocument) -> bool:
        name = record.source
        if name in digests or is_stdin(name) or not is_file(name):
            return False
        if name in no_documents:
            return True
        return (record.content_digest in found or any(is_below(name, root) for root in roots)) and not is_on_disk(name)

    return {key: record for key, record in stored.items() if is_gone(record)}


def renamed(store: ChunkStore, gone: Iterable[StoredDocument], names: Mapping[str, str]) -> list[DocumentRecord]:
    """Return records of gone documents under the names that their texts have now, where the store has none yet.

    So their chunks stay in the contexts and codecs that this run did not look at. names: digest -> current name.
    """
    moved = (replace(d, source=names[d.content_digest]) for d in gone if d.content_digest in names)
    places = {d.place: d for d in moved}
    return list(_under_names(store, (d for place, d in places.items() if store.get_document(*place) is None)))
