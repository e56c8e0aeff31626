"""Execute the plan of a precompute run: store records, texts and KV, and remove what is gone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from cacheblend_store import ChunkStore, DocumentRecord, DocumentSummary
from cacheblend_store.format.records import document_key

from cacheblend_cli.collect.collect_lock import collecting
from cacheblend_cli.collect.collector import ChunkStatus, Cluster, Collector, PlannedChunk, chunk_manifest, planned_of
from cacheblend_cli.collect.document_records import document_record, document_summary, is_news, renamed
from cacheblend_cli.collect.events import ChunkResult, OnEvent, PrecomputeEvent, PrecomputeReport
from cacheblend_cli.collect.plan import Part, PlannedDocument, Planner, keeps_state
from cacheblend_cli.collect.room import Room
from cacheblend_cli.collect.speed import CollectSpeed
from cacheblend_cli.collect.summaries import ChunkSize, PrefillRows
from cacheblend_cli.collect.warm_collector import WarmCollector, WarmEngine
from cacheblend_cli.corpus.documents import DocumentFile
from cacheblend_cli.corpus.places import shown
from cacheblend_cli.prompt.records import keep_record

# Tokens of documents whose records and texts are committed together: a commit of a few chunks rewrites as many pages as
# a commit of many.
_BATCH_TOKENS = 1 << 18
_SUMMARIES = 1 << 10  # summaries per transaction


@dataclass
class _Batch:
    """Documents of a part whose records are committed together."""

    part: Part
    documents: list[PlannedDocument] = field(default_factory=list)
    tokens: int = 0
    # Chunks to report once they have KV. Value: their status if another process stored it.
    pending: dict[bytes, ChunkStatus] = field(default_factory=dict)

    @property
    def places(self) -> Iterator[_Place]:
        return (_Place(d, i, size) for d in self.documents for i, size in enumerate(d.sizes))

    def lacks_kv(self, document: PlannedDocument) -> bool:
        return any(size.key in self.pending for size in document.sizes)


class _Place(NamedTuple):
    """A chunk of a document. A text that documents share has several places."""

    document: PlannedDocument
    position: int
    size: ChunkSize


class PlanStorage:
    """Executes a plan: `store_texts` of all parts, then `store_kv`. room: chunks that should have KV."""

    def __init__(
        self,
        planner: Planner,
        store: ChunkStore,
        room: Room,
        on_event: OnEvent,
        report: PrecomputeReport,
        *,
        cluster: Cluster | None,
        warm: WarmEngine | None,
        force: bool,
        texts_only: bool,
    ) -> None:
        self._diff, self._planner, self._store, self._room = planner.diff, planner, store, room
        self._keep = room.keep or frozenset()  # chunks that the store must not evict
        self._on_event, self._report = on_event, report
        self._cluster, self._warm, self._force, self._texts_only = cluster, warm, force, texts_only
        self._shown = lru_cache(16)(shown)  # called for each chunk
        self._omissions = {file.source: file.omissions for file in planner.diff.documents if file.omissions}
        self._summaries = list[DocumentSummary]()  # not yet stored
        self._batches = list[tuple[Part, list[_Batch]]]()  # without KV so far
        self._rows = PrefillRows()

    def store_texts(self, part: Part) -> None:
        """Store records and texts of the part's documents that changed, in batches.

        Searches and citations then use the current version, and an interrupted run leaves no chunk without a document.
        """
        keep_record(self._store, part.collection)
        if part.settled.num_documents:
            for count in ("chunks", "unchanged", "with_kv"):
                setattr(self._report, count, getattr(self._report, count) + part.settled.num_chunks)
            self._on_event(PrecomputeEvent("settled", done=part.settled.num_tokens))
        batches, batch = list[_Batch](), _Batch(part)
        most = _BATCH_TOKENS * (1 if self._cluster is None else self._cluster.workers)
        for planned in part.documents:
            is_complete = all(size.has_kv or size.key not in self._room for size in planned.sizes)
            if planned.is_current and is_complete and not self._force:
                self._keep_document(part, planned)
                continue
            batch.documents.append(planned)
            batch.tokens += sum(size.num_tokens for size in planned.sizes)
            if batch.tokens >= most:
                batches.append(batch)
                self._put_texts(batch)
                batch = _Batch(part)
        batches.append(batch)
        self._put_texts(batch)
        self._put_summaries()
        self._batches.append((part, [batch for batch in batches if batch.pending]))

    def store_kv(self, speed: CollectSpeed) -> None:
        """Compute and store the KV of all chunks that `store_texts` left without."""
        lacks_kv = any(batches for _, batches in self._batches)
        try:
            with collecting(self._store) if lacks_kv else nullcontext():
                speed.begin(self._report.difference.num_rows)
                for part, batches in self._batches:
                    collector = self._collector(part)
                    collector.begin()
                    for batch in batches:
                        self._store_kv(collector, batch, speed)
        except KeyboardInterrupt:
            self._count_kv()
            raise
        finally:
            speed.keep()

    def _collector(self, part: Part) -> Collector:
        if self._cluster is not None:
            return self._cluster.collector(part.collection, self._store)
        if self._warm is not None and not part.collection.model.spec.recurrent:
            return WarmCollector(part.collection, self._store, self._warm)
        with_prefix = part.collection.prefix_key in self._room
        return Collector(part.collection, self._store, self._keep, with_prefix=with_prefix, only_known=True)

    def _keep_document(self, part: Part, planned: PlannedDocument) -> None:
        """Report the chunks of a document that needs no work, and store its summary if it has none."""
        for place in _Batch(part, [planned]).places:
            self._report.chunks += 1
            self._tell(part, place, "unchanged", has_kv=place.size.key in self._room)
        if not self._is_noted(part, planned.file):
            self._add_summary(part, planned)

    def _add_summary(self, part: Part, planned: PlannedDocument) -> None:
        sizes = ((size.key, size.num_tokens) for size in planned.sizes)
        self._summaries.append(document_summary(part.collection, planned.file, part.settings, sizes))
        if len(self._summaries) >= _SUMMARIES:
            self._put_summaries()

    def _put_summaries(self) -> None:
        """Store the summaries so far. The store keeps only those of documents whose chunks all have KV."""
        self._store.put_summaries(self._summaries)
        self._summaries = []

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
            what = "is gone: its chunks were removed"
            if (name := names.get(digest)) is not None:
                was_copy = any(record.content_digest == digest for record in self._diff.versions(name))
                what = f"is gone; {shown(name)} has the same text" if was_copy else f"is {shown(name)} now"
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

    def _put_texts(self, batch: _Batch) -> None:
        """Store records of the documents that changed and texts of new chunks, and report chunks whose KV is not to be
        stored."""
        part, wanted, records = batch.part, dict[bytes, PlannedChunk](), list[DocumentRecord]()
        planned_documents, batch.documents = batch.documents, []
        for planned in planned_documents:
            if self._force or not planned.is_current:  # otherwise its record and texts are stored
                if (chunks := self._planner.cut_again(part, planned)) is None:
                    continue
                records.append(document_record(part.collection, planned.file, chunks, part.settings))
                for chunk in chunks:
                    wanted.setdefault(chunk.key, chunk)
            batch.documents.append(planned)
        keys = {place.size.key for place in batch.places}
        with self._store.read() as reader:
            with_kv = {key: m.has_kv for key in sorted(keys) if (m := reader.undamaged(key)) is not None}
            news = [record for record in records if is_news(record, reader.document(record.key))]
        texts = [chunk_manifest(part.collection, wanted[key]) for key in sorted(wanted.keys() - with_kv.keys())]
        self._report.removed += len(self._store.put_documents(news, (), texts, self._keep))
        statuses: dict[bytes, ChunkStatus] = {key: "unchanged" if key in with_kv else "new" for key in keys}
        in_room = {key for key in keys if key in self._room}
        if not self._texts_only:
            batch.pending = {k: statuses[k] for k in in_room if self._force or not with_kv.get(k)}
        before = self._keys_before(batch)
        for place in batch.places:
            self._report.chunks += 1
            if (key := place.size.key) not in batch.pending:
                self._tell(part, place, statuses[key], before, has_kv=key in in_room and bool(with_kv.get(key)))
        for planned in batch.documents:
            if not batch.lacks_kv(planned):
                self._add_summary(part, planned)

    def _store_kv(self, collector: Collector, batch: _Batch, speed: CollectSpeed) -> None:
        """Store the KV of a batch. Chunks that got KV meanwhile, from a question or another process, are reported."""
        part, before, places = batch.part, self._keys_before(batch), dict[bytes, list[_Place]]()
        documents = list(filter(batch.lacks_kv, batch.documents))
        for place in batch.places:
            if place.size.key in batch.pending:
                places.setdefault(place.size.key, []).append(place)
        for collected in collector.store(self._missing(collector, batch), again=self._force):
            if batch.pending.pop(collected.key, None) is None:
                continue  # a chunk that a recurrent model computes for the ones after it
            first, *others = places[collected.key]
            if collected.how == "computed":
                self._report.computed_tokens += first.size.num_tokens
            else:
                self._report.taken += 1
            speed.count(self._rows.add(first.size), is_computed=collected.how == "computed")
            progress = first.size.num_tokens, speed.left_s
            self._tell(part, first, collected.status, before, has_kv=True, progress=progress)
            if speed.corrects():
                self._on_event(PrecomputeEvent("speed", left_s=speed.left_s))
            for place in others:  # the same text in other places
                self._tell(part, place, "unchanged", before, has_kv=True)
        with self._store.read() as reader:  # a chunk that was removed meanwhile has none
            with_kv = {key for key in batch.pending if (m := reader.undamaged(key)) is not None and m.has_kv}
        for key in list(batch.pending):
            status, (first, *others) = batch.pending.pop(key), places[key]
            has_kv = self._cluster is not None or key in with_kv
            speed.count(self._rows.add(first.size), is_computed=False)
            self._tell(part, first, status, before, has_kv=has_kv, progress=(first.size.num_tokens, speed.left_s))
            for place in others:
                self._tell(part, place, status, before, has_kv=has_kv)
        for planned in documents:
            self._add_summary(part, planned)
        self._put_summaries()

    def _missing(self, collector: Collector, batch: _Batch) -> list[PlannedChunk]:
        """Return the chunks to compute, in order, from their records in the store."""
        with self._store.read() as reader:
            found = ((key, reader.undamaged(key)) for key in sorted(batch.pending))
            missing = {key for key, m in found if m is not None and (self._force or not m.has_kv)}
            if batch.part.collection.model.spec.recurrent:  # a document is computed in order, from its beginning
                some = (d for d in batch.documents if any(size.key in missing for size in d.sizes))
                missing = {size.key for d in some for size in d.sizes if size.key in self._room}
            every, chunks = batch.part.settings.state_every, list[PlannedChunk]()
            for document, position, size in batch.places:
                if size.key in missing and (manifest := reader.undamaged(size.key)) is not None:
                    missing.discard(size.key)
                    keeps = keeps_state(position, document.sizes, every)
                    chunks.append(replace(planned_of(manifest), source=document.file.source, keeps_state=keeps))
        present = collector.present(chunks)
        return [chunk for chunk in chunks if chunk.key not in present]

    def _count_kv(self) -> None:
        """Count chunks that got KV from a question or another process and are not reported."""
        with self._store.read() as reader:
            for batch in (batch for _, batches in self._batches for batch in batches):
                keys = [place.size.key for place in batch.places if place.size.key in batch.pending]
                self._report.with_kv += sum((m := reader.undamaged(key)) is not None and m.has_kv for key in keys)

    def _keys_before(self, batch: _Batch) -> dict[str, set[bytes]]:
        """Return the chunks that each document had in the part's codec and context before this run."""
        found, context = dict[str, set[bytes]](), batch.part.settings.context
        for document in batch.documents:
            records = self._diff.replaced(document.file.source, batch.part.collection, context)
            found[document.file.source] = {key for record in records for key in record.chunk_keys}
        return found

    def _tell(
        self,
        part: Part,
        place: _Place,
        status: ChunkStatus,
        before: Mapping[str, set[bytes]] = {},
        *,
        has_kv: bool,
        progress: tuple[int, float] = (0, 0.0),
    ) -> None:
        """Count and report a chunk. before: see `_keys_before`. progress: tokens that were worked on, and seconds left,
        see PrecomputeEvent."""
        report, source, size = self._report, place.document.file.source, place.size
        if status == "new" and (had := before.get(source)) and size.key not in had:
            status = "replaced"
        setattr(report, status, getattr(report, status) + 1)
        report.with_kv += has_kv
        num_bytes = part.stored_bytes(size.num_tokens) if has_kv else 0
        omissions = self._omissions.get(source, ()) if place.position == 0 else ()
        about = self._shown(source), place.position, size.num_tokens, num_bytes, status, omissions
        done, left_s = progress
        self._on_event(PrecomputeEvent("chunk", ChunkResult(size.key.hex(), *about), done=done, left_s=left_s))
