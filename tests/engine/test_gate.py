"""--max-risk: an answer that is likely enough to differ from a full prefill's is replaced by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from callbacks import answered, pieces_to
from engine_driver import Listener, StoredEngine, open_stored_engine

from cacheblend_cli.blend.risk import SIGNALS, RiskFile, RiskFit, signals_of
from cacheblend_cli.engine.async_engine import AsyncEngine
from cacheblend_cli.engine.events import Failed, Limits
from cacheblend_cli.errors import CacheBlendError, UsageError
from cacheblend_cli.evaluation.risk import fit_risk
from cacheblend_cli.types import Answer, AskRequest, BlendParams

BLEND = BlendParams(mode="reuse")  # far from a full prefill
QUESTIONS = ["where does Mara work?", "who?", "what is the hobby of Orin", "alpha", "the first", "Tilda and Bo"]
EACH, TOKENS = 0.1, 8
"""The risk of every token, by the fit that is put there."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    with open_stored_engine(tmp_path_factory.mktemp("stored"), num_hidden_layers=2) as stored:
        yield stored


@pytest.fixture
def fit(stored: StoredEngine) -> RiskFit:
    """As if every token were another in a tenth of the cases."""
    found = RiskFit((0.0,) * SIGNALS, float(torch.logit(torch.tensor(EACH))), 100, 10, 5)
    RiskFile.of(stored.engine.runtime.collection(), ["sink"], BLEND).write(found)
    return found


def asked(stored: StoredEngine, text: str, limit: float | None) -> AskRequest:
    return replace(stored.question(text, max_tokens=TOKENS), blend=replace(BLEND, max_risk=limit)).unstreamed()


def ask(stored: StoredEngine, question: AskRequest) -> Answer:
    return stored.engine.run_alone(stored.store, question)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_answer_is_judged_whole(stored: StoredEngine, fit: RiskFit, temperature: float) -> None:
    """All eight tokens together have a risk of .57: above .5 the answer is a full prefill's from its first token."""
    changed = 0
    for text in QUESTIONS:
        free, low, high = (asked(stored, text, limit) for limit in (None, 0.5, 0.6))
        sampling = replace(free.sampling, temperature=temperature, seed=3, logprobs=0)
        free, low, high = (replace(ask, sampling=sampling) for ask in (free, low, high))
        blended, stands, pieces = ask(stored, free), ask(stored, high), list[str]()
        full = ask(stored, replace(free, blend=BlendParams(mode="full")))
        replaced = answered(stored.engine, stored.engine.resolve(stored.store, low), pieces_to(pieces.append))
        assert (replaced.generated_ids, replaced.text) == (full.generated_ids, full.text)
        assert len(replaced.logprobs) == len(full.logprobs)
        assert replaced.risk is not None
        assert (replaced.risk.estimate, replaced.risk.tokens, replaced.risk.full_prefill_at) == (0.0, 0, 0)
        assert replaced.risk.seconds > 0
        assert pieces == [full.text], "nothing is streamed that may be replaced"
        assert stands.generated_ids == blended.generated_ids
        assert stands.risk is not None
        assert stands.risk.estimate == pytest.approx(1 - (1 - EACH) ** len(stands.generated_ids))
        assert stands.risk.full_prefill_at is None
        changed += full.generated_ids != blended.generated_ids
    assert changed, "else this shows nothing"


@pytest.mark.parametrize(("limit", "is_full"), [(0.0, True), (0.5, True), (1.0, False)])
def test_the_limit_decides(stored: StoredEngine, fit: RiskFit, limit: float, is_full: bool) -> None:
    changed = 0
    for text in QUESTIONS:
        blended, answer = ask(stored, asked(stored, text, None)), ask(stored, asked(stored, text, limit))
        full = ask(stored, replace(asked(stored, text, None), blend=BlendParams(mode="full")))
        assert blended.risk is None
        assert answer.generated_ids == (full if is_full else blended).generated_ids
        assert answer.to_dict()["risk"]["limit"] == limit
        assert answer.confirmation is None
        changed += answer.generated_ids != blended.generated_ids
    assert changed or not is_full  # else this shows nothing


def test_a_stream_is_refused(stored: StoredEngine, fit: RiskFit) -> None:
    question = asked(stored, "who?", 0.5)
    with pytest.raises(UsageError, match="complete answers") as caught:
        ask(stored, replace(question, options=replace(question.options, stream=True)))
    assert "--json" in caught.value.hint


@pytest.mark.parametrize(
    ("pool_tokens", "times"), [(512, 2), (4096, 1)]
)  # a small one: they take turns and are swapped out
def test_side_by_side_as_alone(stored: StoredEngine, fit: RiskFit, pool_tokens: int, times: int) -> None:
    limits = [None, 0.0, 0.5, 1.0]
    questions = [asked(stored, text, limits[n % 4]) for n, text in enumerate(QUESTIONS * times)]
    alone = [ask(stored, question) for question in questions]
    service = AsyncEngine(
        stored.engine.runtime,
        Limits(pool_tokens=pool_tokens, enable_prefix_caching=False),
        extensions=stored.engine.extensions,
    )
    try:
        told = [Listener() for _ in questions]
        for question, listener in zip(questions, told, strict=True):
            service.submit(stored.request(question), listener)
        for listener, one in zip(told, alone, strict=True):
            [answer] = listener.done().answers
            assert answer.generated_ids == one.generated_ids
            assert listener.text() == one.text
            assert (answer.risk is None) == (one.risk is None)
            if answer.risk is not None and one.risk is not None:
                assert answer.risk.full_prefill_at == one.risk.full_prefill_at
        several = Listener()
        two = replace(questions[1], sampling=replace(questions[1].sampling, n=2))
        service.submit(stored.request(two), several)
        failed = several.last.result(60)
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, CacheBlendError)
        assert "one answer" in failed.error.message
    finally:
        service.close()


def test_a_full_prefill_changes_no_later_answer(stored: StoredEngine, fit: RiskFit) -> None:
    service = AsyncEngine(stored.engine.runtime, Limits(pool_tokens=4096), extensions=stored.engine.extensions)
    try:
        alone = [ask(stored, asked(stored, QUESTIONS[0], limit)).generated_ids for limit in (None, 0.5)]
        for limit, expected in ((None, alone[0]), (0.5, alone[1])) * 2:
            listener = Listener()
            service.submit(stored.request(asked(stored, QUESTIONS[0], limit)), listener)
            [answer] = listener.done().answers
            assert answer.generated_ids == expected
    finally:
        service.close()


def test_without_a_fit_it_is_said_how_to_get_one(stored: StoredEngine) -> None:
    with pytest.raises(UsageError, match="--max-risk") as caught:
        ask(stored, asked(stored, "who?", 0.1))
    assert "--fit-risk" in caught.value.hint
    exact = replace(asked(stored, "who?", 0.1), keys=stored.keys[:1])  # the first chunk needs no repair, and no fit
    assert ask(stored, exact).risk is None


def test_a_fit_is_of_one_model_and_one_way_to_blend(stored: StoredEngine, fit: RiskFit) -> None:
    collection = stored.engine.runtime.collection()

    def read(contexts: Sequence[str] = ("sink",), **other: object) -> RiskFit | None:
        return RiskFile.of(collection, contexts, replace(BLEND, **other)).read()  # type: ignore[arg-type]

    assert read() == read(seed=7, max_risk=0.5) == fit
    assert [read(ratio=0.4), read(selector="first"), read(correction="none"), read(["document"])] == [None] * 4
    RiskFile.of(collection, ["sink"], BLEND).path.write_text('{"weights": [1, 2]}')
    assert read() is None


def test_a_fit_foresees_as_many_as_there_are() -> None:
    """Tokens that differ with a probability that falls with their lead: the fit finds it, and puts the doubtful ones
    first."""
    torch.manual_seed(0)
    logits = torch.randn(4000, 30) * torch.rand(4000, 1) * 8
    signals = signals_of(logits)
    truth = torch.sigmoid(1 - 3 * signals[:, 0])
    differs = torch.rand(len(truth), generator=torch.Generator().manual_seed(1)) < truth
    answers = [(signals[n : n + 10], differs[n : n + 10].tolist()) for n in range(0, 2000, 10)]
    fit = fit_risk(answers)
    unseen = fit.of_tokens(signals[2000:])
    assert float(unseen.sum()) == pytest.approx(float(differs[2000:].sum()), rel=0.15)
    assert float((unseen - truth[2000:]).abs().mean()) < 0.03
    parted = fit_risk([(s, (s[:, 0] < 1).tolist()) for s, _ in answers])  # what the signals tell completely
    assert all(abs(w) < 100 for w in (*parted.weights, parted.bias))
    with pytest.raises(UsageError, match="0 of 3 "):
        fit_risk([(s, [False] * 10) for s, _ in answers[:3]])
