"""--confirm: the answer is a full prefill's, whatever the blended one was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from callbacks import answered, pieces_to
from engine_driver import Listener, StoredEngine, open_stored_engine

from cacheblend_cli.engine.async_engine import AsyncEngine
from cacheblend_cli.engine.events import Limits
from cacheblend_cli.engine.features import FEATURES
from cacheblend_cli.errors import UsageError
from cacheblend_cli.types import AskOptions, BlendParams, SamplingParams

QUESTIONS = ["where does Mara work?", "who?", "what is the hobby of Orin", "alpha"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    with open_stored_engine(tmp_path_factory.mktemp("stored"), num_hidden_layers=2) as stored:
        yield stored


@pytest.mark.parametrize(("mode", "temperature"), [("reuse", 0.0), ("reuse", 1.5), ("blend", 0.0)])
def test_the_answer_is_a_full_prefills(stored: StoredEngine, mode: str, temperature: float) -> None:
    seen = set()
    for seed, text in enumerate(QUESTIONS):
        sampling = SamplingParams(max_tokens=8, ignore_eos=True, temperature=temperature, seed=seed)
        question = replace(stored.question(text), sampling=sampling, blend=BlendParams(mode=mode, ratio=0.1))
        streamed: list[str] = []
        request = stored.engine.resolve(stored.store, replace(question, options=AskOptions(confirm=True)))
        answer = answered(stored.engine, request, pieces_to(streamed.append))
        blended = stored.engine.run_alone(stored.store, question)
        full = stored.engine.run_alone(stored.store, replace(question, blend=BlendParams(mode="full")))
        found = answer.confirmation
        assert found is not None
        assert (answer.text, answer.generated_ids) == (full.text, full.generated_ids)
        assert "".join(streamed) == found.blended_answer == blended.text
        assert found.confirmed == (blended.generated_ids == full.generated_ids)
        if not found.confirmed:
            at = found.first_difference
            assert at is not None
            assert blended.generated_ids[:at] == full.generated_ids[:at]
            assert blended.generated_ids[at] != full.generated_ids[at]
        seen.add(found.first_difference if found.first_difference in (None, 0) else "later")
    assert mode == "blend" or seen - {None}  # plain reuse is wrong at times: both ways were gone


def test_without_a_seed_the_draws_are_repeated(stored: StoredEngine) -> None:
    for _ in range(4):
        question = stored.question("who?", temperature=3.0, max_tokens=8)
        answer = stored.engine.run_alone(
            stored.store, replace(question, blend=BlendParams(ratio=1.0)), AskOptions(confirm=True)
        )
        assert answer.confirmation is not None
        assert answer.confirmation.confirmed


def test_a_full_prefill_confirms_itself(stored: StoredEngine) -> None:
    question = replace(stored.question(), blend=BlendParams(mode="full"))
    answer = stored.engine.run_alone(stored.store, question, AskOptions(confirm=True))
    assert answer.confirmation is not None
    assert answer.confirmation.confirmed
    assert answer.confirmation.full_ttft_s == 0


def test_side_by_side_as_alone(stored: StoredEngine) -> None:
    asked = [replace(stored.question(text), blend=BlendParams(mode="reuse")) for text in QUESTIONS]
    confirms = [n % 2 == 0 for n in range(len(asked))]
    service = AsyncEngine(stored.engine.runtime, Limits(pool_tokens=2048), features=FEATURES)
    try:
        listeners = [Listener() for _ in asked]
        for ask, confirm, listener in zip(asked, confirms, listeners, strict=True):
            service.submit(stored.request(ask, confirm=confirm), listener)
        for ask, confirm, listener in zip(asked, confirms, listeners, strict=True):
            [answer] = listener.done().answers
            mode = "full" if confirm else "reuse"
            alone = stored.engine.run_alone(stored.store, replace(ask, blend=BlendParams(mode=mode)))
            assert answer.text == alone.text
            assert (answer.confirmation is not None) == confirm
            if answer.confirmation is not None:
                assert answer.confirmation.blended_answer == listener.text()
    finally:
        service.close()
    with pytest.raises(UsageError, match="only one answer"):
        stored.request(stored.question(n=2), confirm=True)
