"""Document records: read them, tell whether a document changed, and find documents that are gone."""

from __future__ import annotations

import os
import time
from collections.abc import Collection as Names
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from cacheblend_store import ChunkStore, DocumentChunk, DocumentRecord, DocumentSummary
from cacheblend_store.format.keys import pack_ids
from cacheblend_store.format.records import document_key

from cacheblend_cli.collect.summaries import sound_summaries, split_keys
from cacheblend_cli.corpus.citations import OMISSIONS, omissions_of
from cacheblend_cli.corpus.cutting import CUT_VERSION
from cacheblend_cli.corpus.documents import FileState
from cacheblend_cli.corpus.places import is_below, is_file, is_stdin, on_disk, place_of

if TYPE_CHECKING:
    from cacheblend_cli.collect.collector import PlannedChunk
    from cacheblend_cli.collect.settings import CollectSettings
    from cacheblend_cli.corpus.documents import Document, DocumentFile
    from cacheblend_cli.prompt.collection import Collection


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document record without the places of its chunks."""

    key: bytes  # key of the record in the store
    source: str  # document name, see corpus/places.py
    collection: str
    context: str
    content_digest: str
    updated: float  # seconds since the epoch
    settings: Mapping[str, Any]  # one object for all documents with the same settings
    keys: bytes  # chunk keys, joined
    # Token counts of the chunks (uint32), joined, if the document has a summary. None: chunks may be missing or lack
    # KV.
    tokens: bytes | None = None
    file: FileState | None = None  # when the file was read

    @property
    def place(self) -> tuple[str, str, str]:
        return self.collection, self.source, self.context

    @property
    def omissions(self) -> tuple[str, ...]:
        return omissions_of(self.settings)

    @property
    def chunk_keys(self) -> list[bytes]:
        return split_keys(self.keys)


def document_record(
    collection: Collection, document: Document | DocumentFile, chunks: Sequence[PlannedChunk], settings: CollectSettings
) -> DocumentRecord:
    """Return the record of a document that was cut and collected with these settings."""
    places = tuple(DocumentChunk(p.key, p.chunk.index, p.chunk.start, p.chunk.end, p.chunk.locator) for p in chunks)
    kept = with_omissions(record_settings(collection, settings), document.omissions)
    return DocumentRecord(document.source, collection.id, document.digest, places, time.time(), kept, settings.context)


def record_settings(collection: Collection, settings: CollectSettings) -> dict[str, Any]:
    """Return the settings to record: they determine a document's chunks, along with text, context and codec."""
    head = collection.template.wording.head
    return settings.of_record() | ({"head": head} if head else {}) | {"cut": CUT_VERSION}


def with_omissions(settings: dict[str, Any], omissions: Sequence[str]) -> dict[str, Any]:
    """Return the settings to record for a document with these omissions."""
    return {**settings, OMISSIONS: list(omissions)} if omissions else settings


def is_current(record: StoredDocument | None, file: DocumentFile, settings: dict[str, Any]) -> bool:
    """Return whether storing the document again would give the same record and chunks.

    settings: from `record_settings`.
    """
    if record is None or record.content_digest != file.digest:
        return False
    return record.settings == with_omissions(settings, file.omissions)


def is_news(record: DocumentRecord, old: DocumentRecord | None) -> bool:
    """Return whether a record differs from the old one, ignoring the time it was written."""
    return old is None or replace(old, updated=record.updated) != record


def document_summary(
    collection: Collection, file: DocumentFile, settings: CollectSettings, sizes: Iterable[tuple[bytes, int]]
) -> DocumentSummary:
    """Return the summary of a document whose current version is stored. sizes: (key, token count) of each chunk."""
    keys, tokens = zip(*sizes, strict=True)
    kept = with_omissions(record_settings(collection, settings), file.omissions)
    state = {} if file.state is None else asdict(file.state)
    return DocumentSummary(
        file.source, collection.id, settings.context, file.digest, kept, b"".join(keys), pack_ids(tokens), 0.0, state
    )


def stored_documents(store: ChunkStore, *, trust: bool = True) -> dict[bytes, StoredDocument]:
    """Return all documents by record key, with current names, sorted by (name, collection, context).

    A name changes if a folder on its path becomes a link.

    trust: use summaries; False to read the records, which finds damage in the store.
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
            settings = share(r.settings, repr(r.settings))
            about = share(r.collection), share(r.context), r.content_digest, r.updated, settings
            if isinstance(r, DocumentSummary):
                file = FileState.of_summary(r.file)
                file = None if file is None else replace(file, reader=share(file.reader))
                one = StoredDocument(key, _name_now(r.source, folders), *about, r.keys, r.tokens, file)
            else:
                one = StoredDocument(key, _name_now(r.source, folders), *about, b"".join(c.key for c in r.chunks))
            found.append(one)
    return {d.key: d for d in sorted(found, key=lambda d: (d.source, d.collection, d.context))}


def rename_documents(store: ChunkStore, stored: Mapping[bytes, StoredDocument]) -> bool:
    """Store records under the current names of their documents. If two records get the same name, the later one stays.

    Return whether any record was renamed.
    """
    latest = {d.place: d for d in sorted(stored.values(), key=lambda d: d.updated)}
    moved = {key: d.place for key, d in stored.items() if document_key(*d.place) != key}
    store.put_documents(list(_under_names(store, [latest[place] for place in sorted(set(moved.values()))])), moved)
    return bool(moved)


def _under_names(store: ChunkStore, documents: Iterable[StoredDocument]) -> Iterator[DocumentRecord]:
    """Yield the complete records of documents, renamed to `StoredDocument.source`."""
    for document in documents:
        with store.read() as reader:
            record = reader.document(document.key)
        if record is not None:
            yield replace(record, source=document.source)


def _name_now(name: str, folders: dict[str, str]) -> str:
    """Return a document's current name. folders: cache of directory names."""
    if not is_file(name) or is_stdin(name):
        return name
    folder, _, file = name.rpartition("/")
    if os.path.islink(name) or file in ("", ".", ".."):
        return place_of(name)
    if folder not in folders:
        folders[folder] = place_of(folder or "/").rstrip("/")
    return f"{folders[folder]}/{file}"


def gone_documents(
    stored: Mapping[bytes, StoredDocument], digests: Mapping[str, str], roots: Names[str], unlinked: Names[str] = ()
) -> dict[bytes, StoredDocument]:
    """Return the stored documents that no longer exist, by record key, in any collection and context.

    A document is gone if it is not on disk, and either is below one of the roots or was found under a different name. A
    file that the walk skips, or that cannot be read now, is not gone.

    digests: name -> digest of the documents that this run found, "" for files that it could not read.
    roots: paths that this run searched.
    unlinked: names of documents that no link leads to any more.
    """
    found = set(digests.values())

    def is_gone(record: StoredDocument) -> bool:
        name = record.source
        if name in digests or is_stdin(name) or not is_file(name):
            return False
        if name in unlinked:
            return True
        return (record.content_digest in found or any(is_below(name, root) for root in roots)) and on_disk(name) is None

    return {key: record for key, record in stored.items() if is_gone(record)}


def renamed(store: ChunkStore, gone: Iterable[StoredDocument], names: Mapping[str, str]) -> list[DocumentRecord]:
    """Return records of moved documents under their new names, except where the store already has a record.

    This keeps their chunks in contexts and codecs that the run does not process. names: digest -> current name.
    """
    moved = (replace(d, source=names[d.content_digest]) for d in gone if d.content_digest in names)
    places = {d.place: d for d in moved}
    return list(_under_names(store, (d for place, d in places.items() if store.get_document(*place) is None)))
