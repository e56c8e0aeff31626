"""Contexts for questions without their own: the stored chunks that `ask` would find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cacheblend_store import ChunkStore

from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.evaluation.samples import Context, Sample
from cacheblend_cli.types import AskRequest, SamplingParams, SearchParams


def with_found_contexts(
    engine: Engine, store: ChunkStore, samples: Sequence[Sample], search: SearchParams, max_tokens: int
) -> list[Sample]:
    """Return the samples, those without contexts with the chunks found for their question.

    A chunk's page is its document: the chunks before it are its left context. Raises NotFoundError where nothing is found.
    """
    pages = _Pages(store)
    found = []
    for sample in samples:
        if not sample.contexts:
            ask = AskRequest(sample.question, sampling=SamplingParams(max_tokens=max_tokens), search=search)
            keys = engine.search(store, ask).keys
            sample = replace(sample, contexts=tuple(map(pages.context, keys)))
        found.append(sample)
    return found


class _Pages:
    """Texts of the chunks before each chunk of a document."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._before: dict[bytes, tuple[bytes, ...]] = {}
        for document in store.documents():
            keys = [chunk.key for chunk in document.chunks]
            self._before.update({key: tuple(keys[:i]) for i, key in enumerate(keys)})

    def context(self, key: bytes) -> Context:
        manifest = self._store.get_chunk(key)
        assert manifest is not None
        before = [self._store.get_chunk(other) for other in self._before.get(key, ())]
        return Context(manifest.text, manifest.source, tuple(m.text for m in before if m is not None))
