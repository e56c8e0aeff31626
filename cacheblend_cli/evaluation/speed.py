"""Time to the first token of a prompt of random ids whose chunks are stored, and the cost model's ceiling."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from cacheblend_store import ChunkStore
from cacheblend_store.lmdb_file.directory import check_space
from torch import Tensor

from cacheblend_cli.blend.policy import policy_of
from cacheblend_cli.collect.collector import Collector, PlannedChunk
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.engine.engine import Engine, Prefilled, Request
from cacheblend_cli.model.cpu import cpu_name
from cacheblend_cli.model.loading import LoadedModel
from cacheblend_cli.prompt.plan import PromptPlan
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

T = TypeVar("T")
Ids = tuple[int, ...]


@dataclass(frozen=True)
class PromptLayout:
    """Token ids of a prompt after the collection's prefix."""

    chunks: tuple[Ids, ...]
    suffix_ids: Ids
    question_tokens: int = 0  # of the suffix


@dataclass(frozen=True)
class FirstToken:
    seconds: float  # from the known question to the first token: plan, KV load, rotation, prefill, argmax
    load_s: float = 0.0  # from the loader's start to its last layer
    stall_s: float = 0.0  # time that computing waited for KV
    kv_bytes: int = 0


@dataclass(frozen=True)
class SpeedPrompt:
    """A prompt with stored chunks, to be prefilled repeatedly under any setting."""

    engine: Engine
    request: Request  # with notes if stored KV was not used: then the measurement is of another setting
    headroom: int  # tokens that can be decoded after it

    @classmethod
    def stored(cls, engine: Engine, store: ChunkStore, layout: PromptLayout, headroom: int) -> SpeedPrompt:
        """Collect and store prefix and chunks. Raises StoreNoSpace, before computing if that is clear."""
        collection = engine.collection(store)
        lengths = len(collection.prefix_ids), *map(len, layout.chunks)
        check_space(store.path, sum(map(collection.chunk_bytes, lengths)))
        collector = Collector(collection, store)
        planned = [
            PlannedChunk(collection.key(ids), "bench", Chunk(n, "", ids, 0, 0), (), "sink")
            for n, ids in enumerate(layout.chunks)
        ]
        for _ in collector.store(planned):
            pass
        ask = AskRequest("", [p.key for p in planned])
        return cls(engine, engine.resolve(store, ask, suffix_ids=layout.suffix_ids), headroom)

    def plan(self, blend: BlendParams) -> PromptPlan:
        return replace(self.request, blend=blend).plan

    def prefill(self, blend: BlendParams) -> Prefilled:
        """Prefill the prompt. The caller releases the sequence."""
        return self.engine.hold_prefill(replace(self.request, blend=blend), headroom=self.headroom)

    def first_token(self, blend: BlendParams) -> FirstToken:
        start = time.perf_counter()
        done = self.prefill(blend)
        try:
            int(done.logits.argmax())  # waits for a GPU's result on the host
            seconds = time.perf_counter() - start
            loader = done.result.loader
            return FirstToken(seconds, loader.load_s, loader.stall_s, loader.num_bytes)
        finally:
            done.sequence.release()

    def decode(self, num_tokens: int) -> float:
        """Return tokens per second after the first of num_tokens (2 or more), decoded greedily over reused KV."""
        done = self.prefill(BlendParams(mode="reuse"))
        try:
            sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            return done.answer(sampling).tokens_per_s
        finally:
            done.sequence.release()


def ordinary_ids(model: LoadedModel) -> Tensor:
    """Return the ids that text can have, without special, added and padding ids, [n] int64."""
    ordinary = torch.ones(min(model.spec.vocab_size, model.tokenizer.vocab_size), dtype=torch.bool)
    ordinary[[i for i in model.tokenizer.added_ids | model.eos_ids if i < len(ordinary)]] = False
    return ordinary.nonzero().flatten()


def random_ids(ordinary: Tensor, count: int, generator: torch.Generator) -> Ids:
    return tuple(ordinary[torch.randint(len(ordinary), (count,), generator=generator)].tolist())


def ceiling(plan: PromptPlan, layers: int, blend: BlendParams) -> float:
    """Return the speed-up over a full prefill that the cost model allows: rows of a full prefill divided by rows
    computed.

    Layers before the check layer compute all rows that are not exact (layer 0 without their K and V); the check layer
    and those after it compute the chosen rows and the suffix; without a check layer, all layers do. Loading counts as
    hidden; the cost of choosing, of the correction, and of the check layer's K and V is left out.
    """
    policy = policy_of(blend, layers, True)
    checks = dict(policy.checks if policy.needs_check_layer else ((0, blend.effective_ratio()),))
    ratio, computed = 1.0, 0.0
    for layer in range(layers):
        ratio = checks.get(layer, ratio)
        computed += ratio * plan.inexact_tokens + plan.fresh_tokens
    return layers * plan.num_tokens / computed


def in_turn(
    cases: Mapping[str, Callable[[], T]], rounds: int, on_run: Callable[[int, int, str], None] = lambda *_: None
) -> dict[str, list[T]]:
    """Run every case once per round, so that all see the same machine; the first of rounds + 1 is a warm-up. on_run:
    called with runs done, number of runs, and the next case."""
    found: dict[str, list[T]] = {name: [] for name in cases}
    for round_ in range(rounds + 1):
        for index, (name, case) in enumerate(cases.items()):
            on_run(round_ * len(cases) + index, (rounds + 1) * len(cases), name)
            result = case()
            if round_:
                found[name].append(result)
    return found


def even_lengths(total: int, parts: int) -> Sequence[int]:
    """Return lengths of `parts` chunks of `total` tokens, the first ones a token longer if it does not divide."""
    size, longer = divmod(total, parts)
    return [size + 1] * longer + [size] * (parts - longer)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name()
