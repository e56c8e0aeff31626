"""Which of a run's chunks have KV where the store's quota has no room for all of it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from cacheblend_store import ChunkStore

from cacheblend_cli.collect.plan import Part


@dataclass(frozen=True)
class Room:
    """keep: keys of the chunks that have KV or get it, which nothing in this run evicts; the prefix is one of them where it
    fits. chunks, without_kv: how many chunks there are, and how many get none. needed, max_bytes: bytes of the KV of all of
    them, and of the quota (0: none)."""

    keep: Set[bytes] = field(default_factory=frozenset)
    chunks: int = 0
    without_kv: int = 0
    needed: int = 0
    max_bytes: int = 0


def room_for(store: ChunkStore | None, parts: Sequence[Part], max_bytes: int) -> Room:
    """What is there stays, then comes what is missing, in order, while there is room. So the same run again finds what it
    left, and nothing is computed that would be evicted before anybody asks for it. KV of other documents makes way."""
    prefixes, chunks = dict[bytes, int](), dict[bytes, int]()
    for part in parts:
        of = part.collection
        prefixes |= {of.prefix_key: of.stored_bytes(len(of.prefix_ids))} if of.prefix_ids else {}
        chunks |= {p.key: of.stored_bytes(len(p.chunk.token_ids)) for p in part.chunks}
    sizes = prefixes | chunks
    needed = sum(sizes.values())
    if not max_bytes or needed <= max_bytes:
        return Room(sizes.keys(), len(chunks), 0, needed, max_bytes)
    there: list[bytes] = []
    if store is not None:
        with store.read() as reader:
            there = [key for key in sizes if reader.has_kv(key)]
    keep, left = set[bytes](), max_bytes
    for key in dict.fromkeys((*prefixes, *there, *sizes)):
        if sizes[key] <= left:
            keep.add(key)
            left -= sizes[key]
    return Room(keep, len(chunks), len(chunks.keys() - keep), needed, max_bytes)
