"""CollectionRecord: the parts of a collection, kept in the store to explain how two collections differ.

The id of a collection is only a digest of these parts.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date

from cacheblend_store import COLLECTION, ChunkStore, Memo
from cacheblend_store.conversion import convert
from msgspec import to_builtins

from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.wording import Wording


@dataclass(frozen=True)
class CollectionRecord:
    id: str
    model_name: str
    model: str  # fingerprint
    identity: str  # fingerprint of the model regardless of dtype, without an adapter
    dtype: str
    weight_dtype: str
    adapter: str  # digest, "" for none
    tokenizer: str  # fingerprint
    codec: str
    wording: Wording
    day: date | None  # date in the prefix, None for a template without one
    prefix: str  # digest of the ids before the chunks
    salt: str  # digest, "" for none
    updated: float = 0.0  # when the date was last chosen, seconds since the epoch

    @classmethod
    def of(cls, collection: Collection) -> CollectionRecord:
        model = collection.model
        return cls(
            id=collection.id,
            model_name=model.name,
            model=model.fingerprint,
            identity=model.identity,
            dtype=collection.prefix_codec,
            weight_dtype=model.weight_dtype,
            adapter=model.lora_digest,
            tokenizer=model.tokenizer.fingerprint,
            codec=collection.codec,
            wording=collection.template.wording,
            day=collection.day,
            prefix=hashlib.blake2b(repr(collection.prefix_ids).encode(), digest_size=16).hexdigest(),
            salt=collection.salt_digest,
        )

    def is_same(self, other: CollectionRecord) -> bool:
        """Return whether model, dtype, tokenizer and salt are the same."""
        return (self.model, self.tokenizer, self.salt) == (other.model, other.tokenizer, other.salt)


def kept_records(store: ChunkStore) -> dict[str, CollectionRecord]:
    """Return the records by collection id. Collections from an earlier version have no record."""
    found = {}
    for memo in store.memos(COLLECTION):
        with suppress(ValueError, UsageError):
            found[memo.name] = replace(convert(memo.value, CollectionRecord), updated=memo.updated)
    return found


def keep_record(store: ChunkStore, collection: Collection) -> None:
    """Store the collection's record. Its date becomes the date of its model and salt."""
    own, known = CollectionRecord.of(collection), kept_records(store)
    if own.id not in known or (own.day is not None and own.day != _latest_day(known.values(), own)):
        now = time.time()
        store.put_memos([Memo(COLLECTION, own.id, to_builtins(replace(own, updated=now)), now)])


def kept_day(store: ChunkStore, collection: Collection) -> date | None:
    """Return the date of the latest collection of the model and salt, None without one."""
    return _latest_day(kept_records(store).values(), CollectionRecord.of(collection))


def _latest_day(known: Iterable[CollectionRecord], own: CollectionRecord) -> date | None:
    dated = [record for record in known if record.day is not None and record.is_same(own)]
    return max(dated, key=lambda record: record.updated).day if dated else None
