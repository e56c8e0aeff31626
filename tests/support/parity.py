"""Compare a model with transformers and with a second implementation of blending."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blend_reference import Reference
from cacheblend_store import ChunkStore
from checkpoints import WORDS
from hub_models import HubModel, load_reference

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

NUM_GENERATED = 6
PROMPT = "{chunks}\n\n{question}"  # short: some of the models have a context of 256 tokens
QUESTION, GREEDY = "where does Mara work?", SamplingParams(max_tokens=NUM_GENERATED, ignore_eos=True)


@dataclass(frozen=True)
class Parity:
    """Largest differences of logits."""

    full: float  # full prefill vs transformers, at every position
    everything: float  # blending at ratio 1 vs full prefill, over the question
    some: float  # blending at ratio .15 vs the reference, over the question
    repair: float  # that reference vs a full prefill: the sensitivity of the comparison
    reference: float  # the reference at ratio 1 vs transformers
    same_choice: bool  # the same tokens were recomputed
    same_answer: bool  # decoding gave the tokens that transformers generates
    num_tokens: int


def write_documents(folder: Path, num_paragraphs: int = 2) -> Path:
    """Two documents, with a chunk of 40 tokens a paragraph where the tokenizer is that of `checkpoints`."""
    folder.mkdir(parents=True, exist_ok=True)
    for d in range(2):
        paragraphs = [" ".join(WORDS[(d + p) % 7 : (d + p) % 7 + 9]) + f" {d}{p}." for p in range(num_paragraphs)]
        (folder / f"{d}.md").write_text("\n\n".join(paragraphs) + "\n")
    return folder


def compare(model: HubModel, path: Path, documents: Path, **settings: Any) -> Parity:
    """Write the model below `path`, and run it everywhere. settings: more of the engine's."""
    model.write(path / "model")
    exact: dict[str, Any] = {"dtype": "float32", "kv_dtype": "exact"}
    engine = Engine.load(EngineConfig(model=str(path / "model"), block_size=16, prompt=PROMPT, **exact, **settings))
    store = ChunkStore.open(path / "store", mode="write")
    try:
        options = PrecomputeOptions(chunk_tokens=40, context="sink")
        engine.precompute(store, [str(documents)], options, lambda event: None)
        keys = [m.key for m in sorted(store.chunks(), key=lambda m: (m.source, m.index))][:4]
        return _compare(engine, store, keys, Reference(load_reference(path / "model")))
    finally:
        store.close()


def _compare(engine: Engine, store: ChunkStore, keys: list[bytes], reference: Reference) -> Parity:
    def run(blend: BlendParams) -> Any:
        request = resolve(engine.runtime, store, AskRequest(QUESTION, keys, blend, GREEDY))
        done = prefill(
            engine.runtime, request, output_positions=lambda plan: torch.arange(
                0 if blend.mode == "full" else plan.segments[-1].start, plan.num_tokens
            ),
        )  # fmt: skip
        done.sequence.release()
        return done

    full = run(BlendParams(mode="full"))
    everything = run(BlendParams(ratio=1.0, selector="hkvd"))
    some = run(BlendParams(ratio=0.15, selector="hkvd", correction="none"))
    answer = engine.run_alone(store, AskRequest(QUESTION, keys, BlendParams(mode="full"), GREEDY))

    plan, suffix = full.plan, [*full.plan.segments[-1].token_ids]
    prefix, chunks = [*plan.segments[0].token_ids], [[*segment.token_ids] for segment in plan.chunks]
    theirs, same_answer = reference.continues([*plan.token_ids], [*answer.generated_ids])
    logits, chosen = reference.blend(prefix, chunks, suffix, 0.15)
    of_all, _ = reference.blend(prefix, chunks, suffix, 1.0)
    question = slice(-len(suffix), None)
    return Parity(
        full=_apart(full.result.logits, theirs),
        everything=_apart(everything.result.logits, full.result.logits[question]),
        some=_apart(some.result.logits, logits),
        repair=_apart(logits, theirs[question]),
        reference=_apart(of_all, theirs[question]),
        same_choice=some.result.chosen.tolist() == chosen,
        same_answer=same_answer and len(answer.generated_ids) == NUM_GENERATED,
        num_tokens=plan.num_tokens,
    )


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double().cpu() - b.double().cpu()).abs().max())
