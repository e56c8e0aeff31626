"""A question's chunks, where it names none: searched, as many as fit the prompt, in reading order, exact where they can be."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from cacheblend_store import ChunkStore

from cacheblend_cli.corpus.contexts import prefer_exact
from cacheblend_cli.corpus.scopes import EVERYTHING, Scope
from cacheblend_cli.corpus.search import Hit, found_elsewhere, search
from cacheblend_cli.prompt.mismatch import nothing_found
from cacheblend_cli.runtime.request import Question, chunk_of, collection_of, suffix_of
from cacheblend_cli.runtime.runtime import Runtime


@dataclass(frozen=True)
class Lookup:
    """How to search. context: which of a document's contexts counts, see corpus/contexts.py. scope: of which documents."""

    k: int = 5
    context: str = "document"
    scope: Scope = EVERYTHING


def with_chunks(runtime: Runtime, store: ChunkStore, question: Question, lookup: Lookup) -> Question:
    """The question with the best chunks for it.

    Raises NotFoundError, which says why, when there are none: nothing of this model, or nothing in the scope.
    """
    runtime.take_date(store, question.salt)
    collections = [collection.id for collection in runtime.collections(question.salt, question.wording)]
    hits = search(store, question.text, lookup.k, collections, lookup.context, lookup.scope)
    if not hits:
        if search(store, question.text, 1, collections):
            raise found_elsewhere()
        raise nothing_found(store, runtime.collection(question.salt, wording=question.wording), collections)
    question = fitting(runtime, store, replace(question, keys=[hit.key for hit in hits]))
    question = replace(question, keys=in_reading_order(hits, question.keys))
    return replace(question, keys=exact_where_stored(runtime, store, question))


def fitting(runtime: Runtime, store: ChunkStore, question: Question) -> Question:
    """The question with those of its chunks, in their order, that fit the model's context together with the answer, and a
    note of how many that leaves out. The first one stays when none fits, to be refused as a chunk that was named is."""
    room = runtime.room(question.sampling)
    used = len(runtime.template_of(question.wording).prefix_ids) + len(suffix_of(runtime, question))
    kept: list[bytes] = []
    for key in question.keys:
        manifest = chunk_of(store, key)
        size = manifest.num_tokens if manifest else 0
        if runtime.fits(used + size, room):
            used += size
            kept.append(key)
    kept = kept or list(question.keys[:1])
    left = len(question.keys) - len(kept)
    if not left:
        return question
    note = (
        f"{left} of the {len(question.keys)} chunks found {'is' if left == 1 else 'are'} left out: the context of "
        f"{runtime.model.name} is {runtime.context:,} tokens, {room:,} of them for the answer"
    )
    return replace(question, keys=kept, notes=(*question.notes, note))


def in_reading_order(hits: Sequence[Hit], keys: Collection[bytes]) -> list[bytes]:
    """Those of the keys, documents by their best hit, chunks of one document by their place."""
    rank = {hit.source: i for i, hit in reversed(list(enumerate(hits)))}
    return [hit.key for hit in sorted(hits, key=lambda hit: (rank[hit.source], hit.index)) if hit.key in keys]


def exact_where_stored(runtime: Runtime, store: ChunkStore, question: Question) -> list[bytes]:
    """The question's chunks, each from the context that makes it exact at its place, where that is stored."""

    def ids_of(key: bytes) -> tuple[int, ...]:
        manifest = chunk_of(store, key)
        return manifest.token_ids if manifest else ()

    return prefer_exact(question.keys, ids_of, collection_of(runtime, store, question).key, store.has_kv)
