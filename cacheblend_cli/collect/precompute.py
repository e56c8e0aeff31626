"""precompute: documents -> chunks -> KV after the prefix -> codec -> store. Only changes are computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from cacheblend_store import Amount, ChunkStore
from cacheblend_store.format.records import document_key

from cacheblend_cli.collect.collector import Cluster, Collector, PlannedChunk, chunk_manifest
from cacheblend_cli.collect.corpus_diff import CorpusDiff, Paths, diff_corpus
from cacheblend_cli.collect.difference import Difference, compare, estimate_seconds
from cacheblend_cli.collect.document_records import (
    document_record,
    document_summary,
    is_news,
    rename_documents,
    renamed,
    stored_documents,
)
from cacheblend_cli.collect.plan import Part, Planner
from cacheblend_cli.collect.prefill import pack_tokens
from cacheblend_cli.collect.room import Room, room_for
from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.collect.summaries import SummaryWriter
from cacheblend_cli.corpus.converters.converter import NoDocument
from cacheblend_cli.corpus.documents import Document, DocumentFile, Skipped
from cacheblend_cli.corpus.places import shown
from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.collection import Collection

__all__ = ["Difference", "PrecomputeEvent", "PrecomputeOptions", "PrecomputeReport", "precompute"]

ChunkStatus = Literal["new", "unchanged", "replaced"]
OnEvent = Callable[["PrecomputeEvent"], None]
Confirm = Callable[[Difference], bool]
# Tokens of documents whose records and texts are committed together: a commit of a few chunks rewrites as many pages as
# a commit of many.
_BATCH_TOKENS = 1 << 18
_LONG_PACKS = 24  # launches from which a run measures its speed first, with two launches


@dataclass(frozen=True)
class PrecomputeOptions:
    """Options of a run."""

    # As in CollectSettings. None: the setting that the store remembers, or the default.
    chunk_tokens: int | None = None
    context: str | None = None
    window: int | None = None
    neighbours: int | None = None
    kv_dtype: str | None = None
    overlap: int | None = None
    force: bool = False  # compute stored chunks again
    verify_files: bool = False  # read every file and every record, even of documents that seem unchanged
    list_unchanged: bool = True  # report each unchanged chunk
    dry_run: bool = False  # change nothing
    salt: str = ""  # keeps the chunks of tenants apart
    max_bytes: int | None = None  # new quota of the store, bytes; None: unchanged
    day: date | None = None  # for a chat template that prints a date; None: the date that the store keeps, or today
    cluster: Cluster | None = None  # computes the KV; None: this process

    def __post_init__(self) -> None:
        CollectSettings(**self.given)

    @property
    def given(self) -> dict[str, Any]:
        """CollectSettings fields that are set, by name."""
        return {name: value for name in vars(CollectSettings()) if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class ChunkResult:
    """One line of `precompute --json`."""

    id: str
    source: str
    index: int
    tokens: int
    bytes: int  # size of the KV
    status: ChunkStatus
    omissions: tuple[str, ...] = ()  # parts left out of the document; only with its first chunk

    @property
    def record(self) -> dict[str, Any]:
        """Fields to print; no `omissions` if there are none."""
        return {name: value for name, value in vars(self).items() if name != "omissions" or value}


@dataclass(frozen=True)
class Incomplete:
    """A document whose converter left something out."""

    source: str  # relative to the current directory
    omissions: tuple[str, ...]  # in words
    is_news: bool  # the store does not have these omissions yet


@dataclass(frozen=True)
class PrecomputeEvent:
    """Progress of a run.

    | kind      | meaning                                                                                         |
    |-----------|-------------------------------------------------------------------------------------------------|
    | "reading" | `done` documents are found (`total` 0); then `done` of `total` bytes of them are read and cut   |
    | "room"    | the quota is too small for all KV                                                               |
    | "plan"    | `total` tokens to process; `planned` lists the changes, with estimated seconds for a long run   |
    | "chunk"   | a chunk is stored; `done` of its tokens were worked on in this run                              |
    | "settled" | `done` tokens need no work; their chunks are not reported one by one                            |
    | "skipped" | a file is not a document                                                                        |
    | "omitted" | parts of documents are left out; `incomplete` lists them                                        |
    | "removed" | a document was renamed, or chunks were removed                                                  |
    """

    kind: Literal["reading", "room", "plan", "chunk", "settled", "skipped", "omitted", "removed"]
    chunk: ChunkResult | None = None
    message: str = ""  # text to show the user
    done: int = 0
    total: int = 0
    room: Room | None = None
    skipped: Skipped | None = None
    incomplete: Sequence[Incomplete] = ()
    planned: Difference | None = None


@dataclass
class PrecomputeReport:
    """Result of a run."""

    documents: int = 0
    gone: int = 0  # documents that no longer exist
    new: int = 0  # chunks
    unchanged: int = 0  # chunks
    replaced: int = 0  # chunks
    removed: int = 0  # chunks
    tokens: int = 0  # total of all chunks
    computed_tokens: int = 0
    bytes: int = 0  # KV of these documents that fits the quota
    taken: int = 0  # chunks with KV from the store's tier
    converted: Amount = field(default_factory=Amount)  # chunks converted from a finer codec
    seconds: float = 0.0
    hidden: list[str] = field(default_factory=list)  # other documents that `ask` does not find because of the new date
    difference: Difference = field(default_factory=Difference)  # planned changes
    skipped: list[Skipped] = field(default_factory=list)
    incomplete: list[Incomplete] = field(default_factory=list)

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
    """Bring the store up to date with the documents at and below the paths. Each chunk is durable before it is
    reported.

    An interrupted run can be repeated; its stored chunks are then `unchanged`. Raises UsageError if `confirm` returns
    False, and for settings that do not fit the model.

    collection: in any codec.
    store: None for a dry run.
    paths: documents below them that no longer exist are removed from the store.
    confirm: called before documents are computed again because their settings changed.
    """
    start, report = time.perf_counter(), PrecomputeReport()

    def skip(document: Skipped) -> None:
        report.skipped.append(document)
        on_event(PrecomputeEvent("skipped", message=f"{document.typed}: {document.reason}", skipped=document))

    def leave_out(file: DocumentFile, why: NoDocument) -> None:
        named = file.path in (str(Path(name)) for name in paths.named)
        skip(Skipped(file.source, why.reason, file.path, unread=True, group=why.group, named=named))

    progress = _Reading(on_event)
    trust = not (options.force or options.verify_files)
    stored = stored_documents(store, trust=trust) if store is not None else {}
    if store is not None and not options.dry_run and rename_documents(store, stored):
        stored = stored_documents(store, trust=trust)
    diff = diff_corpus(collection, store, paths, skip, progress.found, stored)
    report.incomplete = [_incomplete(diff, file) for file in diff.documents if file.omissions]
    if report.incomplete:
        on_event(PrecomputeEvent("omitted", incomplete=report.incomplete))
    quota = options.max_bytes if options.max_bytes is not None else store.max_bytes if store is not None else 0
    cluster = options.cluster
    if cluster is not None:
        quota = 0  # this store gets only texts
    settle = quota <= 0 and not options.list_unchanged
    planner = Planner(diff, store, progress.cut, leave_out, with_records=quota > 0, settle=settle)
    plan = planner.plan(options.given)
    if cluster is not None and any(part.settings.context == "neighbours" for part in plan):
        raise UsageError(
            "--collector does not support --context neighbours: the left context of a chunk depends on all other documents",
            "use --context document or sink, or leave out --collector",
        )
    room = room_for(plan, store, quota)
    if room.without_kv:
        on_event(PrecomputeEvent("room", room=room))
    report.documents = sum(len(part.documents) + part.settled.num_documents for part in plan)
    report.tokens = sum(part.settled.num_tokens + sum(size.num_tokens for size in part.sizes) for part in plan)
    report.hidden = sorted(diff.left_behind)
    report.difference = compare(store, diff, plan, room, force=options.force)
    report.bytes = sum(
        a.bytes for a in (report.difference.new, report.difference.replaced, report.difference.unchanged)
    )
    if options.dry_run or store is None:
        report.difference.seconds = estimate_seconds(report.difference.missing)
        return report
    start += _confirm(report.difference, confirm)
    if cluster is None and report.difference.computed_tokens >= _LONG_PACKS * pack_tokens(
        collection.model.decoder.device
    ):
        report.difference.seconds = report.difference.seconds or estimate_seconds(report.difference.missing)
    on_event(PrecomputeEvent("plan", total=report.tokens, planned=report.difference))
    run = _Run(planner, store, room, on_event, report, options)
    known = diff.source_settings.paths  # these are remembered without documents too: their links lead nowhere now
    roots = [root for root in diff.given_roots(options.given) if plan or root.path in known]
    diff.source_settings.remember(store, roots, options.given, done=False)
    for part in plan:
        run.store(part)
    run.remove_gone()
    run.remove_outdated()
    diff.source_settings.remember(store, roots, options.given, done=True)
    report.seconds = time.perf_counter() - start
    return report


def _incomplete(diff: CorpusDiff, file: DocumentFile) -> Incomplete:
    stored = (version.omissions for version in diff.versions(file.source) if version.content_digest == file.digest)
    return Incomplete(shown(file.source), file.omissions, is_news=file.omissions not in stored)


def _confirm(difference: Difference, confirm: Confirm | None) -> float:
    """Ask for confirmation if settings changed. Return the seconds that the user took."""
    start = time.perf_counter()
    if confirm is not None and difference.changes:
        difference.seconds = estimate_seconds(difference.missing)
        if not confirm(difference):
            raise UsageError("nothing was computed", "without the flag, documents are cut and collected as before")
    return time.perf_counter() - start


class _Reading:
    """Reports how much is found and read. The share never decreases, whatever the order of the documents."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event, self._shown = on_event, lru_cache(16)(shown)
        self._places = dict[str, tuple[int, int]]()  # document -> bytes of the documents before it, and its own
        self._total = self._done = 0

    def found(self, file: DocumentFile) -> None:
        size = max(1, 0 if file.state is None else file.state.size)
        self._places[file.source] = self._total, size
        self._total += size
        self._tell(file.source, len(self._places), 0)

    def cut(self, document: Document, done: int) -> None:
        """done: characters of the document that are cut."""
        before, size = self._places[document.source]
        self._done = max(self._done, before + size * done // len(document.text))
        self._tell(document.source, self._done, self._total)

    def _tell(self, source: str, done: int, total: int) -> None:
        self._on_event(PrecomputeEvent("reading", message=self._shown(source), done=done, total=total))


class _Run:
    """Executes a plan. room: chunks that should have KV."""

    def __init__(
        self,
        planner: Planner,
        store: ChunkStore,
        room: Room,
        on_event: OnEvent,
        report: PrecomputeReport,
        options: PrecomputeOptions,
    ) -> None:
        self._diff, self._planner, self._store, self._room = planner.diff, planner, store, room
        self._keep = room.keep or frozenset()  # chunks that the store must not evict
        self._on_event, self._report, self._cluster, self._force = on_event, report, options.cluster, options.force
        self._shown = lru_cache(16)(shown)  # called for each chunk
        self._omissions = {file.source: file.omissions for file in planner.diff.documents if file.omissions}
        self._summaries = SummaryWriter(store)

    def store(self, part: Part) -> None:
        """Store the part's documents that changed or lack KV, in batches."""
        cluster = self._cluster
        if part.settled.num_documents:
            self._report.unchanged += part.settled.num_chunks
            self._on_event(PrecomputeEvent("settled", done=part.settled.num_tokens))
        collector = (
            Collector(part.collection, self._store, self._keep, with_prefix=part.collection.prefix_key in self._room)
            if cluster is None
            else cluster.collector(part.collection, self._store)
        )
        collector.begin()
        batch, tokens = list[tuple[DocumentFile, list[PlannedChunk]]](), 0
        most = _BATCH_TOKENS * (1 if cluster is None else cluster.workers)
        for planned in part.documents:
            complete = all(size.has_kv or size.key not in self._room for size in planned.sizes)
            if planned.is_current and complete and not self._force:
                for index, size in enumerate(planned.sizes):
                    self._tell(part, size.key, planned.file.source, index, size.num_tokens, "unchanged")
                if not self._is_noted(part, planned.file):
                    sizes = ((size.key, size.num_tokens) for size in planned.sizes)
                    self._summaries.add(document_summary(part.collection, planned.file, part.settings, sizes))
            elif (chunks := self._planner.cut_again(part, planned)) is not None:
                batch.append((planned.file, chunks))
                tokens += sum(size.num_tokens for size in planned.sizes)
            if tokens >= most:
                self._store_batch(part, collector, batch)
                batch, tokens = [], 0
        if batch:
            self._store_batch(part, collector, batch)
        self._summaries.flush()

    def _is_noted(self, part: Part, file: DocumentFile) -> bool:
        """Return whether the store has a summary of a document's current version, with its current file state."""
        record = self._diff.stored.get(document_key(part.collection.id, file.source, part.settings.context))
        return record is not None and record.tokens is not None and record.file == file.state

    def remove_gone(self) -> None:
        """Remove documents that no longer exist, in every context and codec.

        Moved documents keep their records, renamed.
        """
        gone, names = self._diff.gone, self._diff.names
        self._report.removed += len(self._store.put_documents(renamed(self._store, gone.values(), names), gone))
        for source, digest in dict.fromkeys((r.source, r.content_digest) for r in gone.values()):
            self._report.gone += 1
            what = f"is {shown(names[digest])} now" if digest in names else "is gone: its chunks were removed"
            self._on_event(PrecomputeEvent("removed", message=f"{shown(source)} {what}"))

    def remove_outdated(self) -> None:
        """Remove records of changed documents in other contexts and codecs, and records with an earlier date."""
        diff, store = self._diff, self._store
        now = (store.get_document(*record.place) for record in filter(diff.is_outdated, diff.stored.values()))
        outdated = [record for record in now if record is not None and diff.is_outdated(record)]
        self._report.removed += len(store.put_documents((), [record.key for record in outdated]))
        for record in outdated:
            if record.collection not in diff.earlier:
                what = f"its chunks of context {record.context} in {diff.codecs[record.collection]} were removed"
                self._on_event(PrecomputeEvent("removed", message=f"{shown(record.source)} has changed: {what}"))

    def _store_batch(
        self, part: Part, collector: Collector, batch: Sequence[tuple[DocumentFile, list[PlannedChunk]]]
    ) -> None:
        """Store records and texts of documents first, then missing KV.

        Searches and citations then use the current version at once, and an interrupted run leaves no chunk without a
        document.
        """
        store, report = self._store, self._report
        places = [chunk for _, chunks in batch for chunk in chunks]
        wanted: dict[bytes, PlannedChunk] = {}
        for chunk in places:
            wanted.setdefault(chunk.key, chunk)
        records = [document_record(part.collection, file, chunks, part.settings) for file, chunks in batch]
        with store.read() as reader:
            stored = {key: m.has_kv for key in sorted(wanted) if (m := reader.undamaged(key)) is not None}
            news = [record for record in records if is_news(record, reader.document(record.key))]
        missing = {key for key in wanted if key in self._room and (self._force or not stored.get(key))}
        if not self._force:
            missing -= collector.present([wanted[key] for key in missing])
        replaced = {f.source: self._diff.replaced(f.source, part.collection, part.settings.context) for f, _ in batch}
        before = {name: {key for record in old for key in record.chunk_keys} for name, old in replaced.items()}
        texts = [chunk_manifest(part.collection, wanted[key]) for key in sorted(wanted) if key not in stored]
        report.removed += len(store.put_documents(news, (), texts, self._keep))

        def tell(chunk: PlannedChunk, status: ChunkStatus, *, worked: bool = False) -> None:
            if status == "new" and before[chunk.source] and chunk.key not in before[chunk.source]:
                status = "replaced"
            num_tokens = len(chunk.chunk.token_ids)
            self._tell(part, chunk.key, chunk.source, chunk.chunk.index, num_tokens, status, num_tokens * worked)

        for chunk in places:
            if chunk.key not in missing:
                tell(chunk, "unchanged" if chunk.key in stored else "new")
        for key, status, how in collector.store(
            [chunk for key, chunk in wanted.items() if key in missing], again=self._force
        ):
            tell(wanted[key], status, worked=True)
            num_tokens = len(wanted[key].chunk.token_ids)
            if how == "computed":
                report.computed_tokens += num_tokens
            elif how == "converted":
                report.converted.add(num_tokens, part.collection.stored_bytes(num_tokens))
            else:
                report.taken += 1
        for chunk in places:
            if chunk.key in missing and chunk is not wanted[chunk.key]:  # the same text in a second place
                tell(chunk, "unchanged")
        for file, chunks in batch:
            pairs = ((chunk.key, len(chunk.chunk.token_ids)) for chunk in chunks)
            self._summaries.add(document_summary(part.collection, file, part.settings, pairs))
        self._summaries.flush()

    def _tell(
        self, part: Part, key: bytes, source: str, index: int, tokens: int, status: ChunkStatus, done: int = 0
    ) -> None:
        """Count and report a chunk. done: tokens that were worked on."""
        setattr(self._report, status, getattr(self._report, status) + 1)
        num_bytes = part.collection.stored_bytes(tokens) if key in self._room else 0
        omissions = self._omissions.get(source, ()) if index == 0 else ()
        result = ChunkResult(key.hex(), self._shown(source), index, tokens, num_bytes, status, omissions)
        self._on_event(PrecomputeEvent("chunk", result, done=done))
