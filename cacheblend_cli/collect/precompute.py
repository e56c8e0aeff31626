"""precompute: documents -> chunks -> KV after the prefix -> codec -> store. Only changes are computed."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as Names
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

from cacheblend_documents.converted import NotConverted
from cacheblend_store import ChunkStore, StoreError

from cacheblend_cli.collect.collector import Cluster
from cacheblend_cli.collect.corpus_diff import CorpusDiff, Paths, diff_corpus
from cacheblend_cli.collect.difference import Difference, compare, estimate_seconds
from cacheblend_cli.collect.document_records import StoredDocument, rename_documents, stored_documents
from cacheblend_cli.collect.events import Incomplete, OnEvent, PrecomputeEvent, PrecomputeReport
from cacheblend_cli.collect.plan import Part, Planner
from cacheblend_cli.collect.room import room_for
from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.collect.speed import CollectSpeed
from cacheblend_cli.collect.storing import PlanStorage
from cacheblend_cli.collect.warm_collector import WarmEngine
from cacheblend_cli.corpus.documents import Document, DocumentFile, Skipped
from cacheblend_cli.corpus.places import shown
from cacheblend_cli.corpus.search import prepare
from cacheblend_cli.errors import CacheBlendError, UsageError
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.types import SearchParams

Confirm = Callable[[Difference], bool]
ConfirmRemoval = Callable[[str, int], bool]
"""Called with a folder of which every stored document is gone, and their number."""


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
    state_every: int | None = None
    force: bool = False  # compute stored chunks again
    verify_files: bool = False  # read every file and every record, even of documents that seem unchanged
    list_unchanged: bool = True  # report each unchanged chunk
    dry_run: bool = False  # change nothing
    salt: str = ""  # keeps the chunks of tenants apart
    max_bytes: int | None = None  # new quota of the store, bytes; None: unchanged
    day: date | None = None  # for a chat template that prints a date; None: the date that the store keeps, or today
    cluster: Cluster | None = None  # computes the KV; None: this process
    warm: WarmEngine | None = None  # computes the KV in a store without a quota, while it runs
    texts_only: bool = False  # store no KV
    search: SearchParams | None = None  # searches to prepare the index for
    machine: str = ""  # device and other settings by which the speed of earlier runs is remembered

    def __post_init__(self) -> None:
        CollectSettings(**self.given)

    @property
    def given(self) -> dict[str, Any]:
        """CollectSettings fields that are set, by name."""
        return {name: value for name in vars(CollectSettings()) if (value := getattr(self, name)) is not None}


def precompute(
    collection: Collection,
    store: ChunkStore | None,
    paths: Paths,
    options: PrecomputeOptions,
    on_event: OnEvent,
    confirm: Confirm | None = None,
    confirm_removal: ConfirmRemoval | None = None,
) -> PrecomputeReport:
    """Bring the store up to date with the documents at and below the paths: first the texts of all documents, which can
    be asked about then, and then KV. Each chunk is durable before it is reported.

    An interrupted run can be repeated; its stored chunks are then `unchanged`. Raises UsageError if `confirm` returns
    False, and for settings that do not fit the model.

    collection: in any codec.
    store: None for a dry run.
    paths: documents below them that no longer exist are removed from the store.
    confirm: called before documents are computed again because their settings changed.
    confirm_removal: called before all documents of a folder are removed; None to leave such folders as they are.
    """
    start, report, records = time.perf_counter(), PrecomputeReport(), _stored(store, options)
    reading = _Reading(paths, report, on_event, {record.source for record in records.values()})
    diff = diff_corpus(collection, store, paths, reading.skip, reading.found, records)
    for root, names in diff.emptied(records).items():
        if confirm_removal is None or not confirm_removal(root, len(names)):
            diff = diff.without(root, names)
            report.emptied.append(root)
            what = f"{shown(root)} has none of its {len(names)} stored documents any more: it is left as it is"
            on_event(PrecomputeEvent("kept", message=what))
    report.incomplete = [_incomplete(diff, file) for file in diff.documents if file.omissions]
    if report.incomplete:
        on_event(PrecomputeEvent("omitted", incomplete=report.incomplete))
    quota = _quota(store, options)
    settle = quota <= 0 and not options.list_unchanged
    planner = Planner(diff, store, reading.cut, reading.leave_out, with_records=quota > 0, settle=settle)
    plan = planner.plan(options.given)
    _check_cluster(options, plan)
    room = room_for(plan, store, quota)
    if room.without_kv:
        on_event(PrecomputeEvent("room", room=room))
    difference = compare(store, diff, plan, room, force=options.force)
    _count_planned(report, diff, plan, difference)
    speed = CollectSpeed(collection.model.fingerprint, options.machine)
    if rows_per_s := speed.rows_per_s:
        difference.seconds = difference.num_rows / rows_per_s
    if options.dry_run or store is None:
        _estimate(difference, on_event)
        return report
    start += _confirm(difference, confirm, on_event)
    on_event(PrecomputeEvent("plan", total=report.tokens, planned=difference))
    # an engine neither knows which KV to keep, nor computes documents in order
    warm = options.warm if quota <= 0 and not collection.model.spec.recurrent else None
    run = PlanStorage(
        planner,
        store,
        room,
        on_event,
        report,
        cluster=options.cluster,
        warm=warm,
        force=options.force,
        texts_only=options.texts_only,
    )
    if difference.computed_tokens:
        collection.model.check_headers()  # before texts are stored for a model that cannot compute their KV
    loads = difference.computed_tokens and not (options.texts_only or options.cluster or warm)
    if loads and (difference.replaced.chunks or difference.removed.chunks):
        start += _load(collection)  # a model that cannot be loaded replaces and removes nothing
    known = diff.source_settings.paths  # these are remembered without documents too: their links lead nowhere now
    roots = [root for root in diff.given_roots(options.given) if plan or root.path in known]
    roots = [root for root in roots if root.path not in report.emptied]
    diff.source_settings.remember(store, roots, options.given, done=False)
    for part in plan:
        run.store_texts(part)
    run.remove_gone()
    run.remove_outdated()
    diff.source_settings.remember(store, roots, options.given, done=True)
    if difference.computed_tokens:
        if options.search is not None:
            with suppress(CacheBlendError, StoreError, OSError, sqlite3.Error):  # which the first search reports
                prepare(store, options.search, [part.collection.id for part in plan])
        on_event(PrecomputeEvent("ready", planned=difference, report=report))
    if not options.texts_only:
        if loads:
            start += _load(collection)
        run.store_kv(speed)
    report.seconds = time.perf_counter() - start
    return report


def _stored(store: ChunkStore | None, options: PrecomputeOptions) -> dict[bytes, StoredDocument]:
    """Return the documents in the store, which a run that is not dry first renames to their current names."""
    trust = not (options.force or options.verify_files)
    stored = stored_documents(store, trust=trust) if store is not None else {}
    if store is not None and not options.dry_run and rename_documents(store, stored):
        stored = stored_documents(store, trust=trust)
    return stored


def _quota(store: ChunkStore | None, options: PrecomputeOptions) -> int:
    """Return the quota in bytes, 0 for none. With a cluster the store gets only texts."""
    if options.cluster is not None:
        return 0
    if options.max_bytes is not None:
        return options.max_bytes
    return 0 if store is None else store.max_bytes


def _check_cluster(options: PrecomputeOptions, plan: Sequence[Part]) -> None:
    if options.cluster is not None and any(part.settings.context == "neighbours" for part in plan):
        raise UsageError(
            "--collector does not support --context neighbours: the left context of a chunk depends on all other documents",
            "use --context document or sink, or leave out --collector",
        )


def _count_planned(report: PrecomputeReport, diff: CorpusDiff, plan: Sequence[Part], difference: Difference) -> None:
    report.documents = sum(len(part.documents) + part.settled.num_documents for part in plan)
    report.tokens = sum(part.settled.num_tokens + sum(size.num_tokens for size in part.sizes) for part in plan)
    report.hidden, report.difference = sorted(diff.left_behind), difference
    report.bytes = difference.new.bytes + difference.replaced.bytes + difference.unchanged.bytes


def _incomplete(diff: CorpusDiff, file: DocumentFile) -> Incomplete:
    stored = (version.omissions for version in diff.versions(file.source) if version.content_digest == file.digest)
    return Incomplete(shown(file.source), file.omissions, is_news=file.omissions not in stored)


def _load(collection: Collection) -> float:
    """Load the model. Return the seconds that it took, which the speed of the run leaves out."""
    start = time.perf_counter()
    _ = collection.decoder
    return time.perf_counter() - start


def _estimate(difference: Difference, on_event: OnEvent) -> None:
    """Measure the machine's speed, unless it is known from earlier runs."""
    if difference.computed_tokens and not difference.seconds:
        on_event(PrecomputeEvent("measure"))
        difference.seconds, difference.is_measured = estimate_seconds(difference.missing), True


def _confirm(difference: Difference, confirm: Confirm | None, on_event: OnEvent) -> float:
    """Ask for confirmation if settings changed. Return the seconds that the user took."""
    start = time.perf_counter()
    if confirm is not None and difference.changes:
        _estimate(difference, on_event)
        if not confirm(difference):
            raise UsageError("nothing was computed", "without the flag, documents are cut and collected as before")
    return time.perf_counter() - start


class _Reading:
    """Reports what is found, skipped and read. The share read never decreases, whatever the order of the documents."""

    def __init__(self, paths: Paths, report: PrecomputeReport, on_event: OnEvent, stored: Names[str]) -> None:
        """stored: names of the documents in the store."""
        self._named, self._stored = {str(Path(name)) for name in paths.named}, stored
        self._report, self._on_event, self._shown = report, on_event, lru_cache(16)(shown)
        self._places = dict[str, tuple[int, int]]()  # document -> bytes of the documents before it, and its own
        self._total = self._done = 0

    def skip(self, file: Skipped) -> None:
        if file.source in self._stored:
            file = replace(file, reason=f"{file.reason}; its stored version is kept", is_stored=True)
        self._report.skipped.append(file)
        self._on_event(PrecomputeEvent("skipped", message=f"{file.typed}: {file.reason}", skipped=file))

    def leave_out(self, file: DocumentFile, why: NotConverted) -> None:
        named = file.path in self._named
        self.skip(Skipped(file.source, why.reason, file.path, why.group, named))

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
