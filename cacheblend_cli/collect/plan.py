"""Plan a run: which documents changed, their chunks with keys and sizes, and what the store has of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from struct import Struct
from typing import Any, NamedTuple, TypeVar

from cacheblend_store import ChunkStore, DocumentRecord, StoreError
from cacheblend_store.format.keys import KEY_BYTES
from cacheblend_store.format.records import decode_manifest, document_key

from cacheblend_cli.collect.collector import PlannedChunk, record_bytes, record_bytes_with_kv
from cacheblend_cli.collect.corpus_diff import CorpusDiff
from cacheblend_cli.collect.document_records import is_current, record_settings
from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.collect.spool import Place, Spool
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.corpus.contexts import CONTEXTS, Ids, Neighbours, Passage, document_contexts
from cacheblend_cli.corpus.converters.converter import NoDocument
from cacheblend_cli.corpus.cutting import Cut, cut_document
from cacheblend_cli.corpus.documents import Document, DocumentFile
from cacheblend_cli.errors import TextRefused
from cacheblend_cli.prompt.collection import Collection

Planned = list[tuple[Document, list[PlannedChunk]]]
"""Documents in order, with their chunks."""
D = TypeVar("D", bound=Document | DocumentFile)
OnCut = Callable[[Document, int], None]
"""Called while a document is cut: the document, and the number of characters cut so far."""
_READ_CHUNKS = 1 << 14  # whose records are read together, in key order
_FEW_BYTES = 256  # a place in the spool takes no less
_SIZE = Struct(f"<{KEY_BYTES}sIIIb")
_HAS_KV = {None: -1, False: 0, True: 1}


class ChunkSize(NamedTuple):
    """A planned chunk without its text. left_len: tokens of its left context. record_bytes: size of its record with KV. has_kv: of
    the stored chunk, None if it is not stored or its record is damaged."""

    key: bytes
    num_tokens: int
    left_len: int
    record_bytes: int
    has_kv: bool | None = None


class ChunkSizes:
    """Sizes of a document's chunks, in order, in a spool or, where they are few or the disk is full, in memory."""

    __slots__ = ("_data", "_spool")

    def __init__(self, sizes: Iterable[ChunkSize], spool: Spool) -> None:
        data, self._spool = b"".join(_SIZE.pack(*size[:4], _HAS_KV[size.has_kv]) for size in sizes), spool
        place = spool.append_bytes(data) if len(data) > _FEW_BYTES else None
        self._data: bytes | Place = data if place is None else place

    def __iter__(self) -> Iterator[ChunkSize]:
        data = self._spool.read_bytes(self._data) if isinstance(self._data, Place) else self._data
        for key, num_tokens, left_len, num_bytes, has_kv in _SIZE.iter_unpack(data):
            yield ChunkSize(key, num_tokens, left_len, num_bytes, None if has_kv < 0 else has_kv > 0)


@dataclass(frozen=True, slots=True)
class PlannedDocument:
    """A document and the sizes of its chunks, in order.

    chunks: the chunks themselves if they depend on other documents. place: of its chunks in the planner's spool, if they are there.
    is_current: the store has the document as it is now, cut with the same settings.
    """

    file: DocumentFile
    sizes: ChunkSizes
    chunks: list[PlannedChunk] | None = None
    place: Place | None = None
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


class Planner:
    """Plans the documents of `diff`, a comparison. Documents that did not change since they were stored are not cut again."""

    def __init__(
        self,
        diff: CorpusDiff,
        store: ChunkStore | None,
        on_cut: OnCut,
        on_left_out: Callable[[DocumentFile, NoDocument], None],
        *,
        with_records: bool,
    ) -> None:
        """on_left_out: called for a document that changed since it was found, or that this model cannot store. with_records:
        compute the sizes of records, which count in a quota; else they are 0."""
        self.diff, self._store, self._on_cut, self._on_left_out = diff, store, on_cut, on_left_out
        self._with_records, self._spool = with_records, Spool()

    def plan(self, given: Mapping[str, Any]) -> list[Part]:
        """Plan all documents. Returns the parts of the run, in order.

        given: settings that were asked for; others are as the store remembers them.
        """
        groups: dict[CollectSettings, list[DocumentFile]] = {}
        for file in self.diff.documents:
            settings = replace(self.diff.settings_of(file.source, file.root), **given)
            groups.setdefault(settings, []).append(file)
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
        """Return a planned document's chunks, or None if it is left out."""
        if planned.chunks is not None:
            return planned.chunks
        if planned.place is not None:
            found = self._spool.read(planned.place)
        elif (cut := self._cut(planned.file, part)) is not None:
            _, found = cut
        else:
            return None
        [(_, chunks)] = plan_documents(part.collection, [(planned.file, found)], part.settings)
        return chunks

    def _plan_each(self, part: Part, files: Sequence[DocumentFile]) -> Iterator[PlannedDocument]:
        """Plan documents whose chunks do not depend on other documents, some at a time."""
        collection, settings = part.collection, part.settings
        now, context, id = record_settings(collection, settings), settings.context, collection.id
        current = dict[str, list[bytes]]()
        waiting, count = list[DocumentFile](), 0
        for file in files:
            record = self.diff.stored.get(document_key(id, file.source, context))
            if record is not None and is_current(record, file.digest, now):
                current[file.source] = record.chunk_keys
                count += len(current[file.source])
            waiting.append(file)
            if count >= _READ_CHUNKS or file is files[-1]:
                stored = stored_sizes(self._store, collection, (key for keys in current.values() for key in keys))
                for one in waiting:
                    known = [stored.get(key) for key in current.get(one.source, ())]
                    whole = [size for size in known if size is not None]
                    if one.source in current and len(whole) == len(known):
                        yield PlannedDocument(one, ChunkSizes(whole, self._spool), is_current=True)
                    elif (found := self._cut(one, part, self._on_cut)) is not None:
                        [(_, chunks)] = plan_documents(collection, [found], settings)
                        yield PlannedDocument(one, self._sizes(part, chunks), place=self._spool.append(found[1]))
                current, waiting, count = {}, [], 0

    def _plan_together(self, parts: Sequence[tuple[Part, Sequence[DocumentFile]]]) -> None:
        """Plan documents of which some have `neighbours` among all of them: every one is cut and held in memory."""
        diff = self.diff
        cuts = [
            (part, [(file, found) for file in files if (found := self._cut(file, part, self._on_cut)) is not None])
            for part, files in parts
        ]
        passages = [Passage(c.text, c.token_ids) for _, own in cuts for _, (_, chunks) in own for c in chunks]
        for part, own in cuts:
            others = list[Passage]()
            if part.settings.context == "neighbours":
                sources = diff.digests.keys() | {r.source for r in diff.gone.values()}
                others = [*passages, *stored_passages(part.collection, self._store, sources)]
            planned = plan_documents(part.collection, [found for _, found in own], part.settings, others)
            part.documents.extend(
                PlannedDocument(file, self._sizes(part, chunks), chunks)
                for (file, _), (_, chunks) in zip(own, planned, strict=True)
            )

    def _sizes(self, part: Part, chunks: Sequence[PlannedChunk]) -> ChunkSizes:
        collection = part.collection
        stored = stored_sizes(self._store, collection, (chunk.key for chunk in chunks))
        sizes = [
            ChunkSize(
                c.key,
                len(c.chunk.token_ids),
                len(c.left),
                record_bytes(collection, c) if self._with_records else 0,
                stored[c.key].has_kv if c.key in stored else None,
            )
            for c in chunks
        ]
        return ChunkSizes(sizes, self._spool)

    def _cut(self, file: DocumentFile, part: Part, on_cut: OnCut | None = None) -> tuple[Document, list[Chunk]] | None:
        """Read and cut a document. None if it has changed since it was found, or if the model cannot store it: what is stored of
        it stays."""
        of, settings = part.collection, part.settings
        cut = Cut(settings.chunk_tokens, settings.overlap, of.template.wording.head)
        chunks: list[Chunk] = []
        try:
            document = file.read(self.diff.conversions)
            for chunk in cut_document(document, of.model.tokenizer.encode_text, cut):
                chunks.append(chunk)
                if on_cut is not None:
                    on_cut(document, chunk.end)
        except TextRefused as error:
            self._leave_out(file, NoDocument(error.message, "with text that this model cannot store"))
        except NoDocument as error:
            self._leave_out(file, error)
        else:
            return document, chunks
        return None

    def _leave_out(self, file: DocumentFile, why: NoDocument) -> None:
        self._on_left_out(file, why)
        self.diff.digests[file.source] = ""


def stored_sizes(store: ChunkStore | None, collection: Collection, keys: Iterable[bytes]) -> dict[bytes, ChunkSize]:
    """Return the sizes of the stored chunks among these whose records are undamaged, by key."""
    found = dict[bytes, ChunkSize]()
    if store is None:
        return found
    with store.read() as reader:
        for key in sorted(set(keys)):  # in the order in which they are stored
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
    documents: Sequence[tuple[D, Sequence[Chunk]]],
    settings: CollectSettings,
    others: Iterable[Passage] = (),
) -> list[tuple[D, list[PlannedChunk]]]:
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
