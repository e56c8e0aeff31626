"""What lives as long as a question: its chunks as this model sees them, how they are blended, what is to be said of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property

from cacheblend_store import BadBlob, ChunkManifest, ChunkStore
from cacheblend_store.format.codecs import is_lossless

from cacheblend_cli.collect.collector import PlannedChunk
from cacheblend_cli.corpus.citations import Citations
from cacheblend_cli.corpus.places import shown
from cacheblend_cli.engine.config import BlendConfig
from cacheblend_cli.engine.model_notes import model_notes
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.dates import age_note
from cacheblend_cli.prompt.plan import ChunkInput, PromptPlan, plan_prompt
from cacheblend_cli.prompt.wording import Wording
from cacheblend_cli.types import SamplingParams


@dataclass(frozen=True)
class Question:
    """A question over the stored chunks with these keys, in this order. notes: messages about them for people. history: earlier
    messages, of user and model in turn. wording: of the prompt, None for the engine's. day: date that the template prints, None
    for the one that the store keeps (see `Runtime.day`). given: chunks that came with the question and that the store may
    lack; `keys` names them too. ranks: place of each searched chunk in the search's list, from 1."""

    text: str
    keys: Sequence[bytes]
    blend: BlendConfig = field(default_factory=BlendConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    salt: str = ""
    notes: tuple[str, ...] = ()
    history: tuple[str, ...] = ()
    wording: Wording | None = None
    day: date | None = None
    given: tuple[PlannedChunk, ...] = ()
    ranks: Mapping[bytes, int] = field(default_factory=dict)

    def dated(self, runtime: Runtime, store: ChunkStore | None) -> Question:
        """The question with its date resolved, so that all of its preparation reads the same template."""
        return self if self.day is not None else replace(self, day=runtime.day(store, self.salt))


@dataclass(frozen=True)
class Request:
    """A question over resolved chunks. It can be run under several settings (`replace(request, blend=...)`).

    store: where the chunks' KV is, None to compute everything. named, given, ranks: as in the question. prefix_cached:
    the store has the prefix's KV. lossless: what is stored is what this run would compute. notes: messages for people,
    shared by all that is made of this request. started: perf_counter when the question was known.
    """

    collection: Collection
    store: ChunkStore | None
    suffix_ids: tuple[int, ...]
    chunks: tuple[ChunkInput, ...]
    named: tuple[bytes, ...] = ()
    given: tuple[PlannedChunk, ...] = ()
    ranks: Mapping[bytes, int] = field(default_factory=dict)
    blend: BlendConfig = field(default_factory=BlendConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    prefix_cached: bool = True
    lossless: bool = True
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @cached_property
    def plan(self) -> PromptPlan:
        """The prompt, laid out. Where RoPE gives a prompt of this length other frequencies than chunks are collected
        under, nothing stored is exact."""
        prefix_ids = self.collection.prefix_ids
        total = len(prefix_ids) + sum(len(c.token_ids) for c in self.chunks) + len(self.suffix_ids)
        short = self.collection.model.decoder.rope.regime(total) == 0
        return plan_prompt(
            prefix_ids,
            [replace(c, same_regime=c.same_regime and short) for c in self.chunks],
            self.suffix_ids,
            prefix_key=self.collection.prefix_key if self.prefix_cached and short else None,
            reuse=self.blend.mode != "full",
        )

    def without(self, key: bytes, reason: str) -> Request:
        """The request with what is stored under the key not used, and a note that says so."""
        self.notes.append(f"stored KV {key.hex()[:12]} is not used, it is computed: {reason}")
        return replace(
            self,
            prefix_cached=self.prefix_cached and key != self.collection.prefix_key,
            chunks=tuple(_to_compute(c, self.collection) if c.key == key else c for c in self.chunks),
        )

    def extended(self, token_ids: Sequence[int]) -> Request:
        """The request with these tokens of its answer behind the prompt."""
        return replace(self, suffix_ids=(*self.suffix_ids, *token_ids))

    def in_full(self) -> Request:
        """The same prompt, to be computed without the store, with notes of its own."""
        return replace(self, store=None, blend=BlendConfig(mode="full"), notes=[])


def resolve(
    runtime: Runtime, store: ChunkStore | None, question: Question, suffix_ids: tuple[int, ...] | None = None
) -> Request:
    """The request of a question. suffix_ids: what stands behind the chunks, None for the template around the text.

    Raises NotFoundError for a chunk whose record is not there or damaged, UsageError for an empty question and for named
    chunks without a store.
    """
    started, notes = time.perf_counter(), list(question.notes)
    question = question.dated(runtime, store)
    collection = collection_of(runtime, store, question)
    if collection.day is not None:
        notes += age_note(collection.day)
    all_logits = question.sampling.prompt_logprobs is not None
    chunks = _inputs(collection, store, question, notes)
    codecs = {c.codec for c in chunks if c.cached} | {collection.codec}
    converted = [c for c in chunks if c.cached and c.computed_in]
    if converted:
        notes.append(
            f"the KV of {len(converted)} chunks was computed in {converted[0].computed_in} and is converted: precompute "
            f"again for that of {collection.codec}, or ask with --dtype {converted[0].computed_in}"
        )
    notes += model_notes(runtime.model, question.blend, question.sampling, len(chunks))
    return Request(
        collection=collection,
        store=store,
        suffix_ids=suffix_of(runtime, question) if suffix_ids is None else suffix_ids,
        chunks=chunks,
        named=tuple(question.keys),
        given=question.given,
        ranks=question.ranks,
        blend=BlendConfig(mode="full") if all_logits else question.blend,
        sampling=question.sampling,
        prefix_cached=store is not None and store.has_kv(collection.prefix_key),
        lossless=not converted and all(is_lossless(codec, runtime.decoder.dtype) for codec in codecs),
        notes=notes,
        started=started,
    )


def suffix_of(runtime: Runtime, question: Question) -> tuple[int, ...]:
    """Ids of what stands behind the question's chunks. Raises UsageError."""
    return runtime.template_of(question.wording, question.day).suffix_ids(question.text, question.history)


def collection_of(runtime: Runtime, store: ChunkStore | None, question: Question) -> Collection:
    """Collection to look the question's chunks up in. Without a codec that was asked for, the codec of the first chunk that
    this model has KV for."""
    question = question.dated(runtime, store)
    if runtime.config.kv_dtype == "auto" and store is not None:
        for key in question.keys:
            if (manifest := chunk_of(store, key)) and manifest.model == runtime.model.fingerprint:
                return runtime.collection(question.salt, manifest.codec, question.wording, question.day)
    return runtime.collection(question.salt, None, question.wording, question.day)


def chunk_of(store: ChunkStore, key: bytes) -> ChunkManifest | None:
    """The chunk's record; None where there is none or it is damaged."""
    try:
        return store.get_chunk(key)
    except BadBlob:
        return None


def _inputs(
    collection: Collection, store: ChunkStore | None, question: Question, notes: list[str]
) -> tuple[ChunkInput, ...]:
    """The question's chunks as this model sees them, with their documents' names as shown to the user."""
    given = {planned.key: planned for planned in question.given}
    citations = None if store is None else Citations(store)
    inputs = list[ChunkInput]()
    for key in question.keys:
        if key in given and (store is None or not store.has_chunk(key)):
            inputs.append(_as_missing(collection, given[key]))
        elif store is None or citations is None:
            raise UsageError("chunks are named, and there is no store", "give --store")
        else:
            manifest = _manifest(store, key)
            found = _as_input(collection, store, manifest, notes)
            inputs.append(replace(found, source=citations.of(manifest).source))
    return tuple(inputs)


def _as_missing(collection: Collection, planned: PlannedChunk) -> ChunkInput:
    """A chunk that the store does not have, to be computed."""
    ids = planned.chunk.token_ids
    return ChunkInput(collection.key(ids, planned.left), shown(planned.source), ids, planned.left, cached=False)


def _manifest(store: ChunkStore, key: bytes) -> ChunkManifest:
    try:
        manifest = store.get_chunk(key)
    except BadBlob as error:
        raise NotFoundError(
            f"the record of chunk {key.hex()[:12]} is damaged: {error.message}",
            "run cacheblend precompute on its document again",
        ) from error
    if manifest is None:
        raise NotFoundError(f"no chunk {key.hex()[:12]} in the store", "list the ids: cacheblend chunks ls")
    return manifest


def _as_input(collection: Collection, store: ChunkStore, manifest: ChunkManifest, notes: list[str]) -> ChunkInput:
    """A stored chunk as this model sees it.

    One in another codec is loaded in it, and one that the same model computed in another dtype too. One of another model
    or salt gives its text: what this model has of that text in the collection's codec is taken; without any, or with a damaged
    record alone, the chunk is computed. So is a chunk without KV.
    """
    model, stored = collection.model, replace(collection, codec=manifest.codec)
    own = next((c for c in (stored, *stored.in_other_dtypes()) if c.id == manifest.collection), None)
    if own is not None:
        chunk = ChunkInput(
            manifest.key,
            manifest.source,
            manifest.token_ids,
            manifest.left_context_ids,
            cached=manifest.has_kv,
            same_regime=model.decoder.rope.regime(manifest.collected_len) == 0,
            codec=manifest.codec,
            computed_in=own.computed_in,
        )
        return chunk if chunk.cached else _to_compute(chunk, collection)
    token_ids = tuple(model.tokenizer.encode_text(manifest.text))
    lefts = dict.fromkeys((manifest.left_context_ids, ()))  # the same context first
    found = [m for left in lefts if (m := chunk_of(store, collection.key(token_ids, left)))]
    if found:
        return _as_input(collection, store, max(found, key=lambda m: m.has_kv), notes)
    notes.append(f"chunk {manifest.id[:12]} has no KV of this model in {collection.codec}: it is computed")
    return ChunkInput(collection.key(token_ids), manifest.source, token_ids, cached=False)


def _to_compute(chunk: ChunkInput, collection: Collection) -> ChunkInput:
    """The chunk as a hole. What is computed now is never stored as what another dtype computed."""
    if not chunk.computed_in:
        return replace(chunk, cached=False)
    return ChunkInput(collection.key(chunk.token_ids), chunk.source, chunk.token_ids, cached=False)
