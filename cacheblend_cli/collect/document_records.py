"""Document records: what the store is told of a document, whether that is news, and which documents are gone."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cacheblend_store import ChunkStore, DocumentChunk, DocumentRecord

from cacheblend_cli.corpus.documents import Document

if TYPE_CHECKING:
    from cacheblend_cli.collect.precompute import PlannedChunk, PrecomputeOptions
    from cacheblend_cli.prompt.collection import Collection


def document_record(
    collection: Collection, document: Document, chunks: list[PlannedChunk], options: PrecomputeOptions
) -> DocumentRecord:
    """The record of a document that was cut and collected so."""
    places = tuple(DocumentChunk(p.key, p.chunk.index, p.chunk.start, p.chunk.end) for p in chunks)
    settings: dict[str, Any] = {"chunk_tokens": options.chunk_tokens}
    if not os.path.isabs(document.source):
        settings["directory"] = _directory_digest()
    if options.context != "sink":
        settings["window"] = options.window
    if options.context == "neighbours":
        settings["neighbours"] = options.neighbours
    return DocumentRecord(
        document.source, collection.id, document.digest, places, time.time(), settings, options.context
    )


def is_news(store: ChunkStore, record: DocumentRecord) -> bool:
    """Whether the store has no record of the document, or one that says something else than when it was written."""
    old = store.get_document(record.collection, record.source, record.context)
    return old is None or replace(old, updated=record.updated) != record


def gone_documents(
    collection: Collection, store: ChunkStore | None, kept: set[str], no_documents: set[str], roots: Sequence[str]
) -> list[DocumentRecord]:
    """Records, in any context, of documents under `roots` that are on disk no more or are no documents any more.

    A file under them that the walk passed over, since only its name brings it in, is neither; and a relative name that
    was stored from another directory says nothing of this one.
    """
    if store is None or not roots:
        return []
    here = _directory_digest()
    return [
        r
        for r in store.documents(collection.id)
        if any(_is_under(r.source, root) for root in roots)
        and r.source not in kept
        and (os.path.isabs(r.source) or r.settings.get("directory") == here)
        and (r.source in no_documents or not os.path.exists(r.source))
    ]


def _directory_digest() -> str:
    """Tells the directories that relative names are relative to apart, without writing their paths down."""
    return hashlib.blake2b(os.fsencode(os.path.realpath(".")), digest_size=16).hexdigest()


def _is_under(source: str, root: str) -> bool:
    """Whether a document of that name is one below a directory; both as `source_name` writes them."""
    if root == ".":
        return source != "-" and not source.startswith(("/", "../"))
    return source.startswith(root.rstrip("/") + "/")
