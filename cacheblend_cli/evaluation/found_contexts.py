"""Contexts for questions without their own: the stored chunks that `ask` would find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cacheblend_store import ChunkStore

from cacheblend_cli.api import BlendConfig, Engine, Question, SamplingParams
from cacheblend_cli.corpus.search import Lookup
from cacheblend_cli.evaluation.samples import Context, Sample


def with_found_contexts(
    engine: Engine, store: ChunkStore, samples: Sequence[Sample], lookup: Lookup, max_tokens: int
) -> list[Sample]:
    """Return the samples, those without contexts with the chunks found for their question.

    A chunk's page is its document: the chunks before it are its left context. Raises NotFoundError where nothing is found.
    """
    pages = _Pages(store)
    found = []
    for sample in samples:
        if not sample.contexts:
            asked = Question(sample.question, (), BlendConfig(), SamplingParams(max_tokens=max_tokens))
            keys = engine.search(store, asked, lookup).keys
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
