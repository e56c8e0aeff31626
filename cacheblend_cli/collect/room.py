"""Choose which chunks of a run get KV if the store's quota is too small for all."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from cacheblend_store import ChunkStore
from cacheblend_store.format.keys import KEY_BYTES
from cacheblend_store.format.records import document_key

from cacheblend_cli.collect.collector import prefix_chunk, record_bytes
from cacheblend_cli.collect.plan import Part
from cacheblend_cli.collect.summaries import ChunkSize


@dataclass(frozen=True)
class Room:
    """The part of a run's KV that fits the quota.

    A chunk is `in` it if it has or gets KV. All numbers are 0 without a quota.
    """

    # Keys of these chunks, and of the prefix if it fits. This run does not evict them. None without a quota: all
    # chunks.
    keep: Container[bytes] | None = None
    chunks: int = 0  # number of chunks
    without_kv: int = 0  # number of chunks that get no KV
    needed: int = 0  # bytes of records and KV if every chunk had KV, including the records of other documents
    max_bytes: int = 0  # quota in bytes

    def __contains__(self, key: bytes) -> bool:
        return self.keep is None or key in self.keep


def room_for(plan: list[Part], store: ChunkStore | None, max_bytes: int) -> Room:
    """Choose the chunks that get KV under a quota of max_bytes bytes; 0 = no quota.

    Records come first: of this run's chunks and documents, and of others. Then come stored KV and missing KV, in order,
    while it fits. So a repeated run finds its own chunks again, and no KV is computed only to be evicted before its
    use. KV of other documents is evicted to make room.
    """
    if not max_bytes:
        return Room()
    texts = kv = without_kv = 0
    own, keep = set[bytes](), set[bytes]()
    prefixes = {part.collection.prefix_key: part.collection for part in plan if part.collection.prefix_ids}
    for key, of in prefixes.items():
        own.add(key)
        texts += record_bytes(of, prefix_chunk(of))
        kv += of.prefix_bytes
    chunks = list(_chunks(plan))
    for part, size in chunks:
        own.add(size.key)
        texts += size.record_bytes
        kv += part.stored_bytes(size.num_tokens)
    documents = {document_key(p.collection.id, d.file.source, p.settings.context): d for p in plan for d in p.documents}
    texts += sum(document.record_bytes for document in documents.values())
    texts += _records_of_others(store, own, documents)
    left = max_bytes - texts
    for key, of in prefixes.items():
        if (num_bytes := of.prefix_bytes) <= left:
            keep.add(key)
            left -= num_bytes
    for is_stored in (True, False):
        for part, size in chunks:
            if bool(size.has_kv) != is_stored:
                continue
            if (num_bytes := part.stored_bytes(size.num_tokens)) <= left:
                keep.add(size.key)
                left -= num_bytes
            else:
                without_kv += 1
    return Room(keep, len(chunks), without_kv, texts + kv, max_bytes)


def _chunks(plan: list[Part]) -> Iterator[tuple[Part, ChunkSize]]:
    """Yield the chunks of the plan without duplicates."""
    seen = set[bytes]()
    for part in plan:
        for size in part.sizes:
            if size.key not in seen:
                seen.add(size.key)
                yield part, size


def _records_of_others(store: ChunkStore | None, own: set[bytes], documents: Container[bytes]) -> int:
    """Return the bytes of the records of other documents and of their chunks.

    own: keys of this run's chunks. documents: keys of its document records.
    """
    if store is None:
        return 0
    num_bytes = 0
    with store.read() as reader:
        refs = reader.keys_from(b"", "refs")  # chunk key + document key, in the same order as the chunks
        ref = next(refs, b"")
        for node in reader.pages.nodes("chunks"):
            while ref and ref[:KEY_BYTES] < node.key:
                ref = next(refs, b"")
            if ref[:KEY_BYTES] == node.key and node.key not in own:
                num_bytes += node.size
        num_bytes += sum(node.size for node in reader.pages.nodes("documents") if node.key not in documents)
    return num_bytes
