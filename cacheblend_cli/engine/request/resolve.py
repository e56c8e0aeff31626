"""Resolving a question: looks up or searches for chunks, each record read once, and lays out the prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from cacheblend_store import ChunkStore
from cacheblend_store.format.codecs import is_lossless

from cacheblend_cli.blend.policy import policy_of
from cacheblend_cli.cancellation import Cancellation
from cacheblend_cli.engine.events import Say
from cacheblend_cli.engine.profile import with_own_ratio
from cacheblend_cli.engine.request.chunks import ChunkRecords, in_stored_codec, request_chunks
from cacheblend_cli.engine.request.model_sampling import as_the_model, model_notes
from cacheblend_cli.engine.request.prompts import Prompts
from cacheblend_cli.engine.request.request import Request, not_used
from cacheblend_cli.engine.request.retrieval import Retrieved, retrieve
from cacheblend_cli.errors import NotFoundError, NothingFound, UsageError
from cacheblend_cli.prompt.dates import age_note
from cacheblend_cli.types import NO_RATIO, PLAIN, AskRequest, BlendParams

if TYPE_CHECKING:
    from cacheblend_cli.collect.collector import PlannedChunk
    from cacheblend_cli.collect.settings import CollectSettings


def resolve(
    prompts: Prompts,
    store: ChunkStore | None,
    ask: AskRequest,
    say: Say | None = None,
    collect: Callable[[], CollectSettings] | None = None,
    suffix_ids: tuple[int, ...] | None = None,
    cancellation: Cancellation | None = None,
) -> Request:
    """Resolve a question: cut its documents, look up and search for chunks, tokenise. Thread-safe; stores nothing.

    say: callback for a message if search by meaning is not available. collect: returns the settings for cutting
    the request's documents, None for the defaults. suffix_ids: token ids after the chunks, None for the template's.
    cancellation: ends the cutting with Cancelled.

    Raises NotFoundError for a missing or damaged record and for a search without results; UsageError for an empty
    question, settings that the model lacks, and named chunks without a store; PromptTooLong, StoreErrors.
    """
    sampling = as_the_model(ask.sampling, ask.model_sampling, prompts.model)
    ask = prompts.dated(store, replace(ask, sampling=sampling))
    texts = [ask.question, ask.system or "", *ask.history, *(document.text for document in ask.documents)]
    prompts.check_characters(sum(map(len, texts)), 0)
    planned = _planned(prompts, ask, collect, cancellation)
    with ChunkRecords(store, ask.cite_first) as stored:
        ask, found = _searched(prompts, store, stored, ask, planned, say)
        started, notes = time.perf_counter(), found.notes
        if store is None and any(key not in planned for key in ask.keys):
            raise UsageError("chunks are named, and there is no store", "give --store")
        collection = in_stored_codec(prompts.collection_of(ask), prompts, stored, ask.keys)
        if collection.day is not None:
            notes += age_note(collection.day)
        chunks = request_chunks(collection, stored, ask.keys, planned, found.ranks, notes)
        has_prefix = stored.has_kv(collection.prefix_key)
        if (damage := stored.damage(collection.prefix_key)) is not None:
            notes.append(not_used(collection.prefix_key, damage.message))
    inputs = [chunk.input for chunk in chunks]
    if in_order := bool(prompts.model.spec.recurrent):
        from cacheblend_cli.engine.request import hybrids

        ask, ratio_from = hybrids.exact_only(ask, prompts.model.name), NO_RATIO
    else:
        ask, ratio_from = with_own_ratio(collection, inputs, ask, notes)
    blend = ask.blend if sampling.prompt_logprobs is None else BlendParams(mode="full")
    if suffix_ids is None:
        suffix_ids = collection.template.suffix_ids(ask.question, ask.history)
    tiered, in_tier = None, set[bytes]()
    if store is not None and store.tier is not None and blend.mode != "full":
        from cacheblend_cli.engine.request.tiered import ask_tier, with_found

        num_tokens = len(collection.prefix_ids) + sum(len(c.token_ids) for c in inputs) + len(suffix_ids)

        tiered = ask_tier(prompts, store, store.tier, collection, inputs, num_tokens, has_prefix=has_prefix)
        in_tier = set(tiered.found) if tiered is not None else in_tier
        inputs = [with_found(c, collection) if c.key in in_tier and not c.cached else c for c in inputs]
    codecs = {c.codec for c in inputs if c.cached} | {collection.codec}
    converted = [c for c in inputs if c.cached and c.computed_in]
    if converted:
        notes.append(
            f"the KV of {len(converted)} chunks was computed in {converted[0].computed_in} and is converted: for "
            f"{collection.codec} precompute again, or ask with --dtype {converted[0].computed_in}"
        )
    notes += model_notes(prompts.model, sampling)
    lossless = not converted and all(is_lossless(codec, prompts.model.decoder.dtype) for codec in codecs)
    policy_of(ask.blend, prompts.model.spec.num_kv_layers, lossless)  # raises for settings that the model lacks
    request = Request(
        question=ask.question,
        collection=collection,
        store=store,
        suffix_ids=suffix_ids,
        chunks=tuple(replace(chunk, input=used) for chunk, used in zip(chunks, inputs, strict=True)),
        weak_match=found.weak,
        hits_cut=found.num_cut,
        hits_repeated=found.num_repeated,
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
    if in_order:
        hybrids.check_reuse(request)
    return request


def _planned(
    prompts: Prompts,
    ask: AskRequest,
    settings: Callable[[], CollectSettings] | None,
    cancellation: Cancellation | None,
) -> dict[bytes, PlannedChunk]:
    if not ask.documents:
        return {}
    from cacheblend_cli.collect.settings import CollectSettings
    from cacheblend_cli.collect.texts import plan_texts, sent_document

    collection = prompts.collection_of(ask)
    documents = [sent_document(document, ask.tenant) for document in ask.documents]
    planned = plan_texts(collection, documents, (settings or CollectSettings)(), cancellation)
    return {chunk.key: chunk for chunks in planned for chunk in chunks}


def _searched(
    prompts: Prompts,
    store: ChunkStore | None,
    stored: ChunkRecords,
    ask: AskRequest,
    planned: Mapping[bytes, PlannedChunk],
    say: Say | None,
) -> tuple[AskRequest, Retrieved]:
    """Return the request with the keys of all its chunks, and the search results."""
    keys = [*planned, *(key for key in ask.keys if key not in planned)]
    found = Retrieved()
    if ask.search is not None:
        assert store is not None
        try:
            found = retrieve(prompts, store, stored, replace(ask, keys=keys), planned, say)
        except NotFoundError as error:
            if not ask.search.optional:
                raise NothingFound(error.message, error.hint) from error
            ask = replace(ask, prompt=PLAIN)
            found = Retrieved(notes=[f"{error.message}: answered without documents"])
    return replace(ask, keys=[*keys, *(key for key in found.keys if key not in keys)]), found
