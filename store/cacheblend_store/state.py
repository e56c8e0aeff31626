"""State of the store: identity, format version, counters and settings, in the database `meta`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cacheblend_store.errors import BadBlob, StoreCorrupt, StoreFormat
from cacheblend_store.format.keys import FORMAT_VERSION
from cacheblend_store.format.plain_json import load_object, typed
from cacheblend_store.format.records import seal, seal_json, unseal
from cacheblend_store.lmdb_file.pages.reader import PageReader

_VERSION, IDENTITY, _STATE = b"format_version", b"identity", b"state"

COUNTED = {"blobs": "live_bytes", "chunks": "text_bytes", "documents": "document_bytes"}
"""Database -> field of State with the size of its values in bytes."""
Get = Callable[[str, bytes], bytes | memoryview | None]
"""Reads a record of a database."""


@dataclass(frozen=True)
class State:
    """Counters and quota. Counters are exact in the transaction that reads them."""

    # Increases with every commit that adds or removes chunks or documents. Derived from the clock, so that two copies
    # of a store never share a generation.
    generation: int = 0
    live_bytes: int = 0  # size of all blobs
    max_bytes: int = 0  # quota for the sum of the sizes; 0: no quota
    # size of all chunk records (text, token ids, digests); None: not counted by older versions
    text_bytes: int | None = None
    document_bytes: int | None = None  # size of all document records; None: not counted by older versions


def write_identity(transaction: Any, dbs: Mapping[str, Any]) -> None:
    meta = dbs["meta"]
    transaction.put(_VERSION, str(FORMAT_VERSION).encode(), db=meta)
    transaction.put(IDENTITY, sealed_identity(new_identity()), db=meta)
    write_state(transaction, dbs, State(generation=1, text_bytes=0, document_bytes=0))


def new_identity() -> str:
    return uuid.uuid4().hex


def sealed_identity(identity: str) -> bytes:
    """Return the identity's record."""
    return seal(IDENTITY, identity.encode())


def read_identity(get: Get, where: str) -> str:
    """Return the store's identity, a random hex number. Raises StoreFormat (foreign store), StoreCorrupt."""
    check_format(get, where)
    identity = get("meta", IDENTITY)
    if identity is None or get("meta", _VERSION) is None:
        raise StoreFormat(f"{where} has no identity record: it is not a cacheblend store", "name another --store")
    try:
        return uuid.UUID(unseal(IDENTITY, identity).decode()).hex
    except (BadBlob, ValueError) as error:
        raise StoreCorrupt(
            f"the identity record of the store at {where} is damaged", "run: cacheblend chunks verify --repair"
        ) from error


def check_format(get: Get, where: str) -> None:
    """Raise StoreFormat for a store with a different format version."""
    version = get("meta", _VERSION)
    if version is not None and version != str(FORMAT_VERSION).encode():
        raise StoreFormat(
            f"the store at {where} has format {bytes(version[:20]).decode(errors='replace')}, this version reads {FORMAT_VERSION}",
            "use another --store, or the version of cacheblend that wrote it",
        )


def read_state(get: Get, pages: PageReader) -> State:
    """Return the state record with all counts. If it is damaged, return a new generation, fresh counts and no quota."""
    state = decode_state(get) or State(time.time_ns(), count_bytes(pages, "blobs"))
    missing = {counter: count_bytes(pages, db) for db, counter in COUNTED.items() if getattr(state, counter) is None}
    return replace(state, **missing)


def decode_state(get: Get) -> State | None:
    """Return the state record, or None if it is missing or damaged."""
    try:
        return typed(load_object(unseal(_STATE, get("meta", _STATE) or b""), 1 << 12), State)
    except (BadBlob, ValueError):
        return None


def write_state(transaction: Any, dbs: Mapping[str, Any], state: State) -> None:
    transaction.put(_STATE, seal_json(_STATE, vars(state)), db=dbs["meta"])


def count_bytes(pages: PageReader, database: str) -> int:
    """Return the total size of a database's values in bytes."""
    return sum(node.size for node in pages.nodes(database))
