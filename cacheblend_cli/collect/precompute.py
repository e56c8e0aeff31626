"""precompute: documents -> chunks -> collect behind the prefix -> codec -> store. Does only what changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cacheblend_store import ChunkStore, DocumentRecord

from cacheblend_cli.collect.collector import Collector, PlannedChunk, collect_sequences
from cacheblend_cli.collect.document_records import document_record, is_news, rename_documents, renamed
from cacheblend_cli.collect.plan import Amount, Difference, Part, Planned, compare, manifest_or_none, plan_parts
from cacheblend_cli.collect.prefill import CollectSequence, Kept, collect, pack_tokens
from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.collect.survey import Survey, survey
from cacheblend_cli.corpus.documents import Document, Skipped
from cacheblend_cli.corpus.places import shown
from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.collection import Collection

__all__ = ["Amount", "Difference", "PrecomputeEvent", "PrecomputeOptions", "PrecomputeReport", "precompute"]

OnEvent = Callable[["PrecomputeEvent"], None]
Confirm = Callable[[Difference], bool]


@dataclass(frozen=True)
class PrecomputeOptions:
    """The first five as in CollectSettings; None is what the store remembers of the documents' root, and the default where
    it remembers nothing. force: compute what is stored, too."""

    chunk_tokens: int | None = None
    context: str | None = None
    window: int | None = None
    neighbours: int | None = None
    kv_dtype: str | None = None
    force: bool = False
    dry_run: bool = False
    salt: str = ""

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
    """kind: "plan" (totals are known), "chunk", "skipped", "removed". message is for people."""

    kind: Literal["plan", "chunk", "skipped", "removed"]
    chunk: ChunkResult | None = None
    message: str = ""
    tokens_total: int = 0


@dataclass
class PrecomputeReport:
    """gone: documents that are no more. removed: chunks that went. evicted: chunks of these documents that the quota had
    no room for. skipped: (path, reason). difference: what the run was to change, as it was found before it."""

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
    difference: Difference = field(default_factory=Difference)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def plan(self, parts: Sequence[Part], difference: Difference) -> None:
        """Note what is there before anything is done."""
        self.documents = sum(len(part.planned) for part in parts)
        self.tokens = sum(len(c.chunk.token_ids) for part in parts for c in part.chunks)
        sizes = {c.key: p.collection.stored_bytes(len(c.chunk.token_ids)) for p in parts for c in p.chunks}
        self.bytes = sum(sizes.values())
        self.difference = difference

    @property
    def tokens_per_s(self) -> float:
        return self.computed_tokens / self.seconds if self.seconds else 0.0


def precompute(
    collection: Collection,
    store: ChunkStore | None,
    documents: Iterable[Document | Skipped],
    options: PrecomputeOptions,
    on_event: OnEvent,
    paths: Sequence[str] = (),
    confirm: Confirm | None = None,
) -> PrecomputeReport:
    """Bring the store up to date with the documents. Each chunk is committed before it is reported.

    collection: of any codec. store None: a dry run. paths: the names of the paths that led to the documents: what is gone
    from disk below them is removed from the store. confirm: asked before documents are computed again because they are
    stored with other settings. Safe to interrupt and to run again: what is there is `unchanged`.

    Raises UsageError when it is not confirmed, and for settings that do not fit the model.
    """
    start, report = time.perf_counter(), PrecomputeReport()

    def skip(document: Skipped) -> None:
        report.skipped.append((document.typed, document.reason))
        on_event(PrecomputeEvent("skipped", message=f"{document.typed}: {document.reason}"))

    if store is not None and not options.dry_run:
        rename_documents(store)
    found = survey(collection, store, documents, paths, skip)
    parts = plan_parts(store, found, options.given)
    report.plan(parts, compare(store, found, parts, force=options.force))
    if options.dry_run or store is None:
        report.difference.seconds = _estimate(report.difference)
        return report
    start += _confirm(report.difference, confirm)
    on_event(PrecomputeEvent("plan", tokens_total=report.tokens))
    run = _Run(found, store, options, on_event, report)
    settings = {path: replace(found.settings_of(path, path), **options.given) for path in paths} if parts else {}
    found.roots.remember(store, settings, options.given, found.linked, done=False)
    for part in parts:
        run.store(part)
    run.remove_gone()
    run.remove_outdated()
    found.roots.remember(store, settings, options.given, found.linked, done=True)
    if store.max_bytes:
        report.evicted = sum(not store.has_kv(key) for key in {c.key for part in parts for c in part.chunks})
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
    """One precompute, once it is known what the documents' chunks are."""

    def __init__(
        self, found: Survey, store: ChunkStore, options: PrecomputeOptions, on_event: OnEvent, report: PrecomputeReport
    ) -> None:
        self._found, self._store, self._options = found, store, options
        self._on_event, self._report = on_event, report

    def store(self, part: Part) -> None:
        """Collect and commit what the store lacks, batch by batch, and each document's record behind its chunks."""
        collector = Collector(part.collection, self._store)
        collector.store_prefix()
        for batch in _batches(part.planned, 4 * pack_tokens(part.collection.model.decoder.device)):
            self._store_batch(part, collector, batch)

    def remove_gone(self) -> None:
        """Forget documents that are gone, in every context and codec. What they said stays where it has turned up under
        another name."""
        gone, names = self._found.gone, self._found.names
        self._report.removed += sum(map(len, self._store.put_documents(renamed(self._store, gone, names), gone)))
        for source, digest in dict.fromkeys((r.source, r.content_digest) for r in gone):
            self._report.gone += 1
            what = f"is {shown(names[digest])} now" if digest in names else "is gone: its chunks were removed"
            self._on_event(PrecomputeEvent("removed", message=f"{shown(source)} {what}"))

    def remove_outdated(self) -> None:
        """A document's chunks in other contexts and codecs say what it said then. When it says something else now, they
        go."""
        for old in self._found.stored.values():
            digest = self._found.kept.get(old.source)
            now = self._store.get_document(old.collection, old.source, old.context) if digest else None
            if now is not None and now.content_digest != digest:
                [removed] = self._store.put_documents((), [now])
                self._report.removed += len(removed)
                what = f"its chunks of context {old.context} in {self._found.codecs[old.collection]} were removed"
                self._on_event(PrecomputeEvent("removed", message=f"{shown(old.source)} has changed: {what}"))

    def _store_batch(self, part: Part, collector: Collector, batch: Planned) -> None:
        collection, store, options, report = part.collection, self._store, self._options, self._report
        wanted = {p.key: p for _, chunks in batch for p in chunks}
        with store.read() as reader:
            present = {key: m for key in wanted if (m := manifest_or_none(reader, key)) is not None and m.has_kv}
        missing = [p for key, p in wanted.items() if options.force or key not in present]
        results: dict[bytes, ChunkResult] = {}
        own = part.settings.context
        replaced_sources = {d.source for d, _ in batch if store.get_document(collection.id, d.source, own) is not None}
        for key, status, size in collector.store(missing):
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
                    size = collection.stored_bytes(len(planned.chunk.token_ids))
                    result = _result(planned, size, "unchanged")
                    self._on_event(PrecomputeEvent("chunk", result))
                setattr(report, result.status, getattr(report, result.status) + 1)
            records.append(document_record(collection, document, chunks, part.settings))
        report.removed += sum(map(len, store.put_documents([r for r in records if is_news(store, r)])))


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


def _result(planned: PlannedChunk, size: int, status: str) -> ChunkResult:
    chunk = planned.chunk
    return ChunkResult(planned.key.hex(), shown(planned.source), chunk.index, len(chunk.token_ids), size, status)  # type: ignore[arg-type]
