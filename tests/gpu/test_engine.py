"""Answers on a fake GPU: those of the CPU, with all work in order, and without waiting in layers and decode steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_engine import Setup, capture_graphs, check_waits, engine_gpu, row_tile

from cacheblend_cli.blend.policy import row_tile_of
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

ALLOWED_WAITS = {"layers": 0, "decode": 0}
"""Phase -> synchronisations and pageable copies of the questions."""
NUM_ANSWERS = 2
"""The second replays what is captured after the first."""
EXPERTS = ("cacheblend_cli/model/experts.py",)  # reads the experts' row counts on the host
LATENT = ("kernels/cacheblend_kernels/torch_", "cacheblend_cli/blend/corrections.py", *EXPERTS)  # no Triton kernels

SAMPLED = {
    "temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "logprobs": 3, "repetition_penalty": 1.1,
    "presence_penalty": 0.1, "frequency_penalty": 0.2, "logit_bias": ((40, 1.5), (41, -2.0)), "seed": 3,
}  # fmt: skip

GIVEN = {"logprobs": 3, "logit_bias": ((40, 1000.0),)}
"""One answer whatever is rounded, with the logprobs that the model gives it. In bfloat16 near ties of tokens and of
selectors' scores fall either way with the CPU's instructions."""


@dataclass(frozen=True)
class Case:
    """family: of `checkpoints`; model, settings: changes of its config and of the engine's; tile: rows are rounded to
    a multiple of it; waiting: beginnings of call sites that may wait in layers and decode steps; rounding: bound of
    logprobs' differences."""

    family: str = "llama-gqa"
    blend: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    num_chunks: int = 4
    tile: int = 1
    waiting: tuple[str, ...] = ()
    rounding: float = 1e-3

    def question(self, keys: list[bytes]) -> AskRequest:
        blend = BlendParams(**{"ratio": 0.3, "selector": "query"} | self.blend)
        sampling = SamplingParams(**{"max_tokens": 6, "ignore_eos": True} | self.sampling)
        return AskRequest("what is it?", keys, blend, sampling)


CASES = {
    "query": Case(),
    "hkvd": Case(blend={"selector": "hkvd"}),
    "hkvd, uncorrected": Case(blend={"selector": "hkvd", "correction": "none"}),
    "gradual": Case(blend={"selector": "hkvd", "checks": ((1, 0.5), (2, 0.2))}),
    "first and query, in runs": Case(blend={"selector": "first:2+query", "block": 3}),
    "eager": Case(settings={"eager": True}),
    "a GPU's rows": Case(blend={"selector": "hkvd"}, num_chunks=11, tile=row_tile_of(torch.device("cuda"))),
    "int7": Case(settings={"kv_dtype": "int7"}),
    "bfloat16": Case(
        blend={"selector": "first"}, sampling=GIVEN, settings={"dtype": "bfloat16", "kv_dtype": "int7"}, rounding=0.1
    ),
    "float8 pool": Case(blend={"selector": "hkvd"}, settings={"kv_pool_dtype": "float8_e4m3"}),
    "sampled": Case("qwen3", sampling=SAMPLED),
    "windows": Case("mistral-window", blend={"selector": "hkvd", "block": 2}),
    "some windows": Case("qwen2-window"),
    "yarn": Case("llama-yarn"),
    "experts": Case("qwen3-moe", waiting=EXPERTS),
    "latent attention": Case("deepseek", model={"num_hidden_layers": 3}, waiting=LATENT),
    "shapes": Case("gemma4", model={"num_hidden_layers": 6}),
    "reuse": Case(blend={"mode": "reuse"}),
    "full": Case(blend={"mode": "full"}),
}


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = {"num_hidden_layers": 4} | case.model
    setup = Setup.write(tmp_path, case.family, case.num_chunks, model, **case.settings)
    with setup.store() as store:
        with engine_gpu(case.tile) as gpu:
            engine = setup.engine("cuda")
            ask = case.question(setup.precompute(engine, store))
            engine.runtime.memory()
            gpu.counts.clear()
            answers = []
            for _ in range(NUM_ANSWERS):
                answers.append(engine.run_alone(store, ask))
                capture_graphs(engine)
            assert not gpu.errors
            check_waits(gpu, ALLOWED_WAITS, case.waiting)
        with row_tile(case.tile):
            expected = setup.engine("cpu").run_alone(store, ask)
    for answer in answers:
        assert answer.generated_ids == expected.generated_ids
        assert answer.chosen == expected.chosen
        found, wanted = ([t.logprob for t in a.logprobs] for a in (answer, expected))
        assert found == pytest.approx(wanted, abs=case.rounding)
    if ask.blend.mode == "blend":
        assert 0 < len(expected.chosen) < expected.cached_tokens
