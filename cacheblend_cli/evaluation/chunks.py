"""Chunks of samples: stored for a setting, each collected in its context, or found in the store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

from cacheblend_store import ChunkStore

from cacheblend_cli.collect.collector import Collector, PlannedChunk
from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.corpus.contexts import Neighbours, Passage, document_contexts
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.evaluation.samples import Context, Sample
from cacheblend_cli.types import AskRequest, SamplingParams, SearchParams

SOURCE = "(sample)"


class SampleChunks:
    """Plans, collects and names the chunks of samples. Every text is encoded once. corpus: samples whose chunks may be
    neighbours (those of a run). collecting: window and number of neighbours."""

    def __init__(
        self,
        engine: Engine,
        store: ChunkStore,
        corpus: Sequence[Sample] = (),
        collecting: CollectSettings | None = None,
    ) -> None:
        self._store, self._corpus = store, corpus
        self._collection = engine.collection(store)
        self._collector = Collector(self._collection, store)
        self._options = collecting or CollectSettings()
        self._window = self._collection.window(self._options.window)
        self._encode = cache(lambda text: tuple(engine.model.tokenizer.encode_text(text)))
        self._plan = cache(self._planned)

    def keys(self, sample: Sample, context: str) -> list[bytes]:
        """Return the keys of the sample's chunks in prompt order. context: see corpus/contexts.py."""
        return [self._plan(c, context).key for c in sample.contexts]

    def num_tokens(self, sample: Sample) -> int:
        return sum(len(self._encode(c.text)) for c in sample.contexts)

    def store(self, samples: Iterable[Sample], contexts: Sequence[str]) -> int:
        """Collect and store missing chunks; return their number."""
        wanted = {
            planned.key: planned
            for sample in samples
            for context in contexts
            for planned in (self._plan(c, context) for c in sample.contexts)
        }
        missing = [p for p in wanted.values() if not self._store.has_kv(p.key)]
        return sum(1 for _ in self._collector.store(missing))

    def _planned(self, context: Context, kind: str) -> PlannedChunk:
        ids, left = self._encode(context.text), self._left(context, kind)
        chunk = Chunk(len(context.before), context.text, ids, 0, len(context.text))
        return PlannedChunk(self._collection.key(ids, left), SOURCE, chunk, left, kind)

    def _left(self, context: Context, kind: str) -> tuple[int, ...]:
        """Ids between the prefix and the chunk, as `precompute --context` has them."""
        if kind == "document":
            page = [self._encode(text) for text in (*context.before, context.text)]
            return list(document_contexts(page, self._window))[-1]
        return self._neighbours.left(self._encode(context.text)) if kind == "neighbours" else ()

    def facts(self, context: str) -> dict[str, Any]:
        """Return the settings that left contexts of this kind depend on, besides the sample."""
        facts: dict[str, Any] = {} if context == "sink" else {"window": self._window}
        if context == "neighbours":
            facts |= {"neighbours": self._options.neighbours, "corpus": self._corpus_digest}
        return facts

    @cached_property
    def _corpus_digest(self) -> str:
        texts = sorted({c.text for sample in self._corpus for c in sample.contexts})
        return hashlib.blake2b("\0".join(texts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    @cached_property
    def _neighbours(self) -> Neighbours:
        passages = (Passage(c.text, self._encode(c.text)) for s in self._corpus for c in s.contexts)
        return Neighbours(passages, self._options.neighbours, self._window)


def with_found_contexts(
    engine: Engine, store: ChunkStore, samples: Sequence[Sample], search: SearchParams, max_tokens: int
) -> list[Sample]:
    """Return the samples, those without contexts with the chunks found for their question.

    A chunk's page is its document: the chunks before it are its left context. Raises NotFoundError if nothing is found.
    """
    before: dict[bytes, list[bytes]] = {}  # chunk -> those before it in its document
    for document in store.documents():
        keys = [chunk.key for chunk in document.chunks]
        before.update({key: keys[:i] for i, key in enumerate(keys)})
    found = []
    for sample in samples:
        if not sample.contexts:
            ask = AskRequest(sample.question, sampling=SamplingParams(max_tokens=max_tokens), search=search)
            hits = engine.search(store, ask).keys
            sample = replace(sample, contexts=tuple(_context(store, key, before.get(key, ())) for key in hits))
        found.append(sample)
    return found


def _context(store: ChunkStore, key: bytes, before: Sequence[bytes]) -> Context:
    """Return a stored chunk with the texts of the chunks before it."""
    manifest = store.get_chunk(key)
    assert manifest is not None
    page = [store.get_chunk(other) for other in before]
    return Context(manifest.text, manifest.source, tuple(m.text for m in page if m is not None))
