"""The profile of a model: rising ratios measured on stored chunks, until one is close enough to a full prefill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cacheblend_store import ChunkStore
from checkpoints import WORDS, write_checkpoint

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.profile import Profile
from cacheblend_cli.errors import NotFoundError
from cacheblend_cli.evaluation.profile import (
    GENERAL,
    LEAST_PROMPTS,
    PROMPTS,
    RATIOS,
    distance,
    distance_of,
    full_answer,
    general_requests,
    half_sentence,
    measure_profile,
    p90_limit,
    usable,
)  # fmt: skip
from cacheblend_cli.types import AskRequest, BlendParams, SearchParams

ASK = AskRequest("", search=SearchParams(k=3, by="words"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("m") / "m"
    write_checkpoint(path, "qwen2", max_position_embeddings=1024, num_hidden_layers=2)
    return Engine.load(EngineConfig(model=str(path), dtype="float32"))


def stored(engine: Engine, folder: Path, documents: int) -> ChunkStore:
    """Return a store of documents of one sentence each, collected alone."""
    (folder / "docs").mkdir()
    for d in range(documents):
        words = " ".join(WORDS[(d + w) % len(WORDS)] for w in range(12))
        (folder / "docs" / f"{d}.txt").write_text(f"Number {d} of all: {words}.\n")
    store = ChunkStore.open(folder / "store", mode="write")
    options = PrecomputeOptions(chunk_tokens=60, context="sink")
    engine.precompute(store, [str(folder / "docs")], options, lambda event: None)
    return store


@pytest.fixture(scope="module")
def store(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChunkStore]:
    with stored(engine, tmp_path_factory.mktemp("s"), 16) as store:
        yield store


def test_half_a_sentence_is_from_the_middle_of_a_text() -> None:
    long = "The second sentence, which is the one in the middle, is long enough to be cut in two."
    assert half_sentence(f"A first one that is just as long as it has to be for a cut. {long}\n\nShort.") == (
        "The second sentence, which is the one in ..."
    )
    unspaced = "這" * 30 + "是" * 30
    assert half_sentence(unspaced + "。") == "這" * 30 + " ..."
    assert half_sentence("Too short. So is this.") is None


def test_ratios_rise_until_one_is_close_enough(engine: Engine, store: ChunkStore) -> None:
    told, steps = list[str](), list[tuple[int, int]]()
    never = measure_profile(engine, store, ASK, 0.0, say=told.append, on_progress=lambda *s: steps.append(s[:2]))
    assert [(d.ratio, d.correction) for d in never.measured] == [(r, c) for r in RATIOS for c in ("regression", "none")]
    assert never.choice is None
    assert never.applied(BlendParams()).effective_ratio() == 1
    assert all(0 < d.mean <= d.p90 * PROMPTS for d in never.measured)
    assert (never.prompts, steps[-1]) == (PROMPTS, (132, 132))
    assert len(told) == 1
    # the limit of a setting in the middle: it is the first within it, or one before it is
    middle = min((d for d in never.measured if d.ratio == RATIOS[2]), key=lambda d: d.mean)
    found = measure_profile(engine, store, ASK, max(middle.mean + 2 * middle.error, middle.p90 / p90_limit(1.0)))
    assert found.choice is not None
    assert found.choice.ratio <= RATIOS[2]
    assert found.measured == never.measured[: len(found.measured)], "the same prompts, and the same numbers"
    blend = found.applied(BlendParams())
    assert (blend.ratio, blend.correction) == (found.choice.ratio, found.choice.correction)


def test_a_ratio_is_chosen_with_a_margin() -> None:
    def chosen(ratio: float, kl: list[float]) -> bool:
        return Profile({}, 12, 0.03, 0.08, (distance_of(ratio, "regression", kl),)).choice is not None

    even, uneven = [0.025] * 12, [0.02] * 9 + [0.04] * 3  # the same mean
    assert (chosen(0.15, even), chosen(0.15, uneven)) == (True, False), "a mean that is within the limit by luck"
    assert distance_of(0.15, "regression", uneven).error == pytest.approx(0.00261, abs=1e-5)
    assert (chosen(0.10, even), chosen(0.10, [0.014] * 12)) == (False, True), "below the default half of the limits"
    assert (chosen(0.15, [0.0] * 38 + [0.09] * 2), chosen(0.15, [0.0] * 30 + [0.09] * 6)) == (True, False), "tail"


def test_the_mean_is_that_of_the_prompts(engine: Engine, store: ChunkStore) -> None:
    found = measure_profile(engine, store, ASK, 1e9).measured[0]
    requests = list(usable(engine, general_requests(engine, store, ASK), PROMPTS))
    assert [request.question for request in requests] == [GENERAL[n % 3] for n in range(PROMPTS)]
    assert all(len(request.chunks) == 3 for request in requests)
    assert len({tuple(request.plan.token_ids) for request in requests}) > PROMPTS / 2
    blend = BlendParams(ratio=found.ratio, correction=found.correction)
    kl = [distance(engine, replace(r, blend=blend), full_answer(engine, r)) for r in requests]
    assert found == distance_of(found.ratio, found.correction, kl)
    assert found.mean == pytest.approx(sum(kl) / PROMPTS)
    exact = [distance(engine, replace(r, blend=BlendParams(ratio=1.0)), full_answer(engine, r)) for r in requests]
    assert max(exact) < 1e-6 < found.mean


def test_a_correction_of_the_users_own_is_the_only_one(engine: Engine, store: ChunkStore) -> None:
    ask = replace(ASK, blend=BlendParams(correction="none"))
    found = measure_profile(engine, store, ask, 1e9)
    assert [(d.ratio, d.correction) for d in found.measured] == [(RATIOS[0], "none")]


def test_questions_of_the_users_own_are_measured_with(engine: Engine, store: ChunkStore) -> None:
    told, questions = list[str](), [f"what is number {n} of all?" for n in range(9)]
    found = measure_profile(engine, store, ASK, 1e9, [*questions, "zzzz"], say=told.append)
    assert found.prompts == 9, "nothing is found for the last one"
    assert "on 9 questions:" in told[0]
    with pytest.raises(NotFoundError, match="too few questions"):
        measure_profile(engine, store, ASK, 1e9, questions[:3])


def test_too_few_chunks_are_refused(engine: Engine, tmp_path: Path) -> None:
    with stored(engine, tmp_path, LEAST_PROMPTS - 1) as store, pytest.raises(NotFoundError, match="too few chunks"):
        measure_profile(engine, store, ASK, 1e9)


def test_prompts_that_need_no_repair_do_not_count(engine: Engine, store: ChunkStore) -> None:
    alone = replace(ASK, search=SearchParams(k=1, by="words"))
    assert list(usable(engine, general_requests(engine, store, alone), PROMPTS)) == []
