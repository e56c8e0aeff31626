"""Document records: what is stored of a document, whether it changed, and which documents are gone."""

from __future__ import annotations

import os
import time
from collections.abc import Collection as Names
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cacheblend_store import ChunkStore, DocumentChunk, DocumentRecord

from cacheblend_cli.corpus.cutting import CUT_VERSION
from cacheblend_cli.corpus.places import is_below, is_file, is_on_disk, is_stdin, place_of

if TYPE_CHECKING:
    from cacheblend_cli.collect.collector import PlannedChunk
    from cacheblend_cli.collect.settings import CollectSettings
    from cacheblend_cli.corpus.documents import Document, DocumentFile
    from cacheblend_cli.prompt.collection import Collection


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


def is_current(record: DocumentRecord | None, digest: str, settings: Mapping[str, Any]) -> bool:
    """Return whether cutting the document again would give the record's chunks. settings: as `record_settings` gives."""
    return record is not None and record.content_digest == digest and record.settings == settings


def is_news(record: DocumentRecord, old: DocumentRecord | None) -> bool:
    """Return whether a record differs from the old one in more than the time it was written."""
    return old is None or replace(old, updated=record.updated) != record


def stored_documents(store: ChunkStore) -> dict[bytes, DocumentRecord]:
    """Return all records by their keys in the store, under the documents' current names.

    A name changes when a link takes the place of a folder on its path.
    """
    folders: dict[str, str] = {}
    return {record.key: replace(record, source=_name_now(record, folders)) for record in store.documents()}


def rename_documents(store: ChunkStore) -> None:
    """Store the records under their documents' current names. Of two records of one document the later one stays."""
    stored = stored_documents(store)
    latest = {record.place: record for record in sorted(stored.values(), key=lambda r: r.updated)}
    moved = {key: record.place for key, record in stored.items() if record.key != key}
    store.put_documents([latest[place] for place in sorted(set(moved.values()))], moved)


def _name_now(record: DocumentRecord, folders: dict[str, str]) -> str:
    """Return a document's current name. folders: cache of the real paths of folders."""
    name = record.source
    if not is_file(name) or is_stdin(name):
        return name
    folder, _, file = name.rpartition("/")
    if os.path.islink(name) or file in ("", ".", ".."):
        return place_of(name)
    if folder not in folders:
        folders[folder] = place_of(folder or "/")
    return f"{folders[folder].rstrip('/')}/{file}"


def gone_documents(
    stored: Mapping[bytes, DocumentRecord], digests: Mapping[str, str], no_documents: Names[str], roots: Names[str]
) -> dict[bytes, DocumentRecord]:
    """Return the stored records (by key) of documents that no longer exist, in any collection and context.

    digests: name -> digest of the documents this run found. no_documents: names of files that are not documents any more.
    roots: paths it looked below.

    Gone is a document below one of the roots that is not on disk, and one anywhere that is not on disk and turned up under
    another name. A file that the walk passed over, because only naming it brings it in, is not gone.
    """
    found = set(digests.values())

    def is_gone(record: DocumentRecord) -> bool:
        name = record.source
        if name in digests or is_stdin(name) or not is_file(name):
            return False
        if name in no_documents:
            return True
        return (record.content_digest in found or any(is_below(name, root) for root in roots)) and not is_on_disk(name)

    return {key: record for key, record in stored.items() if is_gone(record)}


def renamed(store: ChunkStore, gone: Iterable[DocumentRecord], names: Mapping[str, str]) -> list[DocumentRecord]:
    """Return records of gone documents under the names that their texts have now, where the store has none yet.

    So their chunks stay in the contexts and codecs that this run did not look at. names: digest -> current name.
    """
    moved = (replace(r, source=names[r.content_digest]) for r in gone if r.content_digest in names)
    places = {record.place: record for record in moved}
    return [r for place, r in places.items() if store.get_document(*place) is None]
