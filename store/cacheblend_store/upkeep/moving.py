"""Push chunks and documents of a store to a tier, and pull them into a store. Both resume interrupted runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal, TypeVar

from cacheblend_store.errors import BadBlob, StoreFull
from cacheblend_store.format.blobs import REMOVED
from cacheblend_store.format.records import COLLECTION, ChunkManifest, DocumentRecord
from cacheblend_store.store import ChunkStore
from cacheblend_store.tier.layout import DocumentBundle
from cacheblend_store.tier.objects import Tier, TierObject
from cacheblend_store.upkeep import Progress

_AT_ONCE = 8
_BATCH_BYTES = 32 << 20  # bytes of chunks per transaction
T = TypeVar("T")
R = TypeVar("R")
Status = Literal["new", "unchanged", "replaced", "gone", "rejected", "damaged", "text"]
Rename = Callable[[str], str]
"""Converts a document's name in the store to its name in the tier, or back."""


@dataclass(frozen=True)
class MovedChunk:
    id: str
    # "rejected": its object is not used, see `reason`. "damaged": its record or KV in the store is damaged. "text": it
    # has no KV, or KV in a removed codec, or the KV does not fit the quota.
    status: Status
    num_bytes: int = 0
    reason: str = ""


@dataclass
class MoveReport:
    chunks: dict[str, int] = field(default_factory=dict)  # status -> number of chunks
    documents: int = 0
    num_bytes: int = 0
    kept: list[str] = field(default_factory=list)  # documents with a different version in the store, which stays
    rejected: list[str] = field(default_factory=list)  # documents with unusable objects

    def add(self, chunk: MovedChunk) -> MovedChunk:
        self.chunks[chunk.status] = self.chunks.get(chunk.status, 0) + 1
        self.num_bytes += chunk.num_bytes
        return chunk


OnChunk = Callable[[MovedChunk, int, int], None]
"""Called with a chunk, the number of chunks done, and the total."""


def push(
    store: ChunkStore, tier: Tier, keys: Collection[bytes] | None, rename: Rename, on_chunk: OnChunk
) -> MoveReport:
    """Upload chunks (None: all), their prefixes and their documents. Chunks that the tier has are not uploaded again.
    Chunks without KV are uploaded as text with their documents. Raises TierError, StoreErrors."""
    tier.check()
    report = MoveReport()
    every = {m.key: (m.collection, m.context) for m in store.chunks(prefixes=True)}
    prefixes = {collection: key for key, (collection, context) in every.items() if context == "prefix"}
    wanted = list(every) if keys is None else list(dict.fromkeys(keys))
    before = {prefixes[every[key][0]] for key in wanted if key in every and every[key][0] in prefixes}
    wanted = sorted({*wanted, *before})

    def put(key: bytes) -> MovedChunk:
        try:
            chunk = store.get_blobs(key)
        except BadBlob as error:
            return MovedChunk(key.hex(), "damaged", reason=error.message)
        if chunk is None or chunk[0].codec in REMOVED:
            return MovedChunk(key.hex(), "text")
        manifest, blobs = chunk
        size = tier.size(tier.name(manifest.collection, key))
        if size is not None:
            with suppress(BadBlob):  # of another size
                tier.layout(manifest, size)
                return MovedChunk(key.hex(), "unchanged")
        named = replace(manifest, source=rename(manifest.source))
        return MovedChunk(key.hex(), "new" if size is None else "replaced", tier.put_chunk(named, blobs))

    for done, chunk in enumerate(_side_by_side(wanted, put), 1):
        on_chunk(report.add(chunk), done, len(wanted))
    moved, collections = set(wanted), {every[key][0] for key in wanted if key in every}
    for memo in store.memos(COLLECTION):
        if memo.name in collections:
            tier.put_collection(memo)
    for record in store.documents():
        if any(chunk.key in moved for chunk in record.chunks):
            texts = tuple(m for c in record.chunks if (m := store.undamaged(c.key)) is not None)
            if len({m.key for m in texts}) == len({c.key for c in record.chunks}):
                name = rename(record.source)
                named = tuple(replace(m, source=rename(m.source)) for m in texts)
                prefix = prefixes.get(record.collection, b"")
                tier.put_document(DocumentBundle(replace(record, source=name), prefix, named))
                report.documents += 1
    return report


def pull(
    store: ChunkStore, tier: Tier, wanted: Callable[[DocumentRecord | str], bool] | None, rename: Rename,
    on_chunk: OnChunk, *, replace_documents: bool = False,
) -> MoveReport:  # fmt: skip
    """Download documents with the texts and KV of their chunks, and chunks without a document. All data is checked.

    Undamaged chunks in the store stay unchanged. A different version of a document stays too, unless
    `replace_documents`. Raises TierError, StoreErrors.

    wanted: filter, called with each document and with the id of each chunk without a document; None for everything.
    """
    tier.check()
    report, needed, owned = MoveReport(), set[str](), set[str]()
    known = {memo.name for memo in store.memos(COLLECTION)}
    for found in tier.documents():
        try:
            bundle = tier.get_document(found.name, found.size)
        except BadBlob as error:
            report.rejected.append(f"{found.name}: {error.message}")
            continue
        record = replace(bundle.record, source=rename(bundle.record.source))
        keys = [key for key in (bundle.prefix_key, *(c.key for c in record.chunks)) if key]
        names = [tier.name(record.collection, key) for key in keys]
        owned.update(names)
        if wanted is not None and not wanted(record):
            continue
        if _take_document(store, record, bundle, report, rename, replace_documents):
            needed.update(names)
            _take_collection(store, tier, record.collection, known)
    alone = (o for o in tier.chunks() if o.name in needed or o.name not in owned)
    objects = [o for o in alone if o.name in needed or wanted is None or wanted(o.name.rpartition("/")[2])]

    def get(found: TierObject) -> tuple[MovedChunk, ChunkManifest | None, list[bytes]]:
        key = _key_in(store, tier, found)
        if key is not None:
            return MovedChunk(key.hex(), "unchanged"), None, []
        try:
            manifest, blobs = tier.get_chunk(found.name, found.size)
        except BadBlob as error:
            return MovedChunk(found.name.rpartition("/")[2], "rejected", reason=error.message), None, []
        if manifest.codec in REMOVED:
            return MovedChunk(manifest.id, "text"), None, []
        if _holds(store, manifest):
            return MovedChunk(manifest.id, "unchanged"), None, []
        return MovedChunk(manifest.id, "new", found.size), manifest, blobs

    def stored() -> Iterator[MovedChunk]:
        batch = list[tuple[ChunkManifest, list[bytes]]]()
        for chunk, manifest, blobs in _side_by_side(objects, get):
            if manifest is None:
                yield chunk
                continue
            _take_collection(store, tier, manifest.collection, known)
            batch.append((replace(manifest, source=rename(manifest.source)), blobs))
            if sum(m.num_bytes for m, _ in batch) >= _BATCH_BYTES:
                yield from _put(store, batch)
                batch = []
        yield from _put(store, batch)

    for done, chunk in enumerate(stored(), 1):
        on_chunk(report.add(chunk), done, len(objects))
    return report


def prune_tier(
    tier: Tier, before: float, *, dry_run: bool = False, progress: Progress | None = None
) -> tuple[int, int]:
    """Delete objects written before a moment (seconds since the epoch). Return (number of objects, bytes)."""
    tier.check()
    found = [o for listed in (tier.chunks, tier.documents) for o in listed() if o.modified < before]
    if not dry_run:
        for start in range(0, len(found), 1000):
            tier.delete(o.name for o in found[start : start + 1000])
            if progress is not None:
                progress(min(start + 1000, len(found)), len(found))
    return len(found), sum(o.size for o in found)


def _take_collection(store: ChunkStore, tier: Tier, collection: str, known: set[str]) -> None:
    """Store a collection's memo if it is not known. A damaged memo is skipped, because chunks are found without it."""
    if collection in known:
        return
    known.add(collection)
    with suppress(BadBlob):
        if (memo := tier.get_collection(collection)) is not None:
            store.put_memos([memo])


def _take_document(
    store: ChunkStore, record: DocumentRecord, bundle: DocumentBundle, report: MoveReport, rename: Rename, replaces: bool
) -> bool:  # fmt: skip
    """Store a document and the texts of its chunks. Return whether to download its KV."""
    old = store.get_document(*record.place)
    same = old is not None and (old.chunks, old.content_digest) == (record.chunks, record.content_digest)
    if old is not None and not same and not replaces:
        report.kept.append(record.source)
        return False
    texts = [replace(m, source=rename(m.source)) for m in bundle.texts]
    store.put_documents([] if same else [record], (), texts)
    report.documents += not same
    return True


def _put(store: ChunkStore, batch: list[tuple[ChunkManifest, list[bytes]]]) -> Iterator[MovedChunk]:
    try:
        statuses: Iterable[Status] = store.put_chunks(batch) if batch else []
    except StoreFull:  # no room for KV under the quota: store only texts
        statuses = ["text"] * len(batch)
        store.put_documents((), (), [m for m, _ in batch])
    for (manifest, blobs), status in zip(batch, statuses, strict=True):
        yield MovedChunk(manifest.id, status, sum(map(len, blobs)) if status != "text" else 0)


def _key_in(store: ChunkStore, tier: Tier, found: TierObject) -> bytes | None:
    """Return the key in an object's name if the store has that chunk with KV, else None. A hashed name has no key."""
    name = found.name.rpartition("/")[2]
    key = bytes.fromhex(name) if len(name) == 40 else b""
    with store.read() as reader:
        manifest = reader.undamaged(key)
    if manifest is None or tier.name(manifest.collection, key) != found.name or not _holds(store, manifest):
        return None
    return key


def _holds(store: ChunkStore, manifest: ChunkManifest) -> bool:
    """Return whether the store has the chunk with undamaged KV."""
    try:
        chunk = store.get_blobs(manifest.key)
    except BadBlob:
        return False
    return chunk is not None and chunk[0].token_ids == manifest.token_ids


def _side_by_side(items: Iterable[T], work: Callable[[T], R]) -> Iterator[R]:
    """Yield results in order, computing a few ahead. After an error, no further work is started."""
    rest = iter(items)
    with ThreadPoolExecutor(_AT_ONCE, "tier-move") as pool:
        running: list[Future[R]] = [pool.submit(work, item) for item in islice(rest, 2 * _AT_ONCE)]
        try:
            while running:
                yield running.pop(0).result()
                running += [pool.submit(work, item) for item in islice(rest, 1)]
        finally:
            for future in running:
                future.cancel()
