"""What the store knows about itself: identity, format version, counters and settings, in the database `meta`."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from cacheblend_store.errors import BadBlob, StoreCorrupt, StoreFormat
from cacheblend_store.format.keys import FORMAT_VERSION
from cacheblend_store.format.plain_json import check_fields, load_object
from cacheblend_store.format.records import seal, unseal
from cacheblend_store.lmdb_file.pages.layout import HEADER
from cacheblend_store.lmdb_file.pages.reader import PageReader

_VERSION, _IDENTITY, _STATE = b"format_version", b"identity", b"state"


@dataclass(frozen=True)
class State:
    """Counters, exact as of the transaction that reads them, and the quota.

    generation: rises with every commit that adds or removes chunks or documents. live_bytes: of all blobs.
    used_bytes: of blobs and manifests in whole pages. max_bytes: the quota, which bounds live_bytes (0: none).
    """

    generation: int = 0
    live_bytes: int = 0
    used_bytes: int = 0
    max_bytes: int = 0

    def add(self, *, live: int = 0, used: int = 0, generation: int = 0) -> State:
        return replace(
            self,
            generation=self.generation + generation,
            live_bytes=self.live_bytes + live,
            used_bytes=self.used_bytes + used,
        )


def footprint(key_size: int, value_size: int, page_size: int) -> int:
    """Bytes a record takes of the file: its node, and whole pages when LMDB puts the value into pages of its own."""
    inline = 8 + key_size + value_size
    if inline <= (((page_size - HEADER) // 2) & ~1) - 2:
        return inline + (inline & 1)
    return 16 + key_size + (key_size & 1) + -(-(HEADER + value_size) // page_size) * page_size


def write_identity(transaction: Any, dbs: Mapping[str, Any]) -> None:
    meta = dbs["meta"]
    transaction.put(_VERSION, str(FORMAT_VERSION).encode(), db=meta)
    transaction.put(_IDENTITY, seal(_IDENTITY, uuid.uuid4().hex.encode()), db=meta)
    write_state(transaction, dbs, State(generation=1))


def read_identity(get: Callable[[bytes], bytes | None], where: str) -> str:
    """The store's identity, a random hex number. Raises StoreFormat for a foreign store or format, StoreCorrupt."""
    version, identity = get(_VERSION), get(_IDENTITY)
    if version is None or identity is None:
        raise StoreFormat(f"{where} has no identity record: it is no cacheblend store", "name another --store")
    if version != str(FORMAT_VERSION).encode():
        raise StoreFormat(
            f"the store at {where} has format {version[:20].decode(errors='replace')}, this version reads {FORMAT_VERSION}",
            "use another --store, or the version of cacheblend that wrote it",
        )
    try:
        return unseal(_IDENTITY, identity).decode()
    except (BadBlob, ValueError) as error:
        raise StoreCorrupt(
            f"the identity record of the store at {where} is damaged", "run: cacheblend chunks verify --repair"
        ) from error


def read_state(value: bytes | None, pages: PageReader) -> State:
    """The state record; counted anew, and without a quota, when it is missing or damaged."""
    return decode_state(value) or recount(pages)


def decode_state(value: bytes | None) -> State | None:
    """None when the record is missing or damaged."""
    try:
        if value is not None:
            state = State(**load_object(unseal(_STATE, value).decode(), 1 << 12))
            check_fields(vars(state), dict.fromkeys(vars(state), lambda value: type(value) is int))
            return state
    except (BadBlob, ValueError, TypeError):
        pass
    return None


def write_state(transaction: Any, dbs: Mapping[str, Any], state: State) -> None:
    transaction.put(_STATE, seal(_STATE, json.dumps(asdict(state)).encode()), db=dbs["meta"])


def state_value(get: Callable[[bytes], bytes | None]) -> bytes | None:
    return get(_STATE)


def recount(pages: PageReader) -> State:
    """The counters from the records themselves. The generation is one that no earlier state had."""
    live = used = 0
    for name in ("blobs", "chunks"):
        tree = pages.tree(name)
        for node in pages.nodes(tree) if tree else ():
            live += node.size if name == "blobs" else 0
            used += footprint(len(node.key), node.size, pages.meta.page_size)
    return State(generation=time.time_ns(), live_bytes=live, used_bytes=used)
