"""Models as the hub has them, in small: read as transformers reads them and blended as a second implementation blends, or
refused by the name of what is not implemented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from blend_reference import Reference
from cacheblend_store import ChunkStore
from checkpoints import WORDS
from hub_models import REFUSED, RUN, HubModel
from transformers import AutoModelForCausalLM

from cacheblend_cli.api import BlendConfig, Engine, EngineConfig, PrecomputeOptions, SamplingParams
from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.model.loading import load_model
from cacheblend_cli.runtime.prefill import prefill
from cacheblend_cli.runtime.request import Question, resolve

QUESTION, GREEDY = "where does Mara work?", SamplingParams(max_tokens=4, ignore_eos=True)
TOLERANCE = 1e-4  # of logits up to some 10: the engine computes in float32, the reference in float64


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    for d in range(2):
        paragraphs = [" ".join(WORDS[(d + p) % 7 : (d + p) % 7 + 9]) + f" {d}{p}." for p in range(3)]
        (folder / f"{d}.md").write_text("\n\n".join(paragraphs) + "\n")
    return folder


class Run:
    """An engine over the model, and the chunks of two documents in its store."""

    def __init__(self, model: HubModel, path: Path, documents: Path) -> None:
        model.write(path / "model")
        self.engine = Engine.load(
            EngineConfig(model=str(path / "model"), dtype="float32", block_size=16, kv_dtype="float32")
        )
        self.store = ChunkStore.open(path / "store", mode="write")
        self.engine.precompute(
            self.store, [str(documents)], PrecomputeOptions(chunk_tokens=40, context="sink"), lambda event: None
        )
        self.keys = [m.key for m in sorted(self.store.chunks(), key=lambda m: (m.source, m.index))][:4]

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.store.close()

    def prefill(self, blend: BlendConfig) -> Any:
        request = resolve(self.engine.runtime, self.store, Question(QUESTION, self.keys, blend, GREEDY))
        done = prefill(
            self.engine.runtime, request, output_positions=lambda plan: torch.arange(
                0 if blend.mode == "full" else plan.segments[-1].start, plan.num_tokens
            ),
        )  # fmt: skip
        done.sequence.release()
        return done


@pytest.mark.parametrize("model", RUN, ids=lambda model: model.name)
def test_full_prefill_is_transformers_and_blending_is_the_reference(
    model: HubModel, tmp_path: Path, documents: Path
) -> None:
    with Run(model, tmp_path, documents) as run:
        _compare(run, tmp_path)


def _compare(run: Run, path: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(path / "model", dtype=torch.float64).eval()
    reference = Reference(loaded)

    full = run.prefill(BlendConfig(mode="full"))
    plan, suffix = full.plan, len(full.plan.segments[-1].token_ids)
    assert plan.num_tokens > 100
    assert (full.result.logits - reference.full(plan.token_ids)).abs().max() <= TOLERANCE

    everything = run.prefill(BlendConfig(ratio=1.0, selector="hkvd"))
    assert (everything.result.logits - full.result.logits[-suffix:]).abs().max() <= TOLERANCE

    some = run.prefill(BlendConfig(ratio=0.15, selector="hkvd"))
    prefix = [*plan.segments[0].token_ids]
    chunks = [[*segment.token_ids] for segment in plan.chunks]
    logits, chosen = reference.blend(prefix, chunks, [*plan.segments[-1].token_ids], 0.15)
    assert some.result.chosen.tolist() == chosen
    assert (some.result.logits - logits).abs().max() <= TOLERANCE
    assert (
        logits - reference.full(plan.token_ids)[-suffix:]
    ).abs().max() > 10 * TOLERANCE  # or this would prove little


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.name)
def test_it_is_refused_by_name(model: HubModel, tmp_path: Path) -> None:
    model.write(tmp_path / "m")
    with pytest.raises(CacheBlendError) as refused:
        load_model(tmp_path / "m", "m", torch.device("cpu"), "float32", "torch")
    assert model.refused in refused.value.message
    assert refused.value.hint
    assert refused.value.exit_code == 2


def test_there_are_enough_of_them() -> None:
    assert len({model.name for model in RUN}) == len(RUN) >= 60
    assert len({model.name for model in REFUSED}) == len(REFUSED)
