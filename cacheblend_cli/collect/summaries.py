"""Summaries of documents in the store (see cacheblend_store/format/summaries.py): which to trust, and which to keep."""

from __future__ import annotations

import random

from cacheblend_store import ChunkStore, DocumentSummary, StoreReader
from cacheblend_store.format.keys import KEY_BYTES

_CHECKED = 1 << 13
"""Chunk records whose digests a run checks although their documents' summaries hold."""
_HELD = 1 << 10  # summaries, until they are stored in one transaction


class SummaryWriter:
    """Stores summaries, many in a transaction. The store keeps those of documents whose chunks all have KV."""

    def __init__(self, store: ChunkStore) -> None:
        self._store, self._held = store, list[DocumentSummary]()

    def add(self, summary: DocumentSummary) -> None:
        self._held.append(summary)
        if len(self._held) >= _HELD:
            self.flush()

    def flush(self) -> None:
        self._store.put_summaries(self._held)
        self._held = []


def split_keys(keys: bytes) -> list[bytes]:
    """Return joined chunk keys apart."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def sound_summaries(reader: StoreReader) -> dict[bytes, DocumentSummary]:
    """Return the summaries by their documents' keys, without those of documents with a damaged record, or with chunks that have one.

    Eviction drops a summary, decay on the disk does not: up to _CHECKED chunks are checked, all of them in a small store, else
    those of random documents.
    """
    found = {summary.document: summary for summary in reader.summaries()}
    documents, num_chunks = list(found), sum(len(summary.keys) for summary in found.values()) // KEY_BYTES
    if num_chunks > _CHECKED:
        random.shuffle(documents)
    wanted: dict[bytes, list[bytes]] = {}
    for document in documents:
        if len(wanted) >= _CHECKED:
            break
        if not reader.is_sound("documents", document):
            del found[document]
            continue
        for key in split_keys(found[document].keys):
            wanted.setdefault(key, []).append(document)
    for key in sorted(wanted):  # in the order in which they are stored
        if not reader.is_sound("chunks", key):
            for document in wanted[key]:
                found.pop(document, None)
    return found
