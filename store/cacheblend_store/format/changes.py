"""Change log: chunks and documents added or removed by the latest commits. It serves to update derived data."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from cacheblend_store.conversion import decoder
from cacheblend_store.errors import BadBlob
from cacheblend_store.format.records import seal, unseal

LOG = b"changes"
"""Key of the log in the database `meta`."""
MAX_BYTES = 64 << 10


class Entry(NamedTuple):
    """Changes of one commit."""

    before: int  # generation of the store
    after: int  # generation of the store
    chunks: tuple[bytes, ...]  # keys
    documents: tuple[bytes, ...]  # keys

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.chunks + self.documents)) + 32


_decode = decoder(list[Entry]).decode


class Changes(NamedTuple):
    """Keys of chunks and document records that were added, removed or replaced."""

    chunks: set[bytes]
    documents: set[bytes]


def append(value: bytes | memoryview | None, before: int, after: int, changes: Changes) -> bytes:
    """Return the log record with one more commit. The oldest entries are dropped if it gets longer than MAX_BYTES.
    value: the current record. Its entries are dropped if they do not end at generation `before`."""
    entries = _entries(value)
    if entries and entries[-1].after != before:
        entries = []
    entries.append(Entry(before, after, tuple(changes.chunks), tuple(changes.documents)))
    while entries and sum(entry.num_bytes for entry in entries) > MAX_BYTES:
        del entries[: len(entries) // 4 + 1]
    return seal(LOG, msgspec.msgpack.encode(entries))


def changes_between(value: bytes | memoryview | None, before: int, after: int) -> Changes | None:
    """Return the changes between two generations, None if the log does not reach back far enough or has a gap."""
    entries = [entry for entry in _entries(value) if entry.after > before]
    reached = before
    for entry in entries:
        if entry.before != reached:
            return None
        reached = entry.after
    if reached != after:
        return None
    found = Changes(set(), set())
    for entry in entries:
        found.chunks.update(entry.chunks)
        found.documents.update(entry.documents)
    return found


def _entries(value: bytes | memoryview | None) -> list[Entry]:
    """Return the entries, oldest first; [] if the record is missing or damaged."""
    try:
        return _decode(unseal(LOG, value or b""))
    except (BadBlob, msgspec.DecodeError):
        return []
