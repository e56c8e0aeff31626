"""Document records: what the store is told of a document, whether that is news, and which documents are gone."""

from __future__ import annotations

import os
import time
from collections.abc import Collection as Names
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from cacheblend_store import ChunkStore, DocumentChunk, DocumentRecord

from cacheblend_cli.corpus.documents import Document
from cacheblend_cli.corpus.places import is_below, is_file, is_on_disk, is_stdin, place_of

if TYPE_CHECKING:
    from cacheblend_cli.collect.collector import PlannedChunk
    from cacheblend_cli.collect.settings import CollectSettings
    from cacheblend_cli.prompt.collection import Collection


def document_record(
    collection: Collection, document: Document, chunks: list[PlannedChunk], settings: CollectSettings
) -> DocumentRecord:
    """The record of a document that was cut and collected so."""
    places = tuple(DocumentChunk(p.key, p.chunk.index, p.chunk.start, p.chunk.end, p.chunk.locator) for p in chunks)
    head = collection.template.wording.head
    told = settings.of_record() | ({"head": head} if head else {})
    return DocumentRecord(document.source, collection.id, document.digest, places, time.time(), told, settings.context)


def is_news(record: DocumentRecord, old: DocumentRecord | None) -> bool:
    """Whether the record says something else than the old one, but for when it was written."""
    return old is None or replace(old, updated=record.updated) != record


def stored_documents(store: ChunkStore) -> dict[bytes, DocumentRecord]:
    """All records, by their keys in the store, under the names that their documents have now: a path can
    lead through a link that was not there when it was stored."""
    folders: dict[str, str] = {}
    return {record.key: replace(record, source=_name_now(record, folders)) for record in store.documents()}


def rename_documents(store: ChunkStore) -> None:
    """Store the records under the names that `stored_documents` gives them. Of two of one document the later one stays."""
    stored = stored_documents(store)
    latest = {record.place: record for record in sorted(stored.values(), key=lambda r: r.updated)}
    moved = {key: record.place for key, record in stored.items() if record.key != key}
    store.put_documents([latest[place] for place in sorted(set(moved.values()))], moved)


def _name_now(record: DocumentRecord, folders: dict[str, str]) -> str:
    """folders: what is known already of where directories are."""
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
    stored: Mapping[bytes, DocumentRecord], kept: Mapping[str, str], no_documents: Names[str], roots: Names[str]
) -> dict[bytes, DocumentRecord]:
    """Those of the stored documents (by key) that are gone, in any collection and context.

    kept: the documents this run found, name -> digest. no_documents: names that are of none any more. roots: paths it
    looked below. Gone is what lay below one of them and is on disk no more. A file that the walk passed over, since only
    its name brings it in, is not. Gone is also what is on disk no more anywhere, and turned up under another name: it was
    moved.
    """
    found = set(kept.values())

    def is_gone(record: DocumentRecord) -> bool:
        name = record.source
        if name in kept or is_stdin(name) or not is_file(name):
            return False
        if name in no_documents:
            return True
        return (record.content_digest in found or any(is_below(name, root) for root in roots)) and not is_on_disk(name)

    return {key: record for key, record in stored.items() if is_gone(record)}


def renamed(store: ChunkStore, gone: Iterable[DocumentRecord], names: Mapping[str, str]) -> list[DocumentRecord]:
    """Records for the names under which what gone documents said has turned up, where the store has none yet: in contexts
    and codecs that this run did not look at, their chunks stay so. names: by digest."""
    moved = (replace(r, source=names[r.content_digest]) for r in gone if r.content_digest in names)
    places = {record.place: record for record in moved}
    return [r for place, r in places.items() if store.get_document(*place) is None]
