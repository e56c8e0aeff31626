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

    A chunk's page is its document: the chunks before it are its left context. Raises NotFoundError where nothing is
    found.
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
