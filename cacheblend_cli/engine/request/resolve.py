"""Resolving a question: looks up or searches for chunks, each record read once, and lays out the prompt."""

from __future__ import annotations

import time
from collections.abc import Callable
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
    ask = prompts.dated(
        store, replace(ask, sampling=as_the_model(ask.sampling, ask.model_sampling, prompts.model.loaded))
    )
    texts = [ask.question, ask.system or "", *ask.history, *(document.text for document in ask.documents)]
    prompts.check_characters(sum(map(len, texts)), 0)
    planned = _planned(prompts, ask, collect, cancellation)
    with ChunkRecords(store, ask.cite_first, planned) as stored:
        ask, found = _searched(prompts, stored, ask, say)
        request = _looked_up(prompts, stored, ask, found, suffix_ids)
    request = _with_blend(request, ask)
    if store is not None and store.tier is not None and request.blend.mode != "full":
        from cacheblend_cli.engine.request.tiered import with_tier

        request = with_tier(request, store, store.tier)
    request = _with_losses(request)
    request.notes.extend(model_notes(prompts.model.loaded, ask.sampling))
    if prompts.model.spec.recurrent:
        from cacheblend_cli.engine.request.hybrids import check_reuse

        check_reuse(request)
    return request


def _planned(
    prompts: Prompts, ask: AskRequest, settings: Callable[[], CollectSettings] | None, cancellation: Cancellation | None
) -> dict[bytes, PlannedChunk]:
    """Cut the request's documents. Returns their chunks by key."""
    if not ask.documents:
        return {}
    from cacheblend_cli.collect.settings import CollectSettings
    from cacheblend_cli.collect.texts import plan_texts, sent_document

    collection = prompts.collection_of(ask)
    documents = [sent_document(document, ask.tenant) for document in ask.documents]
    planned = plan_texts(collection, documents, (settings or CollectSettings)(), cancellation)
    return {chunk.key: chunk for chunks in planned for chunk in chunks}


def _searched(prompts: Prompts, stored: ChunkRecords, ask: AskRequest, say: Say | None) -> tuple[AskRequest, Retrieved]:
    """Return the request with the keys of all its chunks, and the search results."""
    keys = [*stored.planned, *(key for key in ask.keys if key not in stored.planned)]
    found = Retrieved()
    if ask.search is not None:
        assert stored.store is not None
        try:
            found = retrieve(prompts, stored.store, stored, replace(ask, keys=keys), say)
        except NotFoundError as error:
            if not ask.search.optional:
                raise NothingFound(error.message, error.hint) from error
            ask = replace(ask, prompt=PLAIN)
            found = Retrieved(notes=[f"{error.message}: answered without documents"])
    return replace(ask, keys=[*keys, *(key for key in found.keys if key not in keys)]), found


def _looked_up(
    prompts: Prompts, stored: ChunkRecords, ask: AskRequest, found: Retrieved, suffix_ids: tuple[int, ...] | None
) -> Request:
    """Return the request with the records of its chunks, in the collection of the KV that is stored for them."""
    started, notes = time.perf_counter(), found.notes
    if stored.store is None and any(key not in stored.planned for key in ask.keys):
        raise UsageError("chunks are named, and there is no store", "give --store")
    collection = in_stored_codec(prompts.collection_of(ask), prompts, stored, ask.keys)
    if collection.day is not None:
        notes += age_note(collection.day)
    chunks = request_chunks(collection, stored, ask.keys, found.ranks, notes)
    has_prefix = stored.has_kv(collection.prefix_key)
    if (damage := stored.damage(collection.prefix_key)) is not None:
        notes.append(not_used(collection.prefix_key, damage.message))
    return Request(
        question=ask.question,
        collection=collection,
        store=stored.store,
        suffix_ids=collection.template.suffix_ids(ask.question, ask.history) if suffix_ids is None else suffix_ids,
        chunks=chunks,
        weak_match=found.weak,
        hits_cut=found.num_cut,
        hits_repeated=found.num_repeated,
        sampling=ask.sampling,
        options=ask.options,
        prefix_cached=has_prefix,
        notes=notes,
        started=started,
    )


def _with_blend(request: Request, ask: AskRequest) -> Request:
    """Return the request with its use of stored KV: as asked, or by the model's profile. Raises UsageError for settings
    that the model lacks."""
    model = request.collection.model
    if model.spec.recurrent:
        from cacheblend_cli.engine.request.hybrids import exact_only

        blend, ratio_from = exact_only(ask, model.name), NO_RATIO
    else:
        blend, ratio_from = with_own_ratio(request.collection, request.inputs, ask, request.notes)
    policy_of(blend, model.spec.num_kv_layers, layer0_exact=True)
    if ask.sampling.prompt_logprobs is not None:
        blend = BlendParams(mode="full")
    is_default = ask.options.own_ratio and replace(ask.blend, seed=0) == BlendParams()
    may_be_full = is_default and not ask.options.verify and blend.mode == "blend"
    return replace(request, blend=blend, ratio_from=ratio_from, may_be_full=may_be_full)


def _with_losses(request: Request) -> Request:
    """Return the request that knows whether its stored KV is what this run would compute. Notes KV in another dtype."""
    collection, cached = request.collection, [c for c in request.inputs if c.cached]
    if converted := [c for c in cached if c.computed_in]:
        request.notes.append(
            f"the KV of {len(converted)} chunks was computed in {converted[0].computed_in} and is converted: for "
            f"{collection.codec} precompute again, or ask with --dtype {converted[0].computed_in}"
        )
    codecs, dtype = {c.codec for c in cached} | {collection.codec}, collection.decoder.dtype
    return replace(request, lossless=not converted and all(is_lossless(codec, dtype) for codec in codecs))
