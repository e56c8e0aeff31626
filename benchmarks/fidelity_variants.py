"""Ways to fill a prompt's KV that the study compares and the tool does not have: prefills for `Setting.prefill`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from cacheblend_store import ChunkStore
from torch import Tensor

from cacheblend_cli.api import BlendConfig, Engine
from cacheblend_cli.blend.corrections import CORRECTIONS, MeanShift, old_kv
from cacheblend_cli.blend.selectors import SELECTORS, Candidates, Evidence
from cacheblend_cli.collect.collector import Collector, PlannedChunk
from cacheblend_cli.collect.prefill import ChunkKV
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.engine.prefill import Prefilled, prefill
from cacheblend_cli.engine.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.evaluation.samples import Sample
from cacheblend_cli.evaluation.settings import Prefill, Setting
from cacheblend_cli.kv import forward
from cacheblend_cli.kv.rows import Rows
from cacheblend_cli.model.decoder import DecoderLayer


@contextmanager
def _swapped(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def bottom_right(*args: Any, **kwargs: Any) -> Prefilled:
    """The mask of the published code and of LMCache: the i-th of s rows sees all but the last s - 1 - i keys, wherever
    it stands, so a chosen token sees text that comes after it (CacheBlend issue 21, LMCache issue 1152)."""
    with _swapped(forward, "attend", _attend_bottom_right):
        return prefill(*args, **kwargs)


_attend = forward.attend


def _attend_bottom_right(layer: DecoderLayer, q: Tensor, rows: Rows) -> Tensor:
    num_rows, kv_len = len(rows), rows.attention.max_kv_len
    positions = torch.arange(kv_len - num_rows, kv_len, device=q.device)
    return _attend(layer, q, replace(rows, attention=replace(rows.attention, positions=positions)))


def scaled_keys(factor: float) -> Prefill:
    """The keys that are not recomputed, times a factor: the logits they get are sharpened or flattened, which is APE's
    attention temperature (arXiv 2502.05431, section 4.2). For settings with the correction "mean-shift", whose place it takes."""

    class ScaledKeys(MeanShift):
        def apply(self, layer: DecoderLayer, k: Tensor, v: Tensor) -> None:
            keys, values = old_kv(layer, self._stale)
            forward.write_kv(layer, keys * factor, values, self._stale)

    def run(*args: Any, **kwargs: Any) -> Prefilled:
        with patch.dict(CORRECTIONS, {"mean-shift": ScaledKeys}):
            return prefill(*args, **kwargs)

    return run


class ExpectedContexts:
    """Chunks collected behind several others each: the mean of their K and V, and how far each token's K strays from it.

    The mean is stored where the chunk's own KV would be, so any setting can use it. `spread` is a selector that takes
    the tokens that stray most, and needs no check layer; it works within `prefill`.
    """

    def __init__(
        self, engine: Engine, store: ChunkStore, num_contexts: int = 4, others: int = 2, seed: int = 0
    ) -> None:
        self._engine, self._store, self._num_contexts, self._others = engine, store, num_contexts, others
        self._rng = random.Random(seed)
        self._strays: dict[bytes, Tensor] = {}
        self._now: Tensor | None = None
        SELECTORS["spread"] = lambda seed: Spread(self)

    def collect(self, samples: Sequence[Sample]) -> None:
        """Collect and store every chunk of the samples."""
        engine, collection = self._engine, self._engine.runtime.collection()
        encode = engine.model.tokenizer.encode_text
        texts = {text: tuple(encode(text)) for text in sorted({c.text for s in samples for c in s.contexts})}
        collector = Collector(collection, self._store)
        collector.store_prefix()
        for text, ids in texts.items():
            behind = []
            for number in range(self._num_contexts):
                others = self._rng.sample([t for t in texts if t != text], self._others)
                left = tuple(i for t in others for i in texts[t])
                chunk = Chunk(0, text, ids, 0, len(text))
                behind.append(PlannedChunk(bytes([number]) * 32, "(sample)", chunk, left, "document"))
            kvs = list(collector.collect(behind))
            key = collection.key(ids)
            k = [torch.stack([kv.k[layer] for kv in kvs]) for layer in range(engine.model.spec.num_layers)]
            v = [torch.stack([kv.v[layer] for kv in kvs]) for layer in range(engine.model.spec.num_layers)]
            mean = ChunkKV(key, [x.mean(0) for x in k], [x.mean(0) for x in v])
            planned = PlannedChunk(key, "(sample)", Chunk(0, text, ids, 0, len(text)), (), "sink")
            collector.put(planned, mean)
            apart = (x - m for x, m in zip(k, mean.k, strict=True))
            self._strays[key] = torch.stack([a.square().sum((2, 3)).mean(0) for a in apart]).sum(0).sqrt()

    def prefill(self, runtime: Runtime, request: Request, *, room: int = 0) -> Prefilled:
        """`prefill`, with the spread of the prompt's tokens at hand."""
        plan = request.plan
        self._now = torch.zeros(plan.num_tokens)
        for segment, chunk in zip(plan.chunks, request.chunks, strict=True):
            self._now[segment.start : segment.end] = self._strays[chunk.key]
        return prefill(runtime, request, room=room)

    def spread(self, positions: Tensor) -> Tensor:
        assert self._now is not None, "the selector `spread` is for settings with this prefill"
        return self._now[positions]


class Spread:
    """`spread`: the tokens whose K depends most on what stands before them."""

    needs_check_layer = False

    def __init__(self, contexts: ExpectedContexts) -> None:
        self._contexts = contexts

    def scores(self, candidates: Candidates, evidence: Evidence) -> Tensor:
        return self._contexts.spread(candidates.positions)


def further_settings() -> list[Setting]:
    """Chunks collected alone, what is not recomputed moved by regression, over choices that tell it more and less."""
    return [
        Setting(f"{selector}, regression 0.15", BlendConfig(selector=selector, ratio=0.15, correction="regression"))
        for selector in ("random:2+query", "random", "draft")
    ]
