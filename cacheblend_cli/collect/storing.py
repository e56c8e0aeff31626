"""Execute the plan of a precompute run: store records, texts and KV, and remove what is gone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from cacheblend_store import ChunkStore, DocumentSummary
from cacheblend_store.format.records import document_key

from cacheblend_cli.collect.collector import Cluster, Collector, How, PlannedChunk, chunk_manifest
from cacheblend_cli.collect.document_records import document_record, document_summary, is_news, renamed
from cacheblend_cli.collect.events import ChunkResult, ChunkStatus, OnEvent, PrecomputeEvent, PrecomputeReport
from cacheblend_cli.collect.plan import Part, PlannedDocument, Planner
from cacheblend_cli.collect.room import Room
from cacheblend_cli.corpus.documents import DocumentFile
from cacheblend_cli.corpus.places import shown

# Tokens of documents whose records and texts are committed together: a commit of a few chunks rewrites as many pages as
# a commit of many.
_BATCH_TOKENS = 1 << 18
_SUMMARIES = 1 << 10  # summaries per transaction


@dataclass
class _Batch:
    """Documents of a part with their chunks, whose records are committed together."""

    part: Part
    documents: list[tuple[DocumentFile, list[PlannedChunk]]] = field(default_factory=list)
    tokens: int = 0

    @property
    def chunks(self) -> Iterator[PlannedChunk]:
        return (chunk for _, chunks in self.documents for chunk in chunks)

    @property
    def places(self) -> dict[bytes, list[PlannedChunk]]:
        """Each text once, by key, with all its places in the documents."""
        places = dict[bytes, list[PlannedChunk]]()
        for chunk in self.chunks:
            places.setdefault(chunk.key, []).append(chunk)
        return places


class PlanStorage:
    """Executes a plan. room: chunks that should have KV."""

    def __init__(
        self,
        planner: Planner,
        store: ChunkStore,
        room: Room,
        on_event: OnEvent,
        report: PrecomputeReport,
        *,
        cluster: Cluster | None,
        force: bool,
    ) -> None:
        self._diff, self._planner, self._store, self._room = planner.diff, planner, store, room
        self._keep = room.keep or frozenset()  # chunks that the store must not evict
        self._on_event, self._report, self._cluster, self._force = on_event, report, cluster, force
        self._shown = lru_cache(16)(shown)  # called for each chunk
        self._omissions = {file.source: file.omissions for file in planner.diff.documents if file.omissions}
        self._summaries = list[DocumentSummary]()  # not yet stored

    def store(self, part: Part) -> None:
        """Store the part's documents that changed or lack KV, in batches."""
        if part.settled.num_documents:
            self._report.unchanged += part.settled.num_chunks
            self._on_event(PrecomputeEvent("settled", done=part.settled.num_tokens))
        collector, most = self._collector(part)
        collector.begin()
        batch = _Batch(part)
        for planned in part.documents:
            is_complete = all(size.has_kv or size.key not in self._room for size in planned.sizes)
            if planned.is_current and is_complete and not self._force:
                self._keep_document(part, planned)
            elif (chunks := self._planner.cut_again(part, planned)) is not None:
                batch.documents.append((planned.file, chunks))
                batch.tokens += sum(size.num_tokens for size in planned.sizes)
            if batch.tokens >= most:
                self._store_batch(collector, batch)
                batch = _Batch(part)
        if batch.documents:
            self._store_batch(collector, batch)
        self._put_summaries()

    def _collector(self, part: Part) -> tuple[Collector, int]:
        """Return the part's collector, and the tokens of a batch for it."""
        if self._cluster is not None:
            return self._cluster.collector(part.collection, self._store), _BATCH_TOKENS * self._cluster.workers
        with_prefix = part.collection.prefix_key in self._room
        return Collector(part.collection, self._store, self._keep, with_prefix=with_prefix), _BATCH_TOKENS

    def _keep_document(self, part: Part, planned: PlannedDocument) -> None:
        """Report the chunks of a document that needs no work, and store its summary if it has none."""
        for index, size in enumerate(planned.sizes):
            self._tell(part, size.key, planned.file.source, index, size.num_tokens, "unchanged")
        if not self._is_noted(part, planned.file):
            self._add_summary(part, planned.file, ((size.key, size.num_tokens) for size in planned.sizes))

    def _add_summary(self, part: Part, file: DocumentFile, sizes: Iterable[tuple[bytes, int]]) -> None:
        self._summaries.append(document_summary(part.collection, file, part.settings, sizes))
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

    def _store_batch(self, collector: Collector, batch: _Batch) -> None:
        """Store records and texts of documents first, then missing KV.

        Searches and citations then use the current version at once, and an interrupted run leaves no chunk without a
        document.
        """
        part, places = batch.part, batch.places
        wanted = {key: first for key, (first, *_) in places.items()}
        with_kv = self._put_records(batch, wanted)
        missing = self._missing(collector, wanted, with_kv)
        before = {file.source: self._keys_before(part, file.source) for file, _ in batch.documents}
        for chunk in batch.chunks:
            if chunk.key not in missing:
                self._tell_of(part, chunk, "unchanged" if chunk.key in with_kv else "new", before)
        to_store = [chunk for key, chunk in wanted.items() if key in missing]
        for collected in collector.store(to_store, again=self._force):
            first, *others = places[collected.key]
            self._count_work(collected.how, len(first.chunk.token_ids))
            self._tell_of(part, first, collected.status, before, done=len(first.chunk.token_ids))
            for chunk in others:  # the same text in other places
                self._tell_of(part, chunk, "unchanged", before)
        for file, chunks in batch.documents:
            self._add_summary(part, file, ((chunk.key, len(chunk.chunk.token_ids)) for chunk in chunks))
        self._put_summaries()

    def _put_records(self, batch: _Batch, wanted: Mapping[bytes, PlannedChunk]) -> dict[bytes, bool]:
        """Store records of the documents that changed, and texts of new chunks. Return whether each chunk that was
        stored before has KV, by key."""
        part = batch.part
        records = [document_record(part.collection, file, chunks, part.settings) for file, chunks in batch.documents]
        with self._store.read() as reader:
            with_kv = {key: m.has_kv for key in sorted(wanted) if (m := reader.undamaged(key)) is not None}
            news = [record for record in records if is_news(record, reader.document(record.key))]
        texts = [chunk_manifest(part.collection, wanted[key]) for key in sorted(wanted.keys() - with_kv.keys())]
        self._report.removed += len(self._store.put_documents(news, (), texts, self._keep))
        return with_kv

    def _missing(
        self, collector: Collector, wanted: Mapping[bytes, PlannedChunk], with_kv: Mapping[bytes, bool]
    ) -> set[bytes]:
        """Return the keys of chunks whose KV is to be stored."""
        if self._force:
            return {key for key in wanted if key in self._room}
        missing = {key for key in wanted if key in self._room and not with_kv.get(key)}
        if collector.collection.model.spec.recurrent:  # a document's chunks are computed in order, from its beginning
            sources = {wanted[key].source for key in missing}
            missing = {key for key in wanted if key in self._room and wanted[key].source in sources}
        return missing - collector.present([wanted[key] for key in missing])

    def _keys_before(self, part: Part, source: str) -> set[bytes]:
        """Return the chunks that a document had in the part's codec and context before this run."""
        records = self._diff.replaced(source, part.collection, part.settings.context)
        return {key for record in records for key in record.chunk_keys}

    def _count_work(self, how: How, num_tokens: int) -> None:
        if how == "computed":
            self._report.computed_tokens += num_tokens
        else:
            self._report.taken += 1

    def _tell_of(
        self, part: Part, chunk: PlannedChunk, status: ChunkStatus, before: Mapping[str, set[bytes]], done: int = 0
    ) -> None:
        """Count and report a chunk. before: the chunks that its document had, by its name."""
        if status == "new" and before[chunk.source] and chunk.key not in before[chunk.source]:
            status = "replaced"
        self._tell(part, chunk.key, chunk.source, chunk.chunk.index, len(chunk.chunk.token_ids), status, done)

    def _tell(
        self, part: Part, key: bytes, source: str, index: int, tokens: int, status: ChunkStatus, done: int = 0
    ) -> None:
        """Count and report a chunk. done: tokens that were worked on."""
        setattr(self._report, status, getattr(self._report, status) + 1)
        num_bytes = part.stored_bytes(tokens) if key in self._room else 0
        omissions = self._omissions.get(source, ()) if index == 0 else ()
        result = ChunkResult(key.hex(), self._shown(source), index, tokens, num_bytes, status, omissions)
        self._on_event(PrecomputeEvent("chunk", result, done=done))
