"""A question's chunks, where it names none: searched, as many as fit the prompt, in reading order, exact where they can be."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from cacheblend_store import ChunkStore

from cacheblend_cli.corpus.search import WEAK, Hit, Lookup, found_elsewhere, is_weak, search
from cacheblend_cli.engine.request import Question, chunk_of, collection_of, suffix_of
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.prompt.mismatch import nothing_found


def with_chunks(
    runtime: Runtime, store: ChunkStore, question: Question, lookup: Lookup, before: Sequence[bytes] = ()
) -> Question:
    """Return the question with the best chunks for it, found with the last turn of its history. before: chunks that stand before
    these in the prompt. A weak match is noted.

    Raises NotFoundError, which says why, if nothing is found: nothing of this model, or nothing in the scope.
    """
    question = question.dated(runtime, store)
    about = question.wording, question.day
    collections = [collection.id for collection in runtime.collections(question.salt, *about)]
    query = lookup.query or question.text
    if not lookup.query:
        lookup = replace(lookup, before=" ".join(question.history[-2:]))  # the last question and its answer
    hits = search(store, query, lookup, collections)
    if not hits:
        own = runtime.collection(question.salt, None, *about)
        raise found_elsewhere(store, query, lookup, collections) or nothing_found(store, own, collections)
    if is_weak(hits, lookup.by):
        question = replace(question, notes=(*question.notes, WEAK))
    question = fitting(runtime, store, replace(question, keys=[hit.key for hit in hits]), before)
    keys = in_order(store, hits, question.keys, lookup.order)
    exact = exact_where_stored(runtime, store, replace(question, keys=keys))
    rank_of = {hit.key: rank for rank, hit in enumerate(hits, 1)}
    return replace(question, keys=exact, ranks={e: rank_of[key] for e, key in zip(exact, keys, strict=True)})


def fitting(runtime: Runtime, store: ChunkStore, question: Question, before: Sequence[bytes] = ()) -> Question:
    """The question with those of its chunks, in their order, that fit the model's context together with the answer and the
    chunks `before` them, and a note of how many that leaves out. Where it has no others, the first one stays when none fits,
    to be refused as a chunk that was named is."""
    room = runtime.room(question.sampling)

    given = {planned.key: len(planned.chunk.token_ids) for planned in question.given}

    def size(key: bytes) -> int:
        manifest = None if key in given else chunk_of(store, key)
        return manifest.num_tokens if manifest else given.get(key, 0)

    used = len(runtime.template_of(question.wording, question.day).prefix_ids) + len(suffix_of(runtime, question))
    used += sum(map(size, before))
    kept: list[bytes] = []
    for key in question.keys:
        if runtime.fits(used + size(key), room):
            used += size(key)
            kept.append(key)
    if not (kept or before):
        kept = list(question.keys[:1])
    left = len(question.keys) - len(kept)
    if not left:
        return question
    note = (
        f"{left} of the {len(question.keys)} chunks found {'is' if left == 1 else 'are'} left out: the context of "
        f"{runtime.model.name} is {runtime.context:,} tokens, {room:,} of them for the answer"
    )
    return replace(question, keys=kept, notes=(*question.notes, note))


def in_order(store: ChunkStore, hits: Sequence[Hit], keys: Collection[bytes], order: str) -> list[bytes]:
    """Return those keys of hits in reading order: documents by their best hit, chunks of one document by their place.

    order "exact": only the beginning of a prompt can be exact, up to the first chunk that is not. So the document with the
    most exact tokens there comes first; of equals the one with the best hit.
    """
    documents = in_reading_order(hits, keys)
    if order == "exact" and len(documents) > 1:
        first = max(documents, key=partial(exact_tokens, store))
        documents = [first, *(d for d in documents if d is not first)]
    return [key for document in documents for key in document]


def in_reading_order(hits: Sequence[Hit], keys: Collection[bytes]) -> list[list[bytes]]:
    """Those of the keys by document, documents by their best hit, chunks of one document by their place."""
    places: dict[str, dict[bytes, int]] = {}
    for hit in hits:
        if hit.key in keys:
            places.setdefault(hit.source, {}).setdefault(hit.key, hit.index)
    return [sorted(document, key=document.__getitem__) for document in places.values()]


def exact_tokens(store: ChunkStore, keys: Sequence[bytes]) -> int:
    """Tokens of the chunks, from the first on, that were collected behind just what stands before them. Whether their KV
    was evicted since is no matter: the order of a prompt, and so its answer, does not depend on it."""
    left: tuple[int, ...] = ()
    for key in keys:
        manifest = chunk_of(store, key)
        if manifest is None or tuple(manifest.left_context_ids) != left:
            break
        left += tuple(manifest.token_ids)
    return len(left)


def exact_where_stored(runtime: Runtime, store: ChunkStore, question: Question) -> list[bytes]:
    """The question's chunks, each from the context that makes it exact at its place, where that is stored: behind just what
    stands before it here, whichever context was asked for."""
    collection = collection_of(runtime, store, question)
    found, left = list[bytes](), tuple[int, ...]()
    right = True  # what comes after a chunk that needs repair is never exact
    for key in question.keys:
        manifest = chunk_of(store, key)
        ids = manifest.token_ids if manifest else ()
        exact = collection.key(ids, left) if right else key
        right = right and (exact == key or store.has_kv(exact))
        found.append(exact if right else key)
        left += ids
    return found
