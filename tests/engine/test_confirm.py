"""--confirm: the answer is a full prefill's, whatever the blended one was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hearing import pieces_to
from houses import House, Listener, open_house

from cacheblend_cli.engine.core.async_engine import AsyncEngine
from cacheblend_cli.engine.events import Limits
from cacheblend_cli.errors import UsageError
from cacheblend_cli.types import AskOptions, BlendParams, SamplingParams

QUESTIONS = ["where does Mara work?", "who?", "what is the hobby of Orin", "alpha"]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with open_house(tmp_path_factory.mktemp("house"), num_hidden_layers=2) as house:
        yield house


@pytest.mark.parametrize(("mode", "temperature"), [("reuse", 0.0), ("reuse", 1.5), ("blend", 0.0)])
def test_the_answer_is_a_full_prefills(house: House, mode: str, temperature: float) -> None:
    seen = set()
    for seed, text in enumerate(QUESTIONS):
        sampling = SamplingParams(max_tokens=8, ignore_eos=True, temperature=temperature, seed=seed)
        question = replace(house.question(text), sampling=sampling, blend=BlendParams(mode=mode, ratio=0.1))
        streamed: list[str] = []
        request = house.engine.resolve(house.store, replace(question, options=AskOptions(confirm=True)))
        answer = house.engine.run(request, pieces_to(streamed.append))
        blended = house.engine.run_alone(house.store, question)
        full = house.engine.run_alone(house.store, replace(question, blend=BlendParams(mode="full")))
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


def test_without_a_seed_the_draws_are_repeated(house: House) -> None:
    for _ in range(4):
        question = house.question("who?", temperature=3.0, max_tokens=8)
        answer = house.engine.run_alone(
            house.store, replace(question, blend=BlendParams(ratio=1.0)), AskOptions(confirm=True)
        )
        assert answer.confirmation is not None
        assert answer.confirmation.confirmed


def test_a_full_prefill_confirms_itself(house: House) -> None:
    question = replace(house.question(), blend=BlendParams(mode="full"))
    answer = house.engine.run_alone(house.store, question, AskOptions(confirm=True))
    assert answer.confirmation is not None
    assert answer.confirmation.confirmed
    assert answer.confirmation.full_ttft_s == 0


def test_side_by_side_as_alone(house: House) -> None:
    asked = [replace(house.question(text), blend=BlendParams(mode="reuse")) for text in QUESTIONS]
    confirms = [n % 2 == 0 for n in range(len(asked))]
    service = AsyncEngine(house.engine.runtime, Limits(pool_tokens=2048))
    try:
        listeners = [Listener() for _ in asked]
        for ask, confirm, listener in zip(asked, confirms, listeners, strict=True):
            service.submit(house.request(ask, confirm=confirm), listener)
        for ask, confirm, listener in zip(asked, confirms, listeners, strict=True):
            [answer] = listener.done().answers
            mode = "full" if confirm else "reuse"
            alone = house.engine.run_alone(house.store, replace(ask, blend=BlendParams(mode=mode)))
            assert answer.text == alone.text
            assert (answer.confirmation is not None) == confirm
            if answer.confirmation is not None:
                assert answer.confirmation.blended_answer == listener.text()
    finally:
        service.close()
    with pytest.raises(UsageError, match="only one answer"):
        house.request(house.question(n=2), confirm=True)
