"""What a precompute is about to do: the documents' chunks with their keys, and how that differs from what is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from cacheblend_store import Amount, ChunkStore, DocumentRecord

from cacheblend_cli.collect.collector import PlannedChunk
from cacheblend_cli.collect.corpus_diff import CorpusDiff
from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.corpus.contexts import CONTEXTS, Ids, Neighbours, Passage, document_contexts
from cacheblend_cli.corpus.cutting import Cut, cut_document
from cacheblend_cli.corpus.documents import Document
from cacheblend_cli.prompt.collection import Collection

Planned = list[tuple[Document, list[PlannedChunk]]]
"""Documents in order, with their chunks."""


@dataclass(frozen=True)
class Part:
    """The documents of a run that are cut and collected in one way."""

    collection: Collection
    settings: CollectSettings
    planned: Planned

    @property
    def chunks(self) -> list[PlannedChunk]:
        return [chunk for _, chunks in self.planned for chunk in chunks]


@dataclass
class Difference:
    """What a run changes in the store. new, replaced: what it computes, of documents the store does not have so and of
    those it has. removed: what goes. changes: (as a document is stored, as it is to be stored), both as flags ->
    documents that are computed again, for it alone or among others. missing: what is to be computed, by collection. seconds: that this takes, where it was measured."""

    new: Amount = field(default_factory=Amount)
    replaced: Amount = field(default_factory=Amount)
    unchanged: Amount = field(default_factory=Amount)
    removed: Amount = field(default_factory=Amount)
    changes: Counter[tuple[str, str]] = field(default_factory=Counter)
    missing: list[tuple[Collection, list[PlannedChunk]]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def computed_tokens(self) -> int:
        return sum(len(planned.chunk.token_ids) for _, chunks in self.missing for planned in chunks)


def plan_documents(
    collection: Collection,
    documents: Sequence[tuple[Document, Sequence[Chunk]]],
    settings: CollectSettings,
    others: Iterable[Passage] = (),
) -> Planned:
    """The documents' chunks with their keys and left contexts. others: passages of other documents, for `neighbours`."""
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


def plan_parts(
    store: ChunkStore | None, survey: CorpusDiff, given: Mapping[str, Any], on_cut: Callable[[Document, int], None]
) -> list[Part]:
    """The documents that are cut and collected in one way together, in order. given: settings that were asked for; the
    others are those a document had. on_cut: told how many characters of a document are cut."""
    encode, head = survey.collection.model.tokenizer.encode_text, survey.collection.template.wording.head
    cuts: dict[CollectSettings, list[tuple[Document, list[Chunk]]]] = {}
    for document in survey.documents:
        settings = replace(survey.settings_of(document.source, document.root), **given)
        chunks: list[Chunk] = []
        for chunk in cut_document(document, encode, Cut(settings.chunk_tokens, settings.overlap, head)):
            chunks.append(chunk)
            on_cut(document, chunk.end)
        cuts.setdefault(settings, []).append((document, chunks))
    parts = []
    for settings, own in cuts.items():
        collection = survey.collection.in_codec(settings.kv_dtype)
        collection.check_chunk_tokens(settings.chunk_tokens)
        others: list[Passage] = []
        if settings.context == "neighbours":
            others += (Passage(c.text, c.token_ids) for cut_so in cuts.values() for _, cs in cut_so for c in cs)
            others += stored_passages(collection, store, survey.kept.keys() | {r.source for r in survey.gone.values()})
        parts.append(Part(collection, settings, plan_documents(collection, own, settings, others)))
    return parts


def compare(
    store: ChunkStore | None, survey: CorpusDiff, parts: Sequence[Part], keep: Set[bytes], *, force: bool = False
) -> Difference:
    """What storing the parts changes. keep: keys of the chunks that are to have KV. force: all of these are computed."""
    found, planned = Difference(), set[bytes]()
    stored_so = set() if store is None or force else _stored(store, parts, keep)
    for part in parts:
        missing: list[PlannedChunk] = []
        for document, chunks in part.planned:
            versions = survey.versions(document.source)
            own = survey.replaced(document.source, part.collection, part.settings.context)
            before = len(missing)
            for chunk in chunks:
                if chunk.key not in planned:
                    planned.add(chunk.key)
                    there = chunk.key in stored_so
                    amount = found.unchanged if there else found.replaced if own else found.new
                    tokens = len(chunk.chunk.token_ids)
                    amount.add(tokens, part.collection.stored_bytes(tokens) if chunk.key in keep else 0)
                    missing += [] if there or chunk.key not in keep else [chunk]
            if len(missing) > before and versions and not force:
                latest = max(own or versions, key=lambda r: r.updated)
                found.changes.update(_changes(latest, survey, part))
            elif len(missing) > before and document.source in survey.worded and not force:
                stored = survey.worded[document.source]
                found.changes.update(stored.differences(part.collection.template.wording))
        found.missing.append((part.collection, missing))
    if store is not None:
        _count_removed(found, store, _leaving(survey, parts), planned)
    return found


def _stored(store: ChunkStore, parts: Sequence[Part], keep: Set[bytes]) -> set[bytes]:
    """Keys of the parts' chunks that are there as they are to be. In one read: each begins by looking through the pages."""
    keys = {chunk.key for part in parts for chunk in part.chunks}
    with store.read() as reader:
        return {k for k in keys if (reader.has_kv(k) if k in keep else reader.undamaged(k) is not None)}


def _changes(record: DocumentRecord, survey: CorpusDiff, part: Part) -> list[tuple[str, str]]:
    """In which settings a document's part differs from how it is stored: the flag as stored, and as now."""
    was: dict[str, Any] = {
        "overlap": 0,
        "head": "",
        **record.settings,
        "context": record.context,
        "kv_dtype": survey.codecs[record.collection],
    }
    now: dict[str, Any] = {
        "overlap": 0,
        "head": part.collection.template.wording.head,
        **part.settings.of_record(),
        "context": part.settings.context,
        "kv_dtype": part.collection.codec,
    }
    if record.collection in survey.earlier:
        was["date"], now["date"] = survey.earlier[record.collection], part.collection.day
    flags = {name: f"--{name.replace('_', '-')}" for name in now} | {"head": "--prompt's {source}"}
    differing = [name for name, value in now.items() if name in was and was[name] != value]
    return [(f"{flags[name]} {_told(was[name])}", f"{flags[name]} {_told(now[name])}") for name in differing]


def _told(value: Any) -> Any:
    """As a flag's value is written; a prompt's line without its end."""
    return repr(value.strip()) if isinstance(value, str) and (not value or " " in value or "{" in value) else value


def _leaving(survey: CorpusDiff, parts: Sequence[Part]) -> dict[bytes, DocumentRecord]:
    """The records that are replaced or removed, by their keys in the store."""
    places = {(p.collection.id, d.source, p.settings.context) for p in parts for d, _ in p.planned}
    ending = {record.place for record in survey.gone.values()}

    def leaves(record: DocumentRecord) -> bool:
        if record.place in ending:  # what has turned up under another name stays, unless that is stored anew there
            name = survey.names.get(record.content_digest)
            return name is None or (record.collection, name, record.context) in places
        return record.place in places or survey.is_outdated(record)

    return {key: record for key, record in (survey.stored | survey.gone).items() if leaves(record)}


def _count_removed(
    found: Difference, store: ChunkStore, leaving: Mapping[bytes, DocumentRecord], planned: Set[bytes]
) -> None:
    with store.read() as reader:
        for key in {c.key for record in leaving.values() for c in record.chunks} - planned:
            manifest = reader.undamaged(key)
            if manifest is not None and all(document in leaving for document in reader.documents_of(key)):
                found.removed.add(manifest.num_tokens, manifest.num_bytes)


def stored_passages(collection: Collection, store: ChunkStore | None, but: Set[str]) -> Iterator[Passage]:
    """What `neighbours` may take from the store: the collection's documents but those of these names, each in one
    context. A run's own documents are taken from the run, so that the same run again finds the same neighbours."""
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
