"""Search for a question's chunks: as many as fit the prompt, in reading order, exact if possible."""

from __future__ import annotations

from collections.abc import Collection as Keys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, permutations

from cacheblend_store import ChunkStore

from cacheblend_cli.corpus.search import (
    WEAK,
    Lookup,
    SearchHit,
    SearchResult,
    damaged_note,
    found_elsewhere,
    more_note,
    num_elsewhere,
    search,
    weak_note,
)
from cacheblend_cli.engine.events import Say
from cacheblend_cli.engine.request.chunks import ChunkRecords, in_stored_codec
from cacheblend_cli.engine.request.prompts import Prompts
from cacheblend_cli.errors import NotFoundError
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.mismatch import nothing_found
from cacheblend_cli.types import AskRequest, SearchParams

_MOST_PAIRED = 8  # best documents of which two may begin the prompt together


@dataclass(frozen=True)
class Retrieved:
    """Chunks found for a question."""

    keys: Sequence[bytes] = ()  # in the prompt's order
    ranks: Mapping[bytes, int] = field(default_factory=dict)  # in the search results, from 1
    notes: list[str] = field(default_factory=list)  # messages for users
    weak: bool = False  # even the best chunk matches the question weakly
    num_cut: int = 0  # see `SearchResult`
    num_repeated: int = 0


def retrieve(
    prompts: Prompts, store: ChunkStore, stored: ChunkRecords, ask: AskRequest, say: Say | None = None
) -> Retrieved:
    """Search for the best chunks for a question, with the last turn of its history. Named chunks come before these in
    the prompt. stored: the store's records.

    Raises NotFoundError with the reason if nothing is found for this model and scope, or if all matches are weak, the
    search refuses weak ones and the request names no chunks.
    """
    ask = prompts.dated(store, ask)
    own, usable = prompts.collection(ask.salt, day=ask.day), prompts.collections(ask.salt, ask.day)
    lookup = _lookup(ask, say)
    found = _search(store, ask, lookup, own, usable, say)
    fit, room = _fitting(prompts, own, stored, ask, found.hits)
    notes = list(_notes(prompts, ask, lookup, found, len(fit)))
    documents = in_reading_order(found.hits, fit)
    collection = in_stored_codec(own, prompts, stored, list(chain(*documents)))
    if own.model.spec.recurrent and not ask.keys:
        from cacheblend_cli.engine.request.hybrids import from_beginning

        source_of = {hit.key: hit.source for hit in found.hits}
        documents = from_beginning(collection, stored, documents, source_of, room, notes)
    else:
        documents = exact_first(collection, stored, documents)
    keys = list(chain(*documents))
    exact = exact_where_stored(collection, stored, keys)
    rank_of = {hit.key: rank for rank, hit in enumerate(found.hits, 1)}
    ranks = {e: rank_of[key] for e, key in zip(exact, keys, strict=True) if key in rank_of}
    if found.num_damaged:
        notes.append(damaged_note(found.num_damaged))
    if found.weak:
        notes.insert(0, weak_note(store, lookup.scope, _ids(usable), len(fit)))
    return Retrieved(exact, ranks, notes, found.weak, found.num_cut, found.num_repeated)


def _lookup(ask: AskRequest, say: Say | None) -> Lookup:
    """Return the search for the question, unless it has its own query, with the last turn of the history."""
    lookup = Lookup.with_weights(ask.search or SearchParams(), say)
    if lookup.query:
        return lookup
    last = ask.history[-2:]  # question and answer; an answer to nothing is a greeting
    return replace(lookup, query=ask.question, before=" ".join(last) if any(last[:1]) else "")


def _search(
    store: ChunkStore, ask: AskRequest, lookup: Lookup, own: Collection, usable: Sequence[Collection], say: Say | None
) -> SearchResult:
    """Search the usable collections. Raises NotFoundError, see `retrieve`."""
    searched = _ids(usable)
    found = search(store, lookup.query, lookup, searched)
    if not found.hits:
        if found.num_damaged and say:
            say(damaged_note(found.num_damaged))
        if lookup.optional:  # nobody reads the reason, which takes a pass over all chunks
            raise NotFoundError("nothing stored matches")
        raise found_elsewhere(store, lookup.query, lookup, searched) or nothing_found(store, own, usable)
    if found.weak and lookup.on_weak_match == "refuse" and not ask.keys:
        others = num_elsewhere(store, lookup.scope, searched)
        more = "search other documents too (--all)" if others else "precompute more documents"
        raise NotFoundError(WEAK, f"ask in other words, {more}, or --on-weak-match answer")
    return found


def _ids(collections: Sequence[Collection]) -> list[str]:
    return [collection.id for collection in collections]


def _fitting(
    prompts: Prompts, own: Collection, stored: ChunkRecords, ask: AskRequest, hits: Sequence[SearchHit]
) -> tuple[list[bytes], int]:
    """Return the keys of the hits that fit the context beside the named chunks and the answer, and the tokens left."""
    size, suffix_ids = stored.num_tokens, own.template.suffix_ids(ask.question, ask.history)
    named = len(own.prefix_ids) + len(suffix_ids) + sum(map(size, ask.keys))
    fit, room = list[bytes](), prompts.context - prompts.max_new_tokens(ask.sampling) - named
    for hit in hits:
        if size(hit.key) <= room:
            fit.append(hit.key)
            room -= size(hit.key)
    if not (fit or ask.keys):  # to be refused like a named chunk
        fit.append(hits[0].key)
        room -= size(fit[0])
    return fit, room


def _notes(prompts: Prompts, ask: AskRequest, lookup: Lookup, found: SearchResult, num_fit: int) -> Iterator[str]:
    """Say how many hits are left out of the prompt, or how many more match."""
    if left := len(found.hits) - num_fit:
        yield (
            f"{left} of the {len(found.hits)} chunks found {'is' if left == 1 else 'are'} left out: the context of "
            f"{prompts.model.name} is {prompts.context:,} tokens, {prompts.max_new_tokens(ask.sampling):,} of them for the answer"
        )
    elif found.num_more:
        yield more_note(found.num_more, lookup.k)


def exact_first(collection: Collection, stored: ChunkRecords, documents: list[list[bytes]]) -> list[list[bytes]]:
    """Return the documents' keys, those first that make the longest exact beginning of a prompt: one document or, where
    a chunk of one was collected behind another (`--context neighbours`), two. Among equals the better hits come first.
    Nothing after an inexact chunk is exact.
    """
    pairs = permutations(documents[:_MOST_PAIRED], 2)
    beginnings = [*([d] for d in documents), *([first, second] for first, second in pairs)]
    best = max(beginnings, key=lambda keys: exact_tokens(collection, stored, list(chain(*keys))), default=[])
    return [*best, *(d for d in documents if d not in best)]


def in_reading_order(hits: Sequence[SearchHit], keys: Keys[bytes]) -> list[list[bytes]]:
    """Return the keys of hits by document (best hit first), and within a document by place."""
    places: dict[str, dict[bytes, int]] = {}
    for hit in hits:
        if hit.key in keys:
            places.setdefault(hit.source, {}).setdefault(hit.key, hit.index)
    return [sorted(document, key=document.__getitem__) for document in places.values()]


def exact_tokens(collection: Collection, stored: ChunkRecords, keys: Sequence[bytes]) -> int:
    """Return the number of tokens of leading chunks of which a copy was collected after the same text. Evicted KV
    counts too, so that the order of a prompt, and its answer, do not depend on eviction."""
    left: tuple[int, ...] = ()
    for key in keys:
        manifest = stored.get(key)
        if manifest is None:
            break
        ids = tuple(manifest.token_ids)
        if tuple(manifest.left_context_ids) != left and stored.get(collection.key(ids, left)) is None:
            break
        left += ids
    return len(left)


def exact_where_stored(collection: Collection, stored: ChunkRecords, keys: Sequence[bytes]) -> list[bytes]:
    """Replace each chunk by the copy collected after the chunks before it here, if stored: that copy is exact, in any
    context."""
    found, left = list[bytes](), tuple[int, ...]()
    right = True  # nothing after a chunk that needs repair is exact
    for key in keys:
        manifest = stored.get(key)
        ids = manifest.token_ids if manifest else ()
        exact = collection.key(ids, left) if right else key
        right = right and (exact == key or stored.has_kv(exact))
        found.append(exact if right else key)
        left += ids
    return found
