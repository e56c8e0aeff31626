"""Prefills of one prompt over a random model and a store of some chunks."""

from __future__ import annotations

from pathlib import Path

import torch
from cacheblend_store import ChunkStore
from checkpoints import WORDS, write_checkpoint

from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import Prefilled
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.evaluation.settings import Prefill
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

QUESTION = "where does Mara work?"


class Bench:
    """A random model, a store of some chunks, and prefills of a prompt over them."""

    def __init__(self, root: Path, family: str = "llama-gqa") -> None:
        write_checkpoint(root / "model", family)
        self.engine = Engine.load(EngineConfig(model=str(root / "model"), block_size=16, kv_dtype="exact"))
        docs = root / "docs"
        docs.mkdir()
        for d in range(3):
            text = " ".join(WORDS[(d * 3 + p) % len(WORDS)] for p in range(24))
            (docs / f"{d}.md").write_text(text + ".\n")
        self.store = ChunkStore.open(root / "store", mode="write")
        self.engine.precompute(self.store, [str(docs)], PrecomputeOptions(chunk_tokens=40), lambda event: None)
        self.keys = [m.key for m in sorted(self.store.chunks(), key=lambda m: (m.source, m.index))]

    def prefill(self, blend: BlendParams, headroom: int = 16, run: Prefill = Engine.hold_prefill) -> Prefilled:
        request = resolve(
            self.engine.runtime, self.store, AskRequest(QUESTION, self.keys, blend, SamplingParams(max_tokens=headroom))
        )
        return run(self.engine, request, headroom=headroom)

    def prompt(self, done: Prefilled) -> Prompt:
        """The prompt of a prefill, as the corrections get it."""
        return Prompt(self.engine.model.decoder, done.plan, done.sequence, done.result.loader)

    def kv_error(self, blend: BlendParams) -> float:
        """Squared distance of the pool's K and V from full prefill's, over layers above 0."""
        ours, full = self.prefill(blend), self.prefill(BlendParams(mode="full"))
        slots = torch.arange(ours.plan.num_tokens)
        return sum(
            float((a - b).square().sum())
            for layer in range(1, len(ours.pool.layers))
            for a, b in zip(*(done.pool.read(layer, slots) for done in (ours, full)), strict=True)
        )
