"""Whether blending is to be trusted with a model: a few prompts over the handbook's pages, each collected alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cacheblend_store import ChunkStore

from cacheblend_cli.api import BlendConfig, Engine, PrecomputeOptions, Question, SamplingParams
from cacheblend_cli.demo import handbook_dir, questions
from cacheblend_cli.evaluation.measures import Wanted, run_full, run_setting
from cacheblend_cli.runtime.request import resolve

PROMPTS, PAGES, ANSWER_TOKENS = 8, 4, 16
RATIOS = (BlendConfig().ratio, 0.3)
KL, SAME = 0.05, 0.75
"""Blending is safe at a ratio whose answers' KL is at most the one, in nats a token, and of which the other share is the same."""


@dataclass(frozen=True)
class Blended:
    """A ratio against full prefill, over full prefill's own answers. kl: mean, nats a token; top1: share of their tokens that
    blending would say too; same_answers: of `answers`, the others differ in a token."""

    ratio: float
    kl: float
    top1: float
    same_answers: int
    answers: int

    @property
    def safe(self) -> bool:
        return self.kl <= KL and self.same_answers >= SAME * self.answers


def check_blend(engine: Engine, store: ChunkStore) -> list[Blended]:
    """Measure the ratios in turn, up to the first that is safe."""
    runtime, asked = engine.runtime, questions()[:PROMPTS]
    pages = sorted(handbook_dir().glob("*.md"))[: PROMPTS + PAGES]
    size = runtime.context // (2 * PAGES)
    engine.precompute(
        store, [str(page) for page in pages], PrecomputeOptions(chunk_tokens=size, context="sink"), lambda event: None
    )
    first = [m.key for m in sorted(store.chunks(), key=lambda m: m.source) if m.index == 0 and m.context == "sink"]
    max_tokens = min(ANSWER_TOKENS, runtime.context // 16)
    sampling = SamplingParams(max_tokens=max_tokens)
    found: list[Blended] = []
    requests = [
        resolve(runtime, store, Question(q.question, first[n : n + PAGES], sampling=sampling))
        for n, q in enumerate(asked)
    ]
    references = [run_full(runtime, request, Wanted(max_tokens, max_tokens), 0.0) for request in requests]
    for ratio in RATIOS:
        blends = [replace(request, blend=BlendConfig(ratio=ratio)) for request in requests]
        measured = [
            run_setting(runtime, request, reference, 0.0).divergence
            for request, reference in zip(blends, references, strict=True)
        ]
        kl = [k for m in measured for k in m.kl]
        top1 = [same for m in measured for same in m.top1]
        same = sum(m.first_difference is None for m in measured)
        found.append(Blended(ratio, sum(kl) / len(kl), sum(top1) / len(top1), same, len(measured)))
        if found[-1].safe:
            break
    return found


def verdict(found: Sequence[Blended]) -> str:
    """In the words of the command line."""
    if not found[-1].safe:
        return "use --mode full"
    return "blend is safe" if found[-1].ratio == BlendConfig().ratio else f"blend needs --ratio {found[-1].ratio:g}"
