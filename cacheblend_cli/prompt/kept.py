"""The wordings that a store has chunks behind, so that it can be said in what another one differs."""

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
    """Note how the prompts of the collection's chunks are worded."""
    value = collection.template.wording.to_dict()
    name = hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
    if store.memo(_KIND, name) is None:
        store.put_memos([Memo(_KIND, name, value, time.time())])


def kept_wordings(store: ChunkStore) -> list[Wording]:
    """The latest first."""
    found = []
    for memo in sorted(store.memos(_KIND), key=lambda m: m.updated, reverse=True)[:_LOOKED_AT]:
        with suppress(ValueError, UsageError):
            found.append(Wording.from_dict(memo.value))
    return found


def other_wordings(store: ChunkStore, collection: Collection) -> list[tuple[Collection, Wording]]:
    """The same model's collections behind other wordings that were stored, where these change what stands before the chunks."""
    found = []
    for wording in kept_wordings(store):
        with suppress(UsageError):  # the chat template is another one now
            other = collection.worded(wording)
            if other.prefix_ids != collection.prefix_ids:
                found.append((other, wording))
    return found


def ids_of_wordings(store: ChunkStore, collection: Collection) -> dict[str, Wording]:
    """By the ids of those collections, in every codec."""
    others = other_wordings(store, collection)
    return {replace(of, codec=codec).id: wording for of, wording in others for codec in CODECS}
