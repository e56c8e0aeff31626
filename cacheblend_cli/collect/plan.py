"""Plan a run: find the documents that changed, cut them into chunks with keys and sizes, and look these up in the
store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import repeat
from typing import Any

import msgspec
from cacheblend_documents.converted import NotConverted
from cacheblend_store import ChunkStore, DocumentRecord, StoreError, StoreReader
from cacheblend_store.conversion import decoder
from cacheblend_store.format.keys import unpack_ids
from cacheblend_store.format.records import decode_manifest, document_key, encode_document

from cacheblend_cli.collect.collector import PlannedChunk, record_bytes, record_bytes_with_kv
from cacheblend_cli.collect.corpus_diff import CorpusDiff
from cacheblend_cli.collect.document_records import StoredDocument, document_record, is_current, record_settings
from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.collect.summaries import ChunkSize, Settled
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.corpus.contexts import Ids, Neighbours, Passage, document_contexts
from cacheblend_cli.corpus.cut_process import cutter_of
from cacheblend_cli.corpus.cutting import CutSettings
from cacheblend_cli.corpus.documents import Document, DocumentFile
from cacheblend_cli.corpus.search import CONTEXTS
from cacheblend_cli.errors import TextRefused
from cacheblend_cli.prompt.collection import Collection

OnCut = Callable[[Document, int], None]
"""Called while a document is cut: the document, and the number of characters cut so far."""
_LONG_TIME = 1e9 + 1 / 3  # a time with as many digits as a record can have
KEPT_BYTES = 256 << 20
"""Bytes of chunks, about 8 a token, that a run keeps until they are stored. Further documents are cut twice."""
_encode, _decode = msgspec.msgpack.Encoder().encode, decoder(list[Chunk]).decode


@dataclass(frozen=True, slots=True)
class PlannedDocument:
    """A document and the sizes of its chunks."""

    file: DocumentFile
    sizes: Sequence[ChunkSize]  # in order
    cut: bytes = b""  # the chunks, encoded, if they are kept
    chunks: list[PlannedChunk] | None = None  # with left contexts, if these depend on other documents
    is_current: bool = False  # the store has the current version of the document, cut with the same settings
    record_bytes: int = 0  # size of the document's record, 0 if the planner computes no sizes of records


@dataclass(frozen=True)
class Part:
    """Documents of a run that are cut and collected with the same settings."""

    collection: Collection
    settings: CollectSettings
    documents: list[PlannedDocument]
    settled: Settled = field(default_factory=Settled)  # further documents that need no work

    @property
    def sizes(self) -> Iterator[ChunkSize]:
        for document in self.documents:
            yield from document.sizes

    def stored_bytes(self, num_tokens: int) -> int:
        """Return the blob bytes of a chunk; of a hybrid's state, the mean over the chunks of a long document."""
        return self.collection.stored_bytes(num_tokens, self.settings.state_every)


class Planner:
    """Plans the documents of a CorpusDiff. Documents that have not changed since they were stored are not cut again."""

    def __init__(
        self,
        diff: CorpusDiff,
        store: ChunkStore | None,
        on_cut: OnCut,
        on_left_out: Callable[[DocumentFile, NotConverted], None],
        *,
        with_records: bool,
        settle: bool = False,
    ) -> None:
        """on_left_out: called for a document that has changed since it was found, or that this model cannot store.
        with_records: compute the sizes of records, which count towards a quota; otherwise they are 0.
        settle: only count documents that need no work. Has no effect with `with_records`.
        """
        self.diff, self._store, self._on_cut, self._on_left_out = diff, store, on_cut, on_left_out
        self._with_records, self._settle, self._kept_bytes = with_records, settle, 0

    def plan(self, given: Mapping[str, Any]) -> list[Part]:
        """Plan all documents. Return the parts of the run, in order.

        given: settings from the command line; the others are remembered by the store.
        """
        groups: dict[CollectSettings, list[DocumentFile]] = {}
        # Cached, because thousands of documents share a few settings.
        settings_of = lru_cache(lambda remembered: replace(remembered, **given))
        for file in self.diff.documents:
            groups.setdefault(settings_of(self.diff.settings_of(file.source, file.root)), []).append(file)
        parts = [Part(self.diff.collection.in_codec(settings.kv_dtype), settings, []) for settings in groups]
        for part in parts:
            part.collection.check_chunk_tokens(part.settings.chunk_tokens)
        planned = list(zip(parts, groups.values(), strict=True))
        if any(part.settings.context == "neighbours" for part in parts):
            self._plan_together(planned)
        else:
            for part, files in planned:
                part.documents.extend(self._plan_each(part, files))
        return parts

    def cut_again(self, part: Part, planned: PlannedDocument) -> list[PlannedChunk] | None:
        """Return the chunks of a planned document, or None if it is left out."""
        if planned.chunks is not None:
            return planned.chunks
        found = _decode(planned.cut) if planned.cut else self._cut(planned.file, part)
        return None if found is None else planned_chunks(part.collection, planned.file.source, found, part.settings)

    def _plan_each(self, part: Part, files: Sequence[DocumentFile]) -> Iterator[PlannedDocument]:
        """Plan documents whose chunks do not depend on other documents."""
        now, id = record_settings(part.collection, part.settings), part.collection.id
        for file in files:
            record = self.diff.stored.get(document_key(id, file.source, part.settings.context))
            if record is None or not is_current(record, file, now):
                planned = self._plan_cut(part, file)
            elif record.tokens is None or self._with_records:
                planned = self._plan_read(part, file, record) or self._plan_cut(part, file)
            elif self._settle and record.file == file.state:
                part.settled.add(record.keys, record.tokens)
                continue
            else:
                pairs = zip(record.chunk_keys, unpack_ids(record.tokens), strict=True)
                sizes = [ChunkSize(key, count, 0, 0, has_kv=True) for key, count in pairs]
                planned = PlannedDocument(file, sizes, is_current=True)
            if planned is not None:
                yield planned

    def _plan_read(self, part: Part, file: DocumentFile, record: StoredDocument) -> PlannedDocument | None:
        """Plan a document by the records of its chunks. Return None if the store does not have all of them."""
        assert self._store is not None
        with self._store.read() as reader:
            stored = stored_sizes(reader, part.collection, record.chunk_keys)
            num_bytes = len(reader.get("documents", record.key) or b"") if self._with_records else 0
        if not stored.keys() >= set(record.chunk_keys):
            return None
        sizes = [stored[key] for key in record.chunk_keys]
        return PlannedDocument(file, sizes, is_current=True, record_bytes=num_bytes)

    def _plan_cut(self, part: Part, file: DocumentFile) -> PlannedDocument | None:
        """Cut and plan a document."""
        if (found := self._cut(file, part, self._on_cut)) is None:
            return None
        chunks = planned_chunks(part.collection, file.source, found, part.settings)
        if self._kept_bytes + len(kept := _encode(found)) > KEPT_BYTES:
            kept = b""
        self._kept_bytes += len(kept)
        return replace(self._planned(part, file, chunks), chunks=None, cut=kept)

    def _planned(self, part: Part, file: DocumentFile, chunks: list[PlannedChunk]) -> PlannedDocument:
        sizes = [self._size(part.collection, chunk) for chunk in chunks]
        with nullcontext() if self._store is None else self._store.read() as reader:
            stored = stored_sizes(reader, part.collection, (size.key for size in sizes))
        sizes = [size._replace(has_kv=stored[size.key].has_kv) if size.key in stored else size for size in sizes]
        num_bytes = 0
        if self._with_records:
            record = document_record(part.collection, file, chunks, part.settings)
            num_bytes = len(encode_document(replace(record, updated=_LONG_TIME)))
        return PlannedDocument(file, sizes, chunks=chunks, record_bytes=num_bytes)

    def _plan_together(self, parts: Sequence[tuple[Part, Sequence[DocumentFile]]]) -> None:
        """Plan documents if some use context `neighbours`.

        All documents are cut and held in memory, because any passage can be a neighbour.
        """
        diff = self.diff
        cuts = [
            (part, [(file, found) for file in files if (found := self._cut(file, part, self._on_cut)) is not None])
            for part, files in parts
        ]
        passages = [Passage(c.text, c.token_ids) for _, own in cuts for _, chunks in own for c in chunks]
        for part, own in cuts:
            others = list[Passage]()
            if part.settings.context == "neighbours":
                sources = diff.digests.keys() | {r.source for r in diff.gone.values()}
                others = [*passages, *stored_passages(part.collection, self._store, sources)]
            named = [(file.source, chunks) for file, chunks in own]
            planned = plan_documents(part.collection, named, part.settings, others)
            part.documents.extend(
                self._planned(part, file, chunks) for (file, _), chunks in zip(own, planned, strict=True)
            )

    def _size(self, collection: Collection, chunk: PlannedChunk) -> ChunkSize:
        num_bytes = record_bytes(collection, chunk) if self._with_records else 0
        return ChunkSize(chunk.key, len(chunk.chunk.token_ids), len(chunk.left), num_bytes, None)

    def _cut(self, file: DocumentFile, part: Part, on_cut: OnCut | None = None) -> list[Chunk] | None:
        """Read and cut a document.

        Return None if it has changed since it was found, or the model cannot store it: the stored version then stays.
        """
        of, settings, chunks = part.collection, part.settings, list[Chunk]()
        cut = CutSettings(settings.chunk_tokens, settings.overlap, of.template.wording.head)
        with self._leaving_out(file):
            document = file.read(self.diff.given.conversions)
            for chunk in cutter_of(of.model.tokenizer).cut(document, cut):
                chunks.append(chunk)
                if on_cut is not None:
                    on_cut(document, chunk.end)
            return chunks
        return None

    @contextmanager
    def _leaving_out(self, file: DocumentFile) -> Iterator[None]:
        """Leave a document out that cannot be read or cut."""
        try:
            yield
        except (NotConverted, TextRefused) as error:
            if isinstance(error, TextRefused):
                error = NotConverted(error.message, "with text that this model cannot store")
            self._on_left_out(file, error)
            self.diff.digests[file.source] = ""


def stored_sizes(reader: StoreReader | None, collection: Collection, keys: Iterable[bytes]) -> dict[bytes, ChunkSize]:
    """Return the sizes of stored chunks by key. Missing chunks and damaged records are left out."""
    found = dict[bytes, ChunkSize]()
    if reader is None:
        return found
    for key in sorted(set(keys)):  # in storage order
        try:
            value = reader.get("chunks", key)
            manifest = None if value is None else decode_manifest(key, value)
        except StoreError:
            continue
        if value is not None and manifest is not None:
            num_bytes = record_bytes_with_kv(collection, manifest, len(value))
            left_len = len(manifest.left_context_ids)
            found[key] = ChunkSize(key, manifest.num_tokens, left_len, num_bytes, manifest.has_kv)
    return found


def plan_documents(
    collection: Collection,
    documents: Sequence[tuple[str, Sequence[Chunk]]],
    settings: CollectSettings,
    others: Iterable[Passage] = (),
) -> list[list[PlannedChunk]]:
    """Return the chunks of each document, with keys and left contexts.

    documents: name and chunks of each. others: passages of other documents, for `neighbours`.
    """
    near: Neighbours | None = None
    if settings.context == "neighbours":
        own = (Passage(c.text, c.token_ids) for _, chunks in documents for c in chunks)
        near = Neighbours((*own, *others), settings.neighbours, collection.window(settings.window))
    return [planned_chunks(collection, source, chunks, settings, near) for source, chunks in documents]


def planned_chunks(
    collection: Collection,
    source: str,
    chunks: Sequence[Chunk],
    settings: CollectSettings,
    near: Neighbours | None = None,
) -> list[PlannedChunk]:
    """Return the chunks of one document with their keys and left contexts. near: for `neighbours`."""
    contexts: Iterable[Ids] = repeat((), len(chunks))
    if near is not None:
        contexts = (near.left(chunk.token_ids) for chunk in chunks)
    elif settings.context == "document":
        contexts = document_contexts((chunk.token_ids for chunk in chunks), collection.window(settings.window))
    return [
        PlannedChunk(
            collection.key(chunk.token_ids, left),
            source,
            chunk,
            left,
            settings.context,
            keeps_state=keeps_state(index, chunks, settings.state_every),
        )
        for index, (chunk, left) in enumerate(zip(chunks, contexts, strict=True))
    ]


def keeps_state(index: int, chunks: Sequence[object], state_every: int) -> bool:
    """Return whether a hybrid's state after the chunk at this index of a document is stored."""
    return index + 1 == len(chunks) or (index + 1) % state_every == 0


def stored_passages(collection: Collection, store: ChunkStore | None, but: Set[str]) -> Iterator[Passage]:
    """Yield passages of the collection's stored documents for `neighbours`, each document in one context.

    but: names of documents to leave out. They include the run's own documents, so that repeating the run gives the same
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
