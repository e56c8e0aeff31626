"""Document summaries in the store (see cacheblend_store/format/summaries.py): write them, and check them before use."""

from __future__ import annotations

import random

from cacheblend_store import ChunkStore, DocumentSummary, StoreReader
from cacheblend_store.format.keys import KEY_BYTES

_CHECKED = 1 << 13
"""Maximum number of chunk records that a run checks by digest although their summaries are valid."""
_HELD = 1 << 10  # summaries per transaction


class SummaryWriter:
    """Stores summaries, many per transaction. The store keeps only summaries of documents whose chunks all have KV."""

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
    """Split joined chunk keys."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def sound_summaries(reader: StoreReader) -> dict[bytes, DocumentSummary]:
    """Return summaries by document key, except for documents with a damaged record or with a damaged chunk record.

    Eviction drops a summary, but corruption on disk does not. So up to _CHECKED chunks are checked: all chunks of a
    small store, else those of random documents.
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
    for key in sorted(wanted):  # in storage order
        if not reader.is_sound("chunks", key):
            for document in wanted[key]:
                found.pop(document, None)
    return found
