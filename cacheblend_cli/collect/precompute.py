"""precompute: documents -> chunks -> collect behind the prefix -> codec -> store. Does only what changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal

from cacheblend_store import ChunkStore

from cacheblend_cli.collect.collector import Collector, PlannedChunk, chunk_manifest, collect_sequences
from cacheblend_cli.collect.corpus_diff import CorpusDiff, survey
from cacheblend_cli.collect.document_records import document_record, is_news, rename_documents, renamed
from cacheblend_cli.collect.paths import Paths
from cacheblend_cli.collect.plan import Difference, Part, Planned, compare, plan_parts
from cacheblend_cli.collect.prefill import CollectSequence, Kept, collect, pack_tokens
from cacheblend_cli.collect.room import Room, room_for
from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.corpus.documents import Document, Skipped
from cacheblend_cli.corpus.places import shown
from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.dates import keep_date
from cacheblend_cli.prompt.kept import keep_wording

__all__ = ["Difference", "PrecomputeEvent", "PrecomputeOptions", "PrecomputeReport", "precompute"]

OnEvent = Callable[["PrecomputeEvent"], None]
Confirm = Callable[[Difference], bool]


@dataclass(frozen=True)
class PrecomputeOptions:
    """The first six as in CollectSettings; None is what the store remembers of the documents' root, and the default where
    it remembers nothing. force: compute what is stored, too. max_bytes: the quota, where it is another than the store's.
    day: the date a chat template is to print from now on, None for the one that the store keeps, or today's."""

    chunk_tokens: int | None = None
    context: str | None = None
    window: int | None = None
    neighbours: int | None = None
    kv_dtype: str | None = None
    overlap: int | None = None
    force: bool = False
    dry_run: bool = False
    salt: str = ""
    max_bytes: int | None = None
    day: date | None = None

    def __post_init__(self) -> None:
        CollectSettings(**self.given)

    @property
    def given(self) -> dict[str, Any]:
        """The settings that were asked for."""
        return {name: value for name in vars(CollectSettings()) if (value := getattr(self, name)) is not None}


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
    """kind: "reading" (done of total characters of a document are cut), "room" (the quota has not enough), "plan" (total
    tokens to go), "chunk", "skipped" (a file that is no document), "note" (of one that is), "removed". message is for people."""

    kind: Literal["reading", "room", "plan", "chunk", "skipped", "note", "removed"]
    chunk: ChunkResult | None = None
    message: str = ""
    done: int = 0
    total: int = 0
    room: Room | None = None
    skipped: Skipped | None = None


@dataclass
class PrecomputeReport:
    """gone: documents that are no more. removed: chunks that went. bytes: of the KV of these documents, of what the quota
    has room for. hidden: documents elsewhere that the date hides from questions. skipped: files that are no documents. difference: what
    the run was to change, as it was found before it."""

    documents: int = 0
    gone: int = 0
    new: int = 0
    unchanged: int = 0
    replaced: int = 0
    removed: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    hidden: list[str] = field(default_factory=list)
    difference: Difference = field(default_factory=Difference)
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.computed_tokens / self.seconds if self.seconds else 0.0


def precompute(
    collection: Collection,
    store: ChunkStore | None,
    paths: Paths,
    options: PrecomputeOptions,
    on_event: OnEvent,
    confirm: Confirm | None = None,
) -> PrecomputeReport:
    """Bring the store up to date with the documents at and below the paths. Each chunk is committed before it is reported.

    collection: of any codec. store None: a dry run. paths: what is gone from disk below them is removed from the store, too.
    confirm: asked before documents are computed again because they are
    stored with other settings. Safe to interrupt and to run again: what is there is `unchanged`.

    Raises UsageError when it is not confirmed, and for settings that do not fit the model.
    """
    start, report = time.perf_counter(), PrecomputeReport()

    def skip(document: Skipped) -> None:
        report.skipped.append(document)
        on_event(PrecomputeEvent("skipped", message=f"{document.typed}: {document.reason}", skipped=document))

    def reading(document: Document, done: int) -> None:
        on_event(PrecomputeEvent("reading", message=shown(document.source), done=done, total=len(document.text)))

    if store is not None and not options.dry_run:
        rename_documents(store)
    found = survey(collection, store, paths, skip)
    for document in found.documents:
        if document.layout.note:
            on_event(PrecomputeEvent("note", message=f"{shown(document.source)}: {document.layout.note}"))
    parts = plan_parts(store, found, options.given, reading)
    quota = options.max_bytes if options.max_bytes is not None else store.max_bytes if store is not None else 0
    room = room_for(store, parts, quota)
    if room.without_kv:
        on_event(PrecomputeEvent("room", room=room))
    sizes = {c.key: p.collection.stored_bytes(len(c.chunk.token_ids)) for p in parts for c in p.chunks}
    report.documents = sum(len(part.planned) for part in parts)
    report.tokens = sum(len(c.chunk.token_ids) for part in parts for c in part.chunks)
    report.bytes = sum(size for key, size in sizes.items() if key in room.keep)
    report.hidden = sorted(found.left_behind)
    report.difference = compare(store, found, parts, room.keep, force=options.force)
    if options.dry_run or store is None:
        report.difference.seconds = _estimate(report.difference)
        return report
    start += _confirm(report.difference, confirm)
    on_event(PrecomputeEvent("plan", total=report.tokens))
    run = _Run(found, store, room.keep, on_event, report)
    roots = found.given_roots(options.given) if parts else []
    found.roots.remember(store, roots, options.given, done=False)
    if parts:
        keep_date(store, collection)
        keep_wording(store, collection)
    for part in parts:
        run.store(part, force=options.force)
    run.remove_gone()
    run.remove_outdated()
    found.roots.remember(store, roots, options.given, done=True)
    report.seconds = time.perf_counter() - start
    return report


def _confirm(difference: Difference, confirm: Confirm | None) -> float:
    """Ask where something is to be asked. Returns the seconds that took."""
    start = time.perf_counter()
    if confirm is not None and difference.changes:
        difference.seconds = _estimate(difference)
        if not confirm(difference):
            raise UsageError("nothing was computed", "without the flag, documents are cut and collected as they were")
    return time.perf_counter() - start


class _Run:
    """One precompute, once it is known what the documents' chunks are. keep: keys of those that are to have KV."""

    def __init__(
        self, found: CorpusDiff, store: ChunkStore, keep: Set[bytes], on_event: OnEvent, report: PrecomputeReport
    ) -> None:
        self._found, self._store, self._keep = found, store, keep
        self._on_event, self._report = on_event, report

    def store(self, part: Part, *, force: bool) -> None:
        """Bring the store to the documents, batch by batch: what they say first, then the KV that it lacks, or, with
        `force`, all of it."""
        collector = Collector(part.collection, self._store, self._keep)
        if part.collection.prefix_key in self._keep:
            collector.store_prefix()
        for batch in _batches(part.planned, 4 * pack_tokens(part.collection.model.decoder.device)):
            self._store_batch(part, collector, batch, force=force)

    def remove_gone(self) -> None:
        """Forget documents that are gone, in every context and codec. What they said stays where it has turned up under
        another name."""
        gone, names = self._found.gone, self._found.names
        self._report.removed += len(self._store.put_documents(renamed(self._store, gone.values(), names), gone))
        for source, digest in dict.fromkeys((r.source, r.content_digest) for r in gone.values()):
            self._report.gone += 1
            what = f"is {shown(names[digest])} now" if digest in names else "is gone: its chunks were removed"
            self._on_event(PrecomputeEvent("removed", message=f"{shown(source)} {what}"))

    def remove_outdated(self) -> None:
        """A document's chunks in other contexts and codecs say what it said then. When it says something else now, they
        go. So does what stands behind an earlier date."""
        found, store = self._found, self._store
        now = (store.get_document(*record.place) for record in filter(found.is_outdated, found.stored.values()))
        outdated = [record for record in now if record is not None and found.is_outdated(record)]
        self._report.removed += len(store.put_documents((), [record.key for record in outdated]))
        for record in outdated:
            if record.collection not in found.earlier:
                what = f"its chunks of context {record.context} in {found.codecs[record.collection]} were removed"
                self._on_event(PrecomputeEvent("removed", message=f"{shown(record.source)} has changed: {what}"))

    def _store_batch(self, part: Part, collector: Collector, batch: Planned, *, force: bool) -> None:
        """The documents' records and texts come first: from then on each is found and cited as it is now, and whatever
        happens to this run, no chunk of it is one that nobody wants."""
        store, keep, report = self._store, self._keep, self._report
        places = [p for _, chunks in batch for p in chunks]
        wanted: dict[bytes, PlannedChunk] = {}
        for planned in places:
            wanted.setdefault(planned.key, planned)
        with store.read() as reader:
            there = {key: m for key in wanted if (m := reader.undamaged(key)) is not None}
        missing = {k for k in wanted if k in keep and (force or k not in there or not there[k].has_kv)}
        records = [document_record(part.collection, document, chunks, part.settings) for document, chunks in batch]
        stored = {d.source: self._found.replaced(d.source, part.collection, part.settings.context) for d, _ in batch}
        before = {name: {c.key for record in old for c in record.chunks} for name, old in stored.items()}
        news = [record for record in records if is_news(record, store.get_document(*record.place))]
        texts = [chunk_manifest(part.collection, planned) for key, planned in wanted.items() if key not in there]
        report.removed += len(store.put_documents(news, (), texts, keep))

        def tell(planned: PlannedChunk, status: str) -> None:
            if status == "new" and before[planned.source] and planned.key not in before[planned.source]:
                status = "replaced"
            setattr(report, status, getattr(report, status) + 1)
            key, index, tokens = planned.key, planned.chunk.index, len(planned.chunk.token_ids)
            size = part.collection.stored_bytes(tokens) if key in keep else 0
            result = ChunkResult(key.hex(), shown(planned.source), index, tokens, size, status)  # type: ignore[arg-type]
            self._on_event(PrecomputeEvent("chunk", result))

        for planned in places:
            if planned.key not in missing:
                tell(planned, "unchanged" if planned.key in there else "new")
        for key, status in collector.store([planned for key, planned in wanted.items() if key in missing]):
            tell(wanted[key], status)
            report.computed_tokens += len(wanted[key].chunk.token_ids)
        for planned in places:
            if planned.key in missing and planned is not wanted[planned.key]:  # the same text in a second place
                tell(planned, "unchanged")


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


def _estimate(difference: Difference) -> float:
    """Seconds to collect what is missing, from a measured prefill of as many tokens as go together, in one sequence."""
    total = 0.0
    for collection, chunks in difference.missing:
        if chunks:
            tokens = sum(len(s.token_ids) for s in collect_sequences(chunks))
            total += _seconds_a_token(collection, tokens, chunks[0].chunk.token_ids[0]) * tokens
    return total


def _seconds_a_token(collection: Collection, tokens: int, token_id: int) -> float:
    decoder, prefix = collection.model.decoder, Collector(collection).prefix
    size = max(1, collection.window(min(pack_tokens(decoder.device), tokens)))
    probe, best = CollectSequence((token_id,) * size, (Kept(b"", 0, size),)), float("inf")
    for _ in range(2):
        start = time.perf_counter()
        for _ in collect(decoder, prefix, [probe]):
            pass
        best = min(best, time.perf_counter() - start)
    return best / size
