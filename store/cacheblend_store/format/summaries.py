"""Document summaries: what a document's record says without the places of its chunks, kept only while all its chunks have KV.

A run over an unchanged corpus reads these instead of every record. They are derived data: a summary is dropped in the transaction
that replaces or removes its document's record, or evicts or removes one of its chunks. A version of this package that does not know
summaries drops none, so they hold only if the last commit was made by one that does (`STAMP`).
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
"""What the keys of summaries in the database `meta` begin with."""
STAMP = b"summaries"
"""Key in the database `meta` of the number of the last commit whose writer kept summaries."""
_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True)
class DocumentSummary:
    """Summary of a document record (see DocumentRecord).

    keys: the chunks' keys in order, joined. tokens: their numbers of tokens, little-endian uint32. file: state of the document's
    file when it was read; not interpreted by the store.
    """

    source: str
    collection: str
    context: str
    content_digest: str
    settings: Mapping[str, Any]
    keys: bytes
    tokens: bytes
    updated: Moment = 0.0
    file: Mapping[str, Any] = field(default_factory=dict)

    @property
    def document(self) -> bytes:
        """Key of the document's record."""
        return document_key(self.collection, self.source, self.context)


def encode_summary(summary: DocumentSummary) -> bytes:
    return seal_json(SUMMARY_KEYS + summary.document, vars(summary))


def decode_summary(key: bytes, value: bytes | memoryview) -> DocumentSummary:
    """key: in the database `meta`. Raises BadBlob."""
    name = f"summary of document {key.removeprefix(SUMMARY_KEYS).hex()[:12]}"
    with readable(name):
        summary = typed(load_object(unseal(key, value), MAX_DOCUMENT_BYTES), DocumentSummary)
    if len(summary.keys) * 4 != len(summary.tokens) * KEY_BYTES or len(summary.keys) % KEY_BYTES:
        raise BadBlob(f"{name} does not name the tokens of each chunk")
    return summary


def stamp(commit: int) -> bytes:
    """Return the record under STAMP. commit: LMDB's transaction number."""
    return seal(STAMP, _NUMBER.pack(commit))


def stamped(get: Callable[[str, bytes], bytes | memoryview | None]) -> int:
    """Return the commit of the stamp, -1 if there is none. get: reads a record of a database."""
    try:
        [commit] = _NUMBER.unpack(unseal(STAMP, get("meta", STAMP) or b""))
    except (BadBlob, struct.error):
        return -1
    return int(commit)
