"""precompute: documents -> chunks -> collect behind the prefix -> codec -> store. Does only what changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cacheblend_store import BadBlob, ChunkManifest, ChunkStore, DocumentRecord, StoreReader
from cacheblend_store.format.layouts import CODECS

from cacheblend_cli.collect.collector import Collector, PlannedChunk, collect_sequences
from cacheblend_cli.collect.document_records import (
    document_record,
    gone_documents,
    is_news,
    rename_documents,
    renamed,
    stored_documents,
)
from cacheblend_cli.collect.prefill import CollectSequence, Kept, collect, pack_tokens
from cacheblend_cli.corpus.chunker import Chunk, cut
from cacheblend_cli.corpus.contexts import CONTEXTS, Ids, Neighbours, Passage, document_contexts
from cacheblend_cli.corpus.documents import Document, Skipped
from cacheblend_cli.corpus.places import shown
from cacheblend_cli.corpus.search import check_context
from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.collection import Collection, check_kv_dtype

OnEvent = Callable[["PrecomputeEvent"], None]


@dataclass(frozen=True)
class PrecomputeOptions:
    """context: what a chunk is collected behind, see corpus/contexts.py. window: tokens of a chunk and its left context
    at most. neighbours: how many similar chunks `neighbours` takes."""

    chunk_tokens: int = 512
    context: str = "document"
    window: int = 2048
    neighbours: int = 3
    kv_dtype: str = "auto"
    force: bool = False
    dry_run: bool = False
    salt: str = ""

    def __post_init__(self) -> None:
        check_context(self.context)
        if self.chunk_tokens < 1:
            raise UsageError(f"--chunk-tokens {self.chunk_tokens} is not 1 or more", "512 is the default")
        if self.window < 1 or self.neighbours < 1:
            name, value = ("window", self.window) if self.window < 1 else ("neighbours", self.neighbours)
            raise UsageError(f"--{name} {value} is not 1 or more", "see: cacheblend precompute --help")
        check_kv_dtype(self.kv_dtype)


@dataclass(frozen=True)
class ChunkResult:
    """One line of `precompute --json`."""

    id: str
    source: str
    index: int
    tokens: int
    bytes: int
    status: Literal["new", "unchanged", "replaced"]


@dataclass(frozen=True)
class PrecomputeEvent:
    """kind: "plan" (totals are known), "chunk", "skipped", "removed". message is for people."""

    kind: Literal["plan", "chunk", "skipped", "removed"]
    chunk: ChunkResult | None = None
    message: str = ""
    tokens_total: int = 0


@dataclass
class PrecomputeReport:
    """gone: documents that are no more. removed: chunks that went. evicted: chunks of these documents that the quota had
    no room for. skipped: (path, reason)."""

    documents: int = 0
    gone: int = 0
    new: int = 0
    unchanged: int = 0
    replaced: int = 0
    removed: int = 0
    evicted: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    estimated_seconds: float | None = None
    skipped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.computed_tokens / self.seconds if self.seconds else 0.0


Planned = list[tuple[Document, list[PlannedChunk]]]
"""Documents in order, with their chunks."""


def precompute(
    collection: Collection,
    store: ChunkStore | None,
    documents: Iterable[Document | Skipped],
    options: PrecomputeOptions,
    on_event: OnEvent,
    roots: Sequence[str] = (),
) -> PrecomputeReport:
    """Bring the store up to date with the documents. Each chunk is committed before it is reported.

    store None: a dry run. roots: the names of the paths that were looked at: documents below them that are gone from disk
    are removed from the store. Safe to interrupt and to run again: what is there is `unchanged`.
    """
    start, report = time.perf_counter(), PrecomputeReport()
    found: list[tuple[Document, list[Chunk]]] = []
    kept, no_documents = dict[str, str](), set[str]()
    for document in documents:
        if isinstance(document, Skipped):
            if document.unread:
                kept[document.source] = ""
            else:
                no_documents.add(document.source)
            report.skipped.append((document.typed, document.reason))
            on_event(PrecomputeEvent("skipped", message=f"{document.typed}: {document.reason}"))
            continue
        kept[document.source] = document.digest
        found.append((document, cut(document.text, collection.model.tokenizer.encode_text, options.chunk_tokens)))
    if store is not None and not options.dry_run:
        rename_documents(store)
    codecs = {replace(collection, codec=codec).id: codec for codec in CODECS}
    stored = [r for r in stored_documents(store) if r.collection in codecs] if store else []
    gone = gone_documents(stored, kept, no_documents, roots)
    planned = plan_documents(collection, found, options, _stored_passages(collection, store, found, gone, options))
    report.documents = len(planned)
    report.tokens = sum(len(p.chunk.token_ids) for _, chunks in planned for p in chunks)
    report.bytes = sum(collection.chunk_bytes(len(p.chunk.token_ids)) for _, chunks in planned for p in chunks)
    on_event(PrecomputeEvent("plan", tokens_total=report.tokens))
    if options.dry_run or store is None:
        report.estimated_seconds = _estimate(Collector(collection), planned)
        return report
    run = _Run(collection, store, options, on_event, report)
    run.store(planned)
    run.remove(gone, kept)
    run.remove_outdated(stored, kept, codecs)
    if store.max_bytes:
        report.evicted = sum(not store.has_kv(k) for k in {p.key for _, chunks in planned for p in chunks})
    report.seconds = time.perf_counter() - start
    return report


class _Run:
    """One precompute, once it is known what the documents' chunks are."""

    def __init__(
        self,
        collection: Collection,
        store: ChunkStore,
        options: PrecomputeOptions,
        on_event: OnEvent,
        report: PrecomputeReport,
    ) -> None:
        self._collection, self._store, self._options = collection, store, options
        self._on_event, self._report = on_event, report
        self._collector = Collector(collection, store)

    def store(self, planned: Planned) -> None:
        """Collect and commit what the store lacks, batch by batch, and each document's record behind its chunks."""
        self._collector.store_prefix()
        for batch in _batches(planned, 4 * pack_tokens(self._collection.model.decoder.device)):
            self._store_batch(batch)

    def remove(self, gone: Sequence[DocumentRecord], kept: Mapping[str, str]) -> None:
        """Forget documents that are gone, in every context and codec. What they said stays where it has turned up under
        another name; kept: name -> digest of what was found."""
        self._report.removed += sum(map(len, self._store.put_documents(renamed(self._store, gone, kept), gone)))
        names = {digest: name for name, digest in kept.items() if digest}
        for source, digest in dict.fromkeys((r.source, r.content_digest) for r in gone):
            self._report.gone += 1
            what = f"is {shown(names[digest])} now" if digest in names else "is gone: its chunks were removed"
            self._on_event(PrecomputeEvent("removed", message=f"{shown(source)} {what}"))

    def remove_outdated(
        self, stored: Sequence[DocumentRecord], kept: Mapping[str, str], codecs: Mapping[str, str]
    ) -> None:
        """A document's chunks in other contexts and codecs say what it said then. When it says something else now, they
        go. stored: from before this run. codecs: by collection."""
        for old in stored:
            now = self._store.get_document(old.collection, old.source, old.context) if kept.get(old.source) else None
            if now is not None and now.content_digest != kept[old.source]:
                [removed] = self._store.put_documents((), [now])
                self._report.removed += len(removed)
                what = f"its chunks of context {old.context} in {codecs[old.collection]} were removed"
                self._on_event(PrecomputeEvent("removed", message=f"{shown(old.source)} has changed: {what}"))

    def _store_batch(self, batch: Planned) -> None:
        collection, store, options, report = self._collection, self._store, self._options, self._report
        wanted = {p.key: p for _, chunks in batch for p in chunks}
        with store.read() as reader:
            present = {key: m for key in wanted if (m := _manifest_or_none(reader, key)) is not None and m.has_kv}
        missing = [p for key, p in wanted.items() if options.force or key not in present]
        results: dict[bytes, ChunkResult] = {}
        own = options.context
        replaced_sources = {d.source for d, _ in batch if store.get_document(collection.id, d.source, own) is not None}
        for key, status, size in self._collector.store(missing):
            planned = wanted[key]
            if planned.source in replaced_sources and status == "new":
                status = "replaced"
            results[key] = _result(planned, size, status)
            report.computed_tokens += len(planned.chunk.token_ids)
            self._on_event(PrecomputeEvent("chunk", results[key]))
        records: list[DocumentRecord] = []
        for document, chunks in batch:
            for planned in chunks:
                result = results.pop(planned.key, None)
                if result is None:  # was there, or appeared earlier in this batch
                    size = collection.chunk_bytes(len(planned.chunk.token_ids))
                    result = _result(planned, size, "unchanged")
                    self._on_event(PrecomputeEvent("chunk", result))
                setattr(report, result.status, getattr(report, result.status) + 1)
            records.append(document_record(collection, document, chunks, options))
        report.removed += sum(map(len, store.put_documents([r for r in records if is_news(store, r)])))


def plan_documents(
    collection: Collection,
    documents: Sequence[tuple[Document, Sequence[Chunk]]],
    options: PrecomputeOptions,
    stored: Iterable[Passage] = (),
) -> Planned:
    """The documents' chunks with their keys and left contexts. stored: passages of other documents, for `neighbours`."""
    window = collection.window(options.window)
    near: Neighbours | None = None
    if options.context == "neighbours":
        own = (Passage(c.text, c.token_ids) for _, chunks in documents for c in chunks)
        near = Neighbours((*own, *stored), options.neighbours, window)
    out = []
    for document, chunks in documents:
        lefts: list[Ids] = [()] * len(chunks)
        if near is not None:
            lefts = [near.left(c.token_ids) for c in chunks]
        elif options.context == "document":
            lefts = document_contexts([c.token_ids for c in chunks], window)
        planned = [
            PlannedChunk(collection.key(chunk.token_ids, left), document.source, chunk, left, options.context)
            for chunk, left in zip(chunks, lefts, strict=True)
        ]
        out.append((document, planned))
    return out


def _batches(planned: Planned, most: int) -> Iterable[Planned]:
    """Documents together up to `most` tokens: their chunks are prefilled in shared launches."""
    batch: Planned = []
    tokens = 0
    for item in planned:
        batch.append(item)
        tokens += sum(len(p.chunk.token_ids) for p in item[1])
        if tokens >= most:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _stored_passages(
    collection: Collection,
    store: ChunkStore | None,
    found: Sequence[tuple[Document, Sequence[Chunk]]],
    gone: Sequence[DocumentRecord],
    options: PrecomputeOptions,
) -> Iterator[Passage]:
    """What `neighbours` may take from the store: the documents that are not of this run, each in one context.

    A run's own documents are taken from the run, so that the same run again finds the same neighbours.
    """
    if store is None or options.context != "neighbours":
        return
    not_these = {d.source for d, _ in found} | {r.source for r in gone}
    records: dict[str, DocumentRecord] = {}
    for record in store.documents(collection.id):
        if record.source not in not_these:
            known = records.setdefault(record.source, record)
            if CONTEXTS.index(record.context) > CONTEXTS.index(known.context):
                records[record.source] = record
    for record in records.values():
        for place in record.chunks:
            with store.read() as reader:
                manifest = _manifest_or_none(reader, place.key)
            if manifest is not None:
                yield Passage(manifest.text, manifest.token_ids)


def _estimate(collector: Collector, planned: Planned) -> float:
    """Seconds to collect everything, from a measured prefill of as many tokens as go together, in one sequence."""
    chunks = [p for _, found in planned for p in found]
    if not chunks:
        return 0.0
    decoder = collector.collection.model.decoder
    tokens = sum(len(s.token_ids) for s in collect_sequences(chunks))
    size = max(1, collector.collection.window(min(pack_tokens(decoder.device), tokens)))
    probe = CollectSequence(tuple(chunks[0].chunk.token_ids[:1] * size), (Kept(b"", 0, size),))
    prefix, best = collector.prefix, float("inf")
    for _ in range(2):
        start = time.perf_counter()
        for _ in collect(decoder, prefix, [probe]):
            pass
        best = min(best, time.perf_counter() - start)
    return best * tokens / size


def _result(planned: PlannedChunk, size: int, status: str) -> ChunkResult:
    chunk = planned.chunk
    return ChunkResult(planned.key.hex(), shown(planned.source), chunk.index, len(chunk.token_ids), size, status)  # type: ignore[arg-type]


def _manifest_or_none(reader: StoreReader, key: bytes) -> ChunkManifest | None:
    """A damaged manifest is a miss."""
    try:
        return reader.manifest(key)
    except BadBlob:
        return None
