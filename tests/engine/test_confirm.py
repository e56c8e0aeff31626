"""--confirm: the answer is a full prefill's, whatever the blended one was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from houses import House, Listener, open_house

from cacheblend_cli.api import BlendConfig, SamplingParams
from cacheblend_cli.engine.async_engine import AsyncEngine
from cacheblend_cli.engine.jobs import Job, Limits
from cacheblend_cli.engine.sequence_output import Listener as Hearer
from cacheblend_cli.errors import UsageError
from cacheblend_cli.types import AskOptions

QUESTIONS = ["where does Mara work?", "who?", "what is the hobby of Orin", "alpha", "the first", "Tilda and Bo"]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with open_house(tmp_path_factory.mktemp("house")) as house:
        yield house


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("mode", ["reuse", "blend"])
def test_the_answer_is_a_full_prefills(house: House, mode: str, temperature: float) -> None:
    seen = set()
    for seed, text in enumerate(QUESTIONS):
        sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=temperature, seed=seed)
        question = replace(house.question(text), sampling=sampling, blend=BlendConfig(mode=mode, ratio=0.1))
        streamed: list[str] = []
        answer = house.engine.ask(house.store, question, AskOptions(confirm=True), Hearer(streamed.append))
        blended = house.engine.ask(house.store, question)
        full = house.engine.ask(house.store, replace(question, blend=BlendConfig(mode="full")))
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
        answer = house.engine.ask(
            house.store, replace(question, blend=BlendConfig(ratio=1.0)), AskOptions(confirm=True)
        )
        assert answer.confirmation is not None
        assert answer.confirmation.confirmed


def test_a_full_prefill_confirms_itself(house: House) -> None:
    question = replace(house.question(), blend=BlendConfig(mode="full"))
    answer = house.engine.ask(house.store, question, AskOptions(confirm=True))
    assert answer.confirmation is not None
    assert answer.confirmation.confirmed
    assert answer.confirmation.full_ttft_s == 0


def test_side_by_side_as_alone(house: House) -> None:
    jobs = [
        Job(replace(house.question(text), blend=BlendConfig(mode="reuse")), confirm=n % 2 == 0)
        for n, text in enumerate(QUESTIONS)
    ]
    service = AsyncEngine(house.engine.runtime, house.store, Limits(pool_tokens=2048))
    try:
        told = [Listener() for _ in jobs]
        for job, listener in zip(jobs, told, strict=True):
            service.submit(job, listener)
        for job, listener in zip(jobs, told, strict=True):
            [answer] = listener.done().answers
            mode = "full" if job.confirm else "reuse"
            alone = house.engine.ask(house.store, replace(job.question, blend=BlendConfig(mode=mode)))
            assert answer.text == alone.text
            assert (answer.confirmation is not None) == job.confirm
            if answer.confirmation is not None:
                assert answer.confirmation.blended_answer == listener.text()
    finally:
        service.close()
    with pytest.raises(UsageError, match="only one answer"):
        Job(house.question(n=2), confirm=True)
