"""Request: a question whose chunks are resolved and whose prompt is laid out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from cacheblend_store import BadBlob, ChunkStore
from cacheblend_store.format.codecs import is_lossless

from cacheblend_cli.blend.policy import policy_of
from cacheblend_cli.collect.collector import PlannedChunk
from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.collect.texts import plan_texts, sent_document
from cacheblend_cli.engine.chunk_inputs import collection_of, dated, inputs_of, suffix_of, to_compute, wording_of
from cacheblend_cli.engine.connectors.connector import Connector
from cacheblend_cli.engine.model_notes import model_notes
from cacheblend_cli.engine.profile import with_own_ratio
from cacheblend_cli.engine.runtime import Runtime, Say
from cacheblend_cli.engine.sampling import as_the_model
from cacheblend_cli.engine.search import Retrieved, retrieve
from cacheblend_cli.engine.tiered import ask_tier, with_found
from cacheblend_cli.errors import NotFoundError, NothingFound, UsageError
from cacheblend_cli.kv.source import KVSource, TieredSource
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.dates import age_note
from cacheblend_cli.prompt.plan import ChunkInput, PromptPlan, plan_prompt
from cacheblend_cli.types import PLAIN, AskOptions, AskRequest, BlendParams, SamplingParams


@dataclass(frozen=True)
class Request:
    """An AskRequest with its chunks resolved. It can be run under several settings (`replace(request, blend=...)`).

    store: where the chunks' KV is, None to compute everything. named: keys of the chunks as they were asked for. given: chunks of
    the request's documents, which the store may lack. ranks: rank of each searched chunk, from 1. weak_match: whether even
    the best of these matches the question weakly. prefix_cached: the store has the
    prefix's KV. lossless: stored KV is what this run would compute. notes: messages for users, shared by all that is made of this
    request. started: perf_counter when the question was known. connector: takes the prompt's KV, and the answer ends before its first
    token. tiered: the store and its tier, if that was asked for chunks. ratio_from: see `Answer`.
    """

    question: str
    collection: Collection
    store: ChunkStore | None
    suffix_ids: tuple[int, ...]
    chunks: tuple[ChunkInput, ...]
    named: tuple[bytes, ...] = ()
    given: tuple[PlannedChunk, ...] = ()
    ranks: Mapping[bytes, int] = field(default_factory=dict)
    weak_match: bool = False
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
    def source(self) -> KVSource | None:
        """Source of cached KV."""
        return self.tiered or self.store

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
        """The request with what is stored under the key not used, and a note that says so. What the tier lost goes with it."""
        gone = {key} | (self.tiered.lost if self.tiered else set())
        self.notes.append(_not_used(key, reason))
        return replace(
            self,
            prefix_cached=self.prefix_cached and self.collection.prefix_key not in gone,
            chunks=tuple(to_compute(c, self.collection) if c.key in gone else c for c in self.chunks),
        )

    def extended(self, token_ids: Sequence[int]) -> Request:
        """The request with these tokens of its answer behind the prompt."""
        return replace(self, suffix_ids=(*self.suffix_ids, *token_ids))

    def in_full(self) -> Request:
        """The same prompt, to be computed without the store, with notes of its own."""
        return replace(self, store=None, tiered=None, blend=BlendParams(mode="full"), notes=[], connector=None)

    def handed_to(self, connector: Connector) -> Request:
        """Return the request with its answer left to another engine. Raises UsageError if it compares our own answer."""
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

    say: callback for a message if there is no search by meaning. collect: settings for cutting the request's documents. suffix_ids:
    token ids after the chunks, None for the template's.

    Raises NotFoundError for a chunk whose record is missing or damaged and for a search that finds nothing; UsageError for an empty
    question, for settings that the model does not have, and for named chunks without a store; PromptTooLong, StoreErrors.
    """
    if ask.blend.max_risk is not None and ask.options.stream:
        raise UsageError(
            "max_risk judges whole answers, and this one is streamed: its tokens would be shown before they are judged",
            "ask with --json or --batch, by Engine.ask or without stream; or use --confirm, which streams a draft",
        )
    sampling = as_the_model(ask.sampling, ask.model_sampling, runtime.model)
    ask = dated(runtime, store, replace(ask, sampling=sampling))
    _check_size(runtime, ask)
    given = _planned(runtime, ask, collect)
    ask, found = _searched(runtime, store, ask, given, say)
    started, notes = time.perf_counter(), found.notes
    collection = collection_of(runtime, store, ask)
    if collection.day is not None:
        notes += age_note(collection.day)
    chunks = inputs_of(collection, store, ask.keys, given, notes)
    ask, ratio_from = with_own_ratio(collection, chunks, ask, notes)
    blend = ask.blend if sampling.prompt_logprobs is None else BlendParams(mode="full")
    suffix_ids = suffix_of(runtime, ask) if suffix_ids is None else suffix_ids
    tiered, in_tier = None, set[bytes]()
    if store is not None and blend.mode != "full":
        num_tokens = len(collection.prefix_ids) + sum(len(c.token_ids) for c in chunks) + len(suffix_ids)
        tiered = ask_tier(runtime, store, collection, chunks, num_tokens)
        in_tier = set(tiered.found) if tiered is not None else in_tier
    chunks = tuple(with_found(c, collection) if c.key in in_tier and not c.cached else c for c in chunks)
    codecs = {c.codec for c in chunks if c.cached} | {collection.codec}
    converted = [c for c in chunks if c.cached and c.computed_in]
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
        chunks=chunks,
        named=tuple(ask.keys),
        given=given,
        ranks=found.ranks,
        weak_match=found.weak,
        blend=blend,
        sampling=sampling,
        options=ask.options,
        prefix_cached=collection.prefix_key in in_tier or _has_prefix(store, collection.prefix_key, notes),
        lossless=lossless,
        notes=notes,
        started=started,
        tiered=tiered,
        ratio_from=ratio_from,
    )


def _has_prefix(store: ChunkStore | None, key: bytes, notes: list[str]) -> bool:
    """Return whether the store has the prefix's KV. A damaged record is noted."""
    try:
        found = None if store is None else store.get_chunk(key)
    except BadBlob as error:
        notes.append(_not_used(key, error.message))
        return False
    return found is not None and found.has_kv


def _not_used(key: bytes, reason: str) -> str:
    return f"stored KV {key.hex()[:12]} is not used, it is computed: {reason}"


def _check_size(runtime: Runtime, ask: AskRequest) -> None:
    """Raise PromptTooLong for texts that cannot fit, before anything is done with them."""
    texts = [ask.question, ask.system or "", *ask.history, *(document.text for document in ask.documents)]
    runtime.check_characters(sum(map(len, texts)), 0)


def _planned(runtime: Runtime, ask: AskRequest, settings: CollectSettings) -> tuple[PlannedChunk, ...]:
    """Return the chunks of the request's documents."""
    if not ask.documents:
        return ()
    collection = runtime.collection(ask.salt, wording=wording_of(runtime, ask), day=ask.day)
    documents = [sent_document(document, ask.tenant) for document in ask.documents]
    planned = plan_texts(collection, documents, settings)
    return tuple({chunk.key: chunk for _, chunks in planned for chunk in chunks}.values())


def _searched(
    runtime: Runtime, store: ChunkStore | None, ask: AskRequest, given: Sequence[PlannedChunk], say: Say | None
) -> tuple[AskRequest, Retrieved]:
    """Return the request with the keys of all its chunks, and what was found."""
    own = [chunk.key for chunk in given]
    keys = [*own, *(key for key in ask.keys if key not in own)]
    found = Retrieved()
    if ask.search is not None:
        assert store is not None
        try:
            found = retrieve(runtime, store, replace(ask, keys=keys), given, say)
        except NotFoundError as error:
            if not ask.search.optional:
                raise NothingFound(error.message, error.hint) from error
            ask, found = (
                replace(ask, prompt=PLAIN),
                Retrieved(notes=["nothing stored matches: the answer is the model's own"]),
            )
    return replace(ask, keys=[*keys, *(key for key in found.keys if key not in keys)]), found
