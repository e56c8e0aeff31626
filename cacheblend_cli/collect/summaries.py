"""Document summaries in the store (see cacheblend_store/format/summaries.py), which are checked before use, and the
sizes of planned chunks, which a run keeps instead of their texts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from cacheblend_store import DocumentSummary, StoreReader
from cacheblend_store.format.keys import KEY_BYTES, unpack_ids

_CHECKED = 1 << 13
"""Maximum number of chunk records that a run checks by digest although their summaries are valid."""
_CHUNK_ROWS = 12
"""Rows that take as long as the rest of a chunk's work: its sequence, encoding and record (6 with a 0.5B, 16 with
SmolLM2)."""


def split_keys(keys: bytes) -> list[bytes]:
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


class ChunkSize(NamedTuple):
    """A planned chunk without its text."""

    key: bytes
    num_tokens: int
    left_len: int  # tokens of the left context
    record_bytes: int  # size of the record with KV
    has_kv: bool | None = None  # whether the stored chunk has KV; None if it is not stored or its record is damaged


class PrefillRows:
    """Counts the rows of the prefills that compute chunks, in order: tokens, left contexts, and _CHUNK_ROWS for each. A
    chunk right after the previous one shares its left context."""

    def __init__(self) -> None:
        self._end = 0

    def add(self, size: ChunkSize) -> int:
        """Return the rows that this chunk adds."""
        rows = _CHUNK_ROWS + size.num_tokens + (0 if size.left_len == self._end else size.left_len)
        self._end = size.left_len + size.num_tokens
        return rows


class Settled:
    """Documents that need no work: by their summaries, the current version is stored and all chunks have KV."""

    def __init__(self) -> None:
        self.num_documents = self.num_chunks = self.num_tokens = 0
        self._summaries = list[tuple[bytes, bytes]]()

    def add(self, keys: bytes, tokens: bytes) -> None:
        """Add a document. keys, tokens: see DocumentSummary."""
        self.num_documents += 1
        self.num_chunks += len(keys) // KEY_BYTES
        self.num_tokens += sum(unpack_ids(tokens))
        self._summaries.append((keys, tokens))

    def chunks(self) -> Iterator[tuple[bytes, int]]:
        """Yield the key and the number of tokens of each chunk."""
        for keys, tokens in self._summaries:
            yield from zip(split_keys(keys), unpack_ids(tokens), strict=True)
