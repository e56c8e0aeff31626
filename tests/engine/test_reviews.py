"""Reviews of complete answers: they run beside the engine, and end with their client."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
from engine_driver import SAMPLING, WAIT_S, Listener, StoredEngine, open_stored_engine

from cacheblend_cli.claims import LookedUp
from cacheblend_cli.claims.passages import Passages
from cacheblend_cli.engine.async_engine import AsyncEngine
from cacheblend_cli.engine.events import Done, Failed
from cacheblend_cli.engine.features import FEATURES
from cacheblend_cli.errors import UnsupportedClaims
from cacheblend_cli.types import AskRequest, BlendParams


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    with open_stored_engine(tmp_path_factory.mktemp("reviews"), num_hidden_layers=2) as stored:
        yield stored


@pytest.fixture
def service(stored: StoredEngine) -> Iterator[AsyncEngine]:
    service = AsyncEngine(stored.engine.runtime, features=FEATURES)
    yield service
    service.close()


def test_answers_go_on_while_anothers_claims_are_looked_up(
    stored: StoredEngine, service: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go, threads = threading.Event(), threading.Event(), set[str]()

    def check(answer: str, passages: Passages) -> list[LookedUp]:
        threads.add(threading.current_thread().name)
        began.set()
        assert go.wait(WAIT_S)
        return [LookedUp("54", 0, 2, "number", None)]

    monkeypatch.setattr("cacheblend_cli.claims.check", check)
    listeners = [Listener() for _ in range(3)]
    for listener, what in zip(listeners, ("answer", "confirm", "refuse"), strict=True):
        service.submit(stored.request(on_unsupported=what), listener)
    assert began.wait(WAIT_S)
    other = Listener()
    service.submit(stored.request(AskRequest("who?", (), BlendParams(), SAMPLING)), other)  # nothing to look up
    assert other.done().answers
    assert not any(listener.last.done() for listener in listeners)
    go.set()
    answered, confirmed, refused = [listener.last.result(WAIT_S) for listener in listeners]
    assert isinstance(answered, Done)
    assert [claim.text for claim in answered.answers[0].claims] == ["54"]
    assert isinstance(confirmed, Done)
    assert confirmed.answers[0].confirmation is not None
    assert isinstance(refused, Failed)
    assert isinstance(refused.error, UnsupportedClaims)
    assert "cacheblend-engine" not in threads


@pytest.mark.parametrize("on_unsupported", ["answer", "refuse"])
def test_a_look_up_of_claims_ends_with_its_client(
    stored: StoredEngine, service: AsyncEngine, monkeypatch: pytest.MonkeyPatch, on_unsupported: str
) -> None:
    began = threading.Event()

    def check(answer: str, passages: Passages) -> list[LookedUp]:
        began.set()
        for number in itertools.count():
            if passages.wording(f"{number}", [[f"{number}"]]) is None:
                break
        return []

    monkeypatch.setattr("cacheblend_cli.claims.passages.MAX_STEPS", 10**12)
    monkeypatch.setattr("cacheblend_cli.claims.check", check)
    listener = Listener()
    state = service.submit(stored.request(on_unsupported=on_unsupported), listener)
    assert began.wait(WAIT_S)
    service.cancel(state)
    assert isinstance(listener.last.result(WAIT_S), Failed if on_unsupported == "refuse" else Done)


def test_an_overdue_answer_is_reviewed_before_it_is_refused(
    stored: StoredEngine, service: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = [LookedUp("54", 0, 2, "number", None)]
    monkeypatch.setattr("cacheblend_cli.claims.check", lambda answer, passages: claims)
    listener = Listener()
    question = stored.question(max_tokens=400)
    state = service.submit(stored.request(question, on_unsupported="refuse", deadline_s=3600.0), listener)
    while not service.between_steps(lambda: state.num_started).result(WAIT_S):
        pass
    state.submitted -= 3600.0
    last = listener.last.result(WAIT_S)
    assert isinstance(last, Failed)
    assert isinstance(last.error, UnsupportedClaims)
