"""Wordings of the stored chunks, to tell how the wording of a question differs."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import replace

from cacheblend_store import ChunkStore, Memo
from cacheblend_store.format.blobs import CODECS

from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.wording import Wording

_KIND = "wording"
_LOOKED_AT = 16


def keep_wording(store: ChunkStore, collection: Collection) -> None:
    """Store the collection's wording."""
    value = collection.template.wording.to_dict()
    name = hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
    if store.memo(_KIND, name) is None:
        store.put_memos([Memo(_KIND, name, value, time.time())])


def kept_wordings(store: ChunkStore) -> list[Wording]:
    """Return the stored wordings, latest first."""
    found = []
    for memo in sorted(store.memos(_KIND), key=lambda m: m.updated, reverse=True)[:_LOOKED_AT]:
        with suppress(ValueError, UsageError):
            found.append(Wording.from_dict(memo.value))
    return found


def other_wordings(store: ChunkStore, collection: Collection) -> list[tuple[Collection, Wording]]:
    """Return the model's collections with other stored wordings that change the prefix."""
    found = []
    for wording in kept_wordings(store):
        with suppress(UsageError):  # the chat template has changed
            other = collection.worded(wording)
            if other.prefix_ids != collection.prefix_ids:
                found.append((other, wording))
    return found


def ids_of_wordings(store: ChunkStore, collection: Collection) -> dict[str, Wording]:
    """Return wording by collection id, for the collections of `other_wordings` in every codec."""
    others = other_wordings(store, collection)
    return {replace(of, codec=codec).id: wording for of, wording in others for codec in CODECS}
