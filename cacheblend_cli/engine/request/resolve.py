"""Request: a question whose chunks are resolved and whose prompt is laid out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from cacheblend_store import ChunkStore
from cacheblend_store.format.codecs import is_lossless

from cacheblend_cli.blend.policy import policy_of
from cacheblend_cli.collect.collector import PlannedChunk
from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.collect.texts import plan_texts, sent_document
from cacheblend_cli.engine.connectors.connector import Connector
from cacheblend_cli.engine.profile import with_own_ratio
from cacheblend_cli.engine.request.chunks import (
    RequestChunk,
    check_named,
    dated,
    in_stored_codec,
    request_chunks,
    to_compute,
    wording_of,
)
from cacheblend_cli.engine.request.retrieval import Retrieved, retrieve
from cacheblend_cli.engine.request.stored_chunks import StoredChunks
from cacheblend_cli.engine.request.tiered import ask_tier, with_found
from cacheblend_cli.engine.runtime import Runtime, Say
from cacheblend_cli.engine.sampling import as_the_model, model_notes
from cacheblend_cli.errors import NotFoundError, NothingFound, UsageError
from cacheblend_cli.kv.source import KVSource, TieredSource
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.dates import age_note
from cacheblend_cli.prompt.plan import ChunkInput, PromptPlan, plan_prompt
from cacheblend_cli.types import PLAIN, AskOptions, AskRequest, BlendParams, SamplingParams


@dataclass(frozen=True)
class Request:
    """An AskRequest with its chunks resolved. It can be run under several settings (`replace(request, blend=...)`).

    store: where the chunks' KV is, None to compute everything. weak_match: whether even the best of the chunks that
    were searched matches the question weakly. prefix_cached: the store has the prefix's KV. lossless: stored KV is what
    this run would compute. notes: messages for users, shared by all that is made of this request. started: perf_counter
    when the question was known. connector: takes the prompt's KV, and the answer ends before its first token. tiered:
    the store and its tier, if that was asked for chunks. hits_cut, ratio_from: see `Answer`.
    """

    question: str
    collection: Collection
    store: ChunkStore | None
    suffix_ids: tuple[int, ...]
    chunks: tuple[RequestChunk, ...]
    weak_match: bool = False
    hits_cut: int = 0
    blend: BlendParams = field(default_factory=BlendParams)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    options: AskOptions = field(default_factory=AskOptions)
    prefix_cached: bool = True
    lossless: bool = True
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    connector: Connector | None = None
    tiered: TieredSource | None = None
    ratio_from: str = "given"

    @property
    def named(self) -> tuple[bytes, ...]:
        """Keys of the chunks as they were asked for."""
        return tuple(chunk.named for chunk in self.chunks)

    @property
    def inputs(self) -> tuple[ChunkInput, ...]:
        """The chunks as this model sees them."""
        return tuple(chunk.input for chunk in self.chunks)

    @property
    def source(self) -> KVSource | None:
        """Source of cached KV."""
        return self.tiered or self.store

    @cached_property
    def plan(self) -> PromptPlan:
        """The prompt, laid out. Where RoPE gives a prompt of this length other frequencies than chunks are collected
        under, nothing stored is exact; nor is KV of few bits where all is to be computed again (ratio 1)."""
        prefix_ids = self.collection.prefix_ids
        total = len(prefix_ids) + sum(len(c.token_ids) for c in self.inputs) + len(self.suffix_ids)
        short = self.collection.model.decoder.rope.regime(total) == 0
        again = not self.lossless and self.blend.mode == "blend" and self.blend.ratio == 1
        return plan_prompt(
            prefix_ids,
            [replace(c, same_regime=c.same_regime and short and not again) for c in self.inputs],
            self.suffix_ids,
            prefix_key=self.collection.prefix_key if self.prefix_cached and short else None,
            reuse=self.blend.mode != "full",
        )

    def without(self, key: bytes, reason: str) -> Request:
        """The request with what is stored under the key not used, and a note that says so. What the tier lost goes with
        it."""
        gone = {key} | (self.tiered.lost if self.tiered else set())
        self.notes.append(_not_used(key, reason))
        return replace(
            self,
            prefix_cached=self.prefix_cached and self.collection.prefix_key not in gone,
            chunks=tuple(
                replace(c, input=to_compute(c.input, self.collection)) if c.input.key in gone else c
                for c in self.chunks
            ),
        )

    def extended(self, token_ids: Sequence[int]) -> Request:
        """The request with these tokens of its answer behind the prompt."""
        return replace(self, suffix_ids=(*self.suffix_ids, *token_ids))

    def in_full(self) -> Request:
        """The same prompt, to be computed without the store, with notes of its own."""
        return replace(self, store=None, tiered=None, blend=BlendParams(mode="full"), notes=[], connector=None)

    def handed_to(self, connector: Connector) -> Request:
        """Return the request with its answer left to another engine. Raises UsageError if it compares our own
        answer."""
        if self.options.verify or self.options.confirm or self.blend.max_risk is not None:
            raise UsageError(
                "verify, confirm and max_risk compare our own answer, and another engine decodes this one",
                "leave them out, or let this engine decode",
            )
        return replace(self, connector=connector)


def resolve(
    runtime: Runtime,
    store: ChunkStore | None,
    ask: AskRequest,
    *,
    say: Say | None = None,
    collect: CollectSettings = CollectSettings(),
    suffix_ids: tuple[int, ...] | None = None,
) -> Request:
    """Resolve a question: cut its documents, look its chunks up, search, and tokenise. Any thread; nothing is stored.

    say: callback for a message if there is no search by meaning. collect: settings for cutting the request's documents.
    suffix_ids: token ids after the chunks, None for the template's.

    Raises NotFoundError for a chunk whose record is missing or damaged and for a search that finds nothing; UsageError
    for an empty question, for settings that the model does not have, and for named chunks without a store;
    PromptTooLong, StoreErrors.
    """
    if ask.blend.max_risk is not None and ask.options.stream:
        raise UsageError(
            "max_risk judges whole answers, and this one is streamed: its tokens would be shown before they are judged",
            "ask with --json or --batch, by Engine.ask or without stream; or use --confirm, which streams a draft",
        )
    sampling = as_the_model(ask.sampling, ask.model_sampling, runtime.model)
    ask = dated(runtime, store, replace(ask, sampling=sampling))
    _check_size(runtime, ask)
    planned = _planned(runtime, ask, collect)
    with StoredChunks(store, ask.cite_first) as stored:
        ask, found = _searched(runtime, store, stored, ask, planned, say)
        started, notes = time.perf_counter(), found.notes
        check_named(store, ask.keys, planned)
        collection = runtime.collection(ask.salt, wording=wording_of(runtime, ask), day=ask.day)
        collection = in_stored_codec(collection, runtime, stored, ask.keys)
        if collection.day is not None:
            notes += age_note(collection.day)
        chunks = request_chunks(collection, stored, ask.keys, planned, found.ranks, notes)
        has_prefix = stored.has_kv(collection.prefix_key)
        if (damage := stored.damage(collection.prefix_key)) is not None:
            notes.append(_not_used(collection.prefix_key, damage.message))
    inputs = [chunk.input for chunk in chunks]
    ask, ratio_from = with_own_ratio(collection, inputs, ask, notes)
    blend = ask.blend if sampling.prompt_logprobs is None else BlendParams(mode="full")
    if suffix_ids is None:
        suffix_ids = collection.template.suffix_ids(ask.question, ask.history)
    tiered, in_tier = None, set[bytes]()
    if store is not None and blend.mode != "full":
        num_tokens = len(collection.prefix_ids) + sum(len(c.token_ids) for c in inputs) + len(suffix_ids)
        tiered = ask_tier(runtime, store, collection, inputs, num_tokens, has_prefix=has_prefix)
        in_tier = set(tiered.found) if tiered is not None else in_tier
    inputs = [with_found(c, collection) if c.key in in_tier and not c.cached else c for c in inputs]
    codecs = {c.codec for c in inputs if c.cached} | {collection.codec}
    converted = [c for c in inputs if c.cached and c.computed_in]
    if converted:
        notes.append(
            f"the KV of {len(converted)} chunks was computed in {converted[0].computed_in} and is converted: precompute "
            f"again for that of {collection.codec}, or ask with --dtype {converted[0].computed_in}"
        )
    notes += model_notes(runtime.model, sampling)
    lossless = not converted and all(is_lossless(codec, runtime.decoder.dtype) for codec in codecs)
    policy_of(ask.blend, runtime.model.spec.num_kv_layers, lossless)  # raises for what the model does not have
    return Request(
        question=ask.question,
        collection=collection,
        store=store,
        suffix_ids=suffix_ids,
        chunks=tuple(replace(chunk, input=used) for chunk, used in zip(chunks, inputs, strict=True)),
        weak_match=found.weak,
        hits_cut=found.num_cut,
        blend=blend,
        sampling=sampling,
        options=ask.options,
        prefix_cached=collection.prefix_key in in_tier or has_prefix,
        lossless=lossless,
        notes=notes,
        started=started,
        tiered=tiered,
        ratio_from=ratio_from,
    )


def _not_used(key: bytes, reason: str) -> str:
    return f"stored KV {key.hex()[:12]} is not used, it is computed: {reason}"


def _check_size(runtime: Runtime, ask: AskRequest) -> None:
    """Raise PromptTooLong for texts that cannot fit, before anything is done with them."""
    texts = [ask.question, ask.system or "", *ask.history, *(document.text for document in ask.documents)]
    runtime.check_characters(sum(map(len, texts)), 0)


def _planned(runtime: Runtime, ask: AskRequest, settings: CollectSettings) -> dict[bytes, PlannedChunk]:
    """Return the chunks of the request's documents by key."""
    if not ask.documents:
        return {}
    collection = runtime.collection(ask.salt, wording=wording_of(runtime, ask), day=ask.day)
    documents = [sent_document(document, ask.tenant) for document in ask.documents]
    return {chunk.key: chunk for _, chunks in plan_texts(collection, documents, settings) for chunk in chunks}


def _searched(
    runtime: Runtime,
    store: ChunkStore | None,
    stored: StoredChunks,
    ask: AskRequest,
    planned: Mapping[bytes, PlannedChunk],
    say: Say | None,
) -> tuple[AskRequest, Retrieved]:
    """Return the request with the keys of all its chunks, and what was found."""
    keys = [*planned, *(key for key in ask.keys if key not in planned)]
    found = Retrieved()
    if ask.search is not None:
        assert store is not None
        try:
            found = retrieve(runtime, store, stored, replace(ask, keys=keys), planned, say)
        except NotFoundError as error:
            if not ask.search.optional:
                raise NothingFound(error.message, error.hint) from error
            ask, found = (
                replace(ask, prompt=PLAIN),
                Retrieved(notes=["nothing stored matches: the answer is the model's own"]),
            )
    return replace(ask, keys=[*keys, *(key for key in found.keys if key not in keys)]), found
