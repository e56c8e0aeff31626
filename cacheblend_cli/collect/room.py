"""Choose the chunks of a run that have KV when the store's quota has no room for all of it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from cacheblend_store import ChunkStore
from cacheblend_store.format.keys import KEY_BYTES

from cacheblend_cli.collect.collector import prefix_chunk, record_bytes
from cacheblend_cli.collect.plan import Plan


@dataclass(frozen=True)
class Room:
    """The part of a run's KV that the quota has room for. A chunk is `in` it if it has KV or gets it.

    keep: keys of these chunks, and of the prompt's prefix where it fits; nothing in this run evicts them. None without a quota: all
    chunks. chunks: number of chunks. without_kv: number of chunks that get no KV. needed: bytes of KV and text with which all of
    them have KV, text of other documents included. max_bytes: the quota in bytes. These are 0 without a quota.
    """

    keep: Set[bytes] | None = None
    chunks: int = 0
    without_kv: int = 0
    needed: int = 0
    max_bytes: int = 0

    def __contains__(self, key: bytes) -> bool:
        return self.keep is None or key in self.keep


def room_for(plan: Plan, store: ChunkStore | None, max_bytes: int) -> Room:
    """Choose the chunks that have KV under a quota of max_bytes bytes, 0 = none.

    Text comes first: that of this run's chunks and of other documents. Then KV that is stored, then missing KV, in order, while
    it fits. So the same run again finds what it left, and nothing is computed that would be evicted before it is used. KV of
    other documents is evicted to make room.
    """
    if not max_bytes:
        return Room()
    prefixes, chunks, stored = dict[bytes, int](), dict[bytes, int](), list[bytes]()
    for part in plan.parts:
        of = part.collection
        prefixes |= {of.prefix_key: of.stored_bytes(len(of.prefix_ids))} if of.prefix_ids else {}
        for size in part.sizes:
            chunks[size.key] = part.stored_bytes(size)
            stored += [size.key] if size.has_kv else []
    sizes = prefixes | chunks
    texts = _text_bytes(plan, store, sizes.keys())
    needed = sum(sizes.values()) + texts
    if needed <= max_bytes:
        return Room(sizes.keys(), len(chunks), 0, needed, max_bytes)
    keep, left = set[bytes](), max_bytes - texts
    for key in dict.fromkeys((*prefixes, *stored, *sizes)):
        if sizes[key] <= left:
            keep.add(key)
            left -= sizes[key]
    return Room(keep, len(chunks), len(chunks.keys() - keep), needed, max_bytes)


def _text_bytes(plan: Plan, store: ChunkStore | None, own: Set[bytes]) -> int:
    """Return the bytes of the records of this run's chunks and prefixes, and of other documents' chunks."""
    sizes = dict[bytes, int]()
    for part in plan.parts:
        of = part.collection
        if of.prefix_ids:
            sizes[of.prefix_key] = record_bytes(of, prefix_chunk(of))
        sizes.update((size.key, size.record_bytes) for size in part.sizes)
    if store is not None:
        with store.read() as reader:
            others = {name[:KEY_BYTES] for name in reader.keys_from(b"", "refs")} - own
            sizes.update((node.key, node.size) for node in reader.pages.nodes("chunks") if node.key in others)
    return sum(sizes.values())
