"""Document summaries: document records without the places of their chunks, kept only while all chunks have KV.

A run over an unchanged corpus reads these instead of every record. Summaries are derived data: a summary is dropped in
the same transaction that replaces or removes its document record, or evicts or removes one of its chunks. Older
versions of this package do not drop summaries, so they are valid only if a version that does made the last commit
(`STAMP`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cacheblend_store.errors import BadBlob
from cacheblend_store.format.keys import KEY_BYTES
from cacheblend_store.format.plain_json import Moment, load_object, typed
from cacheblend_store.format.records import MAX_DOCUMENT_BYTES, document_key, readable, seal, seal_json, unseal

SUMMARY_KEYS = b"summary\0"
"""Prefix of the keys of summaries in the database `meta`."""
STAMP = b"summaries"
"""Key in the database `meta`: number of the last commit by a writer that maintains summaries."""
_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True)
class DocumentSummary:
    """Summary of a document record. Fields without a comment: see DocumentRecord."""

    source: str
    collection: str
    context: str
    content_digest: str
    settings: Mapping[str, Any]
    keys: bytes  # chunk keys in order, joined
    tokens: bytes  # token count of each chunk, little-endian uint32
    updated: Moment = 0.0
    # state of the file when it was read; not interpreted by the store
    file: Mapping[str, Any] = field(default_factory=dict)

    @property
    def document(self) -> bytes:
        """Key of the document record."""
        return document_key(self.collection, self.source, self.context)


def encode_summary(summary: DocumentSummary) -> bytes:
    return seal_json(SUMMARY_KEYS + summary.document, vars(summary))


def decode_summary(key: bytes, value: bytes | memoryview) -> DocumentSummary:
    """Return the summary. key: its key in the database `meta`. Raises BadBlob if it is damaged."""
    name = f"summary of document {key.removeprefix(SUMMARY_KEYS).hex()[:12]}"
    with readable(name):
        summary = typed(load_object(unseal(key, value), MAX_DOCUMENT_BYTES), DocumentSummary)
    if len(summary.keys) * 4 != len(summary.tokens) * KEY_BYTES or len(summary.keys) % KEY_BYTES:
        raise BadBlob(f"{name} does not have a token count for each chunk")
    return summary


def stamp(commit: int) -> bytes:
    """Return the record to store under STAMP. commit: LMDB transaction number."""
    return seal(STAMP, _NUMBER.pack(commit))


def stamped(get: Callable[[str, bytes], bytes | memoryview | None]) -> int:
    """Return the commit number in the stamp, -1 without one. get: reads a record of a database."""
    try:
        return _NUMBER.unpack(unseal(STAMP, get("meta", STAMP) or b""))[0]
    except (BadBlob, struct.error):
        return -1
