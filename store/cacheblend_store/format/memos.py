"""Memos: small facts that the store keeps for whoever uses it, as sealed JSON in the database `meta`. The store does not
read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from cacheblend_store.format.plain_json import Moment, load_object, typed
from cacheblend_store.format.records import readable, seal_json, unseal

MEMO_KEYS = b"memo\0"
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Memo:
    """kind and name are whose it is, and there is one of them. value: a JSON object. updated: seconds since the epoch."""

    kind: str
    name: str
    value: Mapping[str, Any]
    updated: Moment

    @property
    def key(self) -> bytes:
        return memo_key(self.kind, self.name)


def memo_key(kind: str, name: str) -> bytes:
    return MEMO_KEYS + xxhash.xxh3_128_digest(f"{kind}\0{name}".encode("utf-8", "surrogatepass"))


def encode_memo(memo: Memo) -> bytes:
    return seal_json(memo.key, vars(memo))


def decode_memo(key: bytes, value: bytes | memoryview) -> Memo:
    """Raises BadBlob when the record is not what was written under this key."""
    with readable(f"memo {key.hex()[-12:]}"):
        return typed(load_object(unseal(key, value), _MAX_BYTES), Memo)
