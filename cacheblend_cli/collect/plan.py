"""Plan a run: which documents changed, their chunks with keys and sizes, and what the store has of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cacheblend_store import ChunkStore, DocumentRecord, StoreError
from cacheblend_store.format.records import decode_manifest, document_key

from cacheblend_cli.collect.collector import PlannedChunk, record_bytes, record_bytes_with_kv
from cacheblend_cli.collect.corpus_diff import CorpusDiff
from cacheblend_cli.collect.document_records import is_current, record_settings
from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.corpus.contexts import CONTEXTS, Ids, Neighbours, Passage, document_contexts
from cacheblend_cli.corpus.converters.converter import NoDocument
from cacheblend_cli.corpus.cutting import Cut, cut_document
from cacheblend_cli.corpus.documents import Document, DocumentFile
from cacheblend_cli.prompt.collection import Collection

Planned = list[tuple[Document, list[PlannedChunk]]]
"""Documents in order, with their chunks."""
OnCut = Callable[[Document, int], None]
"""Called while a document is cut: the document, and the number of characters cut so far."""
_HELD_TOKENS = 1 << 20  # of chunks that stay in memory from planning to storing; other documents are cut again


class ChunkSize(NamedTuple):
    """A planned chunk without its text. left_len: tokens of its left context. record_bytes: size of its record with KV."""

    key: bytes
    num_tokens: int
    left_len: int
    record_bytes: int


@dataclass(frozen=True)
class PlannedDocument:
    """A document and the sizes of its chunks, in order.

    chunks: the chunks themselves, where they are held in memory. is_current: the store has the document as it is now, cut with
    the same settings.
    """

    file: DocumentFile
    sizes: list[ChunkSize]
    chunks: list[PlannedChunk] | None = None
    is_current: bool = False


@dataclass(frozen=True)
class Part:
    """Documents of a run that are cut and collected with the same settings."""

    collection: Collection
    settings: CollectSettings
    documents: list[PlannedDocument]

    @property
    def sizes(self) -> Iterator[ChunkSize]:
        for document in self.documents:
            yield from document.sizes

    def stored_bytes(self, size: ChunkSize) -> int:
        """Return the bytes of a chunk's blobs."""
        return self.collection.stored_bytes(size.num_tokens)


@dataclass
class StoredChunks:
    """Planned chunks that are stored with an undamaged record. has_kv: by key. sizes: of those that were asked for."""

    store: ChunkStore | None
    has_kv: dict[bytes, bool] = field(default_factory=dict)
    sizes: dict[bytes, ChunkSize] = field(default_factory=dict)

    def read(self, keys: Iterable[bytes], collection: Collection, *, sizes: bool = False) -> None:
        """Read the records of these chunks, in the order in which they are stored."""
        if self.store is None:
            return
        with self.store.read() as reader:
            for key in sorted(set(keys)):
                try:
                    value = reader.get("chunks", key)
                    manifest = None if value is None else decode_manifest(key, value)
                except StoreError:
                    continue
                if value is None or manifest is None:
                    continue
                self.has_kv[key] = manifest.has_kv
                if sizes:
                    num_bytes = record_bytes_with_kv(collection, manifest, len(value))
                    self.sizes[key] = ChunkSize(key, manifest.num_tokens, len(manifest.left_context_ids), num_bytes)


@dataclass(frozen=True)
class Plan:
    """Parts of a run, in order, and what the store has of their chunks."""

    parts: list[Part]
    stored: StoredChunks


class Planner:
    """Plans the documents of a comparison. Documents that did not change since they were stored are not cut again."""

    def __init__(self, diff: CorpusDiff, on_cut: OnCut, on_changed: Callable[[DocumentFile, str], None]) -> None:
        """on_changed: called for a document that does not read any more, or changed since it was found, with the reason."""
        self._diff, self._on_cut, self._on_changed = diff, on_cut, on_changed
        self._held = 0

    def plan(self, store: ChunkStore | None, given: Mapping[str, Any], *, with_records: bool) -> Plan:
        """Plan all documents. given: settings that were asked for; others are as the store remembers them.

        with_records: compute the sizes of records, which count in a quota; else they are 0.
        """
        groups: dict[CollectSettings, list[DocumentFile]] = {}
        for file in self._diff.documents:
            settings = replace(self._diff.settings_of(file.source, file.root), **given)
            groups.setdefault(settings, []).append(file)
        stored, parts = StoredChunks(store), list[Part]()
        collections = {settings: self._diff.collection.in_codec(settings.kv_dtype) for settings in groups}
        for settings, collection in collections.items():
            collection.check_chunk_tokens(settings.chunk_tokens)
        if any(settings.context == "neighbours" for settings in groups):
            parts = self._plan_together(store, groups, collections, with_records=with_records)
            for part in parts:
                stored.read((size.key for size in part.sizes), part.collection)
            return Plan(parts, stored)
        for settings, files in groups.items():
            collection = collections[settings]
            parts.append(Part(collection, settings, self._plan_each(files, collection, settings, stored, with_records)))
        return Plan(parts, stored)

    def cut_again(self, part: Part, planned: PlannedDocument) -> list[PlannedChunk] | None:
        """Return a planned document's chunks, or None if it has changed since it was found."""
        if planned.chunks is not None:
            return planned.chunks
        found = self._cut(planned.file, part.collection, part.settings)
        return None if found is None else plan_documents(part.collection, [found], part.settings)[0][1]

    def _plan_each(
        self,
        files: Sequence[DocumentFile],
        collection: Collection,
        settings: CollectSettings,
        stored: StoredChunks,
        with_records: bool,
    ) -> list[PlannedDocument]:
        """Plan documents whose chunks do not depend on other documents."""
        now, context, id = record_settings(collection, settings), settings.context, collection.id
        records = {file.source: self._diff.stored.get(document_key(id, file.source, context)) for file in files}
        current = {
            file.source: record
            for file in files
            if (record := records[file.source]) is not None and is_current(record, file.digest, now)
        }
        stored.read((c.key for record in current.values() for c in record.chunks), collection, sizes=True)
        documents, new = list[PlannedDocument](), list[bytes]()
        for file in files:
            record = current.get(file.source)
            if record is not None and all(c.key in stored.sizes for c in record.chunks):
                documents.append(PlannedDocument(file, [stored.sizes[c.key] for c in record.chunks], is_current=True))
            elif (found := self._cut(file, collection, settings, self._on_cut)) is not None:
                [(_, chunks)] = plan_documents(collection, [found], settings)
                documents.append(self._planned(file, chunks, collection, with_records))
                new += (chunk.key for chunk in chunks)
        stored.read(new, collection)
        return documents

    def _plan_together(
        self,
        store: ChunkStore | None,
        groups: Mapping[CollectSettings, Sequence[DocumentFile]],
        collections: Mapping[CollectSettings, Collection],
        *,
        with_records: bool,
    ) -> list[Part]:
        """Plan documents of which some have `neighbours` among all of them: every one is cut and held in memory."""
        diff, parts = self._diff, list[Part]()
        cuts = {
            settings: [
                (file, found)
                for file in files
                if (found := self._cut(file, collections[settings], settings, self._on_cut)) is not None
            ]
            for settings, files in groups.items()
        }
        passages = [Passage(c.text, c.token_ids) for own in cuts.values() for _, (_, chunks) in own for c in chunks]
        for settings, own in cuts.items():
            collection, others = collections[settings], list[Passage]()
            if settings.context == "neighbours":
                sources = diff.digests.keys() | {r.source for r in diff.gone.values()}
                others = [*passages, *stored_passages(collection, store, sources)]
            planned = plan_documents(collection, [found for _, found in own], settings, others)
            self._held = -sum(len(c.chunk.token_ids) for _, chunks in planned for c in chunks)  # all stay in memory
            documents = [
                self._planned(file, chunks, collection, with_records)
                for (file, _), (_, chunks) in zip(own, planned, strict=True)
            ]
            parts.append(Part(collection, settings, documents))
        return parts

    def _planned(
        self, file: DocumentFile, chunks: list[PlannedChunk], collection: Collection, with_records: bool
    ) -> PlannedDocument:
        sizes = [
            ChunkSize(c.key, len(c.chunk.token_ids), len(c.left), record_bytes(collection, c) if with_records else 0)
            for c in chunks
        ]
        self._held += sum(size.num_tokens for size in sizes)
        return PlannedDocument(file, sizes, chunks if self._held <= _HELD_TOKENS else None)

    def _cut(
        self, file: DocumentFile, collection: Collection, settings: CollectSettings, on_cut: OnCut | None = None
    ) -> tuple[Document, list[Chunk]] | None:
        """Read and cut a document. None if it has changed since it was found: what is stored of it stays."""
        try:
            document = file.read(self._diff.conversions)
        except NoDocument as error:
            self._on_changed(file, error.reason)
            self._diff.digests[file.source] = ""
            return None
        encode, head = collection.model.tokenizer.encode_text, collection.template.wording.head
        chunks: list[Chunk] = []
        for chunk in cut_document(document, encode, Cut(settings.chunk_tokens, settings.overlap, head)):
            chunks.append(chunk)
            if on_cut is not None:
                on_cut(document, chunk.end)
        return document, chunks


def plan_documents(
    collection: Collection,
    documents: Sequence[tuple[Document, Sequence[Chunk]]],
    settings: CollectSettings,
    others: Iterable[Passage] = (),
) -> Planned:
    """Return the documents' chunks with keys and left contexts. others: passages of other documents, for `neighbours`."""
    window = collection.window(settings.window)
    near: Neighbours | None = None
    if settings.context == "neighbours":
        own = (Passage(c.text, c.token_ids) for _, chunks in documents for c in chunks)
        near = Neighbours((*own, *others), settings.neighbours, window)
    out = []
    for document, chunks in documents:
        lefts: list[Ids] = [()] * len(chunks)
        if near is not None:
            lefts = [near.left(c.token_ids) for c in chunks]
        elif settings.context == "document":
            lefts = document_contexts([c.token_ids for c in chunks], window)
        planned = [
            PlannedChunk(collection.key(chunk.token_ids, left), document.source, chunk, left, settings.context)
            for chunk, left in zip(chunks, lefts, strict=True)
        ]
        out.append((document, planned))
    return out


def stored_passages(collection: Collection, store: ChunkStore | None, but: Set[str]) -> Iterator[Passage]:
    """Yield passages of the collection's stored documents for `neighbours`, each document in one context.

    but: names of documents to leave out. A run's own documents are among them, so that the same run again finds the same
    neighbours.
    """
    if store is None:
        return
    records: dict[str, DocumentRecord] = {}
    for record in store.documents(collection.id):
        if record.source not in but:
            known = records.setdefault(record.source, record)
            if CONTEXTS.index(record.context) > CONTEXTS.index(known.context):
                records[record.source] = record
    for record in records.values():
        for place in record.chunks:
            with store.read() as reader:
                manifest = reader.undamaged(place.key)
            if manifest is not None:
                yield Passage(manifest.text, manifest.token_ids)
