"""Random questions on a fake GPU: none fails, races, or waits in a layer or a decode step."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from gpu_engine import Setup, capture_graphs, check_waits, engine_gpu

from cacheblend_cli.types import AskOptions, AskRequest, BlendParams, SamplingParams

ALLOWED_WAITS = {"layers": 0, "decode": 0}
"""Phase -> synchronisations and pageable copies of all questions."""
COUNT = 30
SELECTORS = ("query", "hkvd", "hkvd", "first", "random", "first:1+query")


def random_question(rng: random.Random, keys: list[bytes]) -> AskRequest:
    blend = BlendParams(
        ratio=rng.choice((0.02, 0.15, 0.5, 0.8, 0.95)),
        selector=rng.choice(SELECTORS),
        block=rng.choice((1, 1, 3)),
        correction=rng.choice(("regression", "regression", "none")),
    )
    sampling = SamplingParams(
        max_tokens=rng.choice((1, 3)), ignore_eos=True, temperature=rng.choice((0.0, 0.7)), seed=1
    )
    return AskRequest("what is it?", rng.sample(keys, rng.randint(1, len(keys))), blend, sampling)


def test_random_questions(tmp_path: Path) -> None:
    rng = random.Random(5)
    setup = Setup.write(tmp_path, num_chunks=9, model={"num_hidden_layers": 3})
    with engine_gpu() as gpu, setup.store() as store:
        engine = setup.engine("cuda")
        keys = setup.precompute(engine, store)
        engine.runtime.memory()
        gpu.clear()
        for number in range(COUNT):
            ask = random_question(rng, keys)
            ask = replace(ask, options=AskOptions(verify=rng.random() < 0.1))
            answer = engine.run_alone(store, ask)
            capture_graphs(engine)
            assert not gpu.errors, (number, ask)
            assert len(answer.generated_ids) == ask.sampling.max_tokens
        check_waits(gpu, ALLOWED_WAITS)
