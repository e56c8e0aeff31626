"""Answers that repeat themselves are ended, and none is changed before it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cacheblend_store import ChunkStore
from checkpoints import write_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.core.sequence_output import REPEATED_COPIES, REPEATED_EVERY, REPEATED_TOKENS, repeats_itself
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

BIASED = ((300, 1e4),)  # a token that is then always the likeliest


@given(
    st.lists(st.integers(0, 9), max_size=40), st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(3, 9)
)
def test_a_run_that_is_repeated_is_found(before: list[int], run: list[int], copies: int) -> None:
    copies = max(copies, -(-REPEATED_TOKENS // len(run)))
    ids = before + run * copies
    found = [n for n in range(len(ids) + 1) if repeats_itself(ids[:n])]
    whole = len(before) + max(REPEATED_COPIES * len(run), REPEATED_TOKENS)
    assert any(n <= whole + REPEATED_EVERY for n in found) or len(ids) < whole + REPEATED_EVERY


@given(st.lists(st.integers(0, 9), max_size=31))
def test_short_answers_are_never_ended(ids: list[int]) -> None:
    assert not repeats_itself(ids)


@given(st.lists(st.integers(0, 99), min_size=12, max_size=30, unique=True), st.lists(st.integers(0, 99), max_size=11))
def test_what_is_said_twice_is_no_loop(run: list[int], more: list[int]) -> None:
    ids = run * 2 + [i for i in more if i != run[0]]
    assert not any(repeats_itself(ids[:n]) for n in range(len(ids) + 1))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("models") / "m"
    write_checkpoint(path, "qwen2")
    return Engine.load(EngineConfig(model=str(path)))


@pytest.fixture
def store(engine: Engine, tmp_path: Path) -> Any:
    (tmp_path / "page.md").write_text("# alpha\n\nMara leads billing.\n")
    with ChunkStore.open(tmp_path / "store", mode="write") as opened:
        engine.precompute(opened, [str(tmp_path / "page.md")], PrecomputeOptions(chunk_tokens=64), lambda event: None)
        yield opened


@pytest.mark.parametrize("mode", ["full", "reuse", "blend"])
def test_a_loop_is_ended_and_nothing_before_it_is_changed(engine: Engine, store: ChunkStore, mode: Any) -> None:
    key = next(iter(store.chunks())).key

    def ask(**sampling: Any) -> Any:
        params = SamplingParams(max_tokens=90, logit_bias=BIASED, **sampling)
        return engine.run_alone(store, AskRequest("Who?", [key], BlendParams(mode=mode), params))

    ended, whole = ask(), ask(stop_repetition=False)
    assert (ended.finish_reason, whole.finish_reason) == ("repetition", "length")
    assert len(ended.generated_ids) == REPEATED_TOKENS
    assert whole.generated_ids[:REPEATED_TOKENS] == ended.generated_ids
    assert len(whole.generated_ids) == len(ask(ignore_eos=True).generated_ids) == 90
    assert ask(temperature=1.0, seed=1).finish_reason == "repetition"
