"""An engine with many concurrent requests: each gets its answer, in order, and ends exactly once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from cacheblend_store import ChunkManifest, ChunkStore
from engine_driver import SAMPLING, WAIT_S, Listener, StoredEngine, open_stored_engine

from cacheblend_cli.collect import collector
from cacheblend_cli.engine.async_engine import AsyncEngine
from cacheblend_cli.engine.core.scheduler import Scheduler, Step
from cacheblend_cli.engine.core.sequence import RequestState
from cacheblend_cli.engine.events import Done, Event, Failed, Limits
from cacheblend_cli.engine.features import FEATURES
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.errors import NotFoundError, QueueFull, UsageError
from cacheblend_cli.types import AskRequest, BlendParams, Piece, Progress


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    with open_stored_engine(tmp_path_factory.mktemp("service"), num_hidden_layers=2) as stored:
        yield stored


def submit(service: AsyncEngine, request: Request, listener: Listener | None = None) -> tuple[Listener, RequestState]:
    listener = listener or Listener()
    return listener, service.submit(request, listener)


@pytest.fixture
def service(stored: StoredEngine) -> Iterator[AsyncEngine]:
    service = AsyncEngine(stored.engine.runtime, features=FEATURES)
    yield service
    service.close()


def held(service: AsyncEngine) -> threading.Event:
    """The engine does nothing until this is set."""
    go, began = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        assert go.wait(WAIT_S)

    service.between_steps(wait)
    assert began.wait(WAIT_S)
    return go


def test_a_job_gets_the_answer_that_ask_gives(stored: StoredEngine, service: AsyncEngine) -> None:
    alone = stored.engine.run_alone(stored.store, stored.question())
    listener, _ = submit(service, stored.request(verify=True))
    [answer] = listener.done().answers
    assert answer.generated_ids == alone.generated_ids
    assert answer.verify is not None
    assert answer.cached_tokens == alone.cached_tokens > 0
    assert isinstance(listener.events[0], Progress)
    assert listener.text() == answer.text == alone.text


def test_several_answers_each_have_a_seed(stored: StoredEngine, service: AsyncEngine) -> None:
    listener, _ = submit(service, stored.request(stored.question(temperature=2.0, seed=4, n=3)))
    answers = listener.done().answers
    assert len({tuple(a.generated_ids) for a in answers}) == 3
    assert [listener.text(i) for i in range(3)] == [a.text for a in answers]
    listener, _ = submit(service, stored.request(stored.question(temperature=2.0, seed=4)))
    assert listener.done().answers[0].generated_ids == answers[0].generated_ids


def test_first_come_first_served_among_equals(stored: StoredEngine, service: AsyncEngine) -> None:
    order: list[str] = []
    go = held(service)
    listeners = []
    for name, priority in (("a", 0), ("b", 0), ("c", -1), ("d", 1), ("e", 0)):
        listener = Listener()

        def heard(event: Event, name: str = name, listener: Listener = listener) -> None:
            if isinstance(event, Progress) and event.num_filled == 0:
                order.append(name)
            listener(event)

        service.submit(stored.request(priority=priority), heard)
        listeners.append(listener)
    go.set()
    for listener in listeners:
        listener.done()
    assert order == ["c", "a", "b", "e", "d"]


def test_a_request_that_fails_does_not_affect_others(stored: StoredEngine, service: AsyncEngine) -> None:
    with pytest.raises(NotFoundError):
        stored.request(AskRequest("who?", [b"\0" * 16], BlendParams(), SAMPLING))
    with pytest.raises(UsageError):
        stored.request(AskRequest(" ", [], BlendParams(), SAMPLING))
    long, _ = submit(service, stored.request(stored.question("Mara works in Bergen. " * 300)))
    wordy, _ = submit(service, stored.request(stored.question(max_tokens=1024)))
    good, _ = submit(service, stored.request())
    for listener in (long, wordy):
        last = listener.last.result(WAIT_S)
        assert isinstance(last, Failed)
        assert isinstance(last.error, UsageError)
    assert good.done().answers
    stats = service.stats()
    assert (stats.failed, stats.finished) == (2, 1)


def test_a_full_queue_refuses_and_says_when_to_come_back(stored: StoredEngine) -> None:
    service = AsyncEngine(stored.engine.runtime, Limits(max_waiting=2), features=FEATURES)
    go = held(service)
    waiting = [submit(service, stored.request())[0] for _ in range(2)]
    assert service.stats().waiting == 2
    with pytest.raises(QueueFull) as caught:
        service.submit(stored.request(), Listener())
    assert caught.value.retry_after_s > 0
    go.set()
    for listener in waiting:
        assert listener.done().answers
    service.close()
    with pytest.raises(QueueFull):
        service.submit(stored.request(), Listener())


def test_a_job_is_cancelled_while_it_waits_and_while_it_runs(stored: StoredEngine, service: AsyncEngine) -> None:
    go = held(service)
    running, ticket = submit(service, stored.request(stored.question(max_tokens=400)))
    waiting, waits = submit(service, stored.request())
    service.cancel(waits)
    go.set()
    assert running.first_text.wait(WAIT_S)
    service.cancel(ticket)
    assert running.done().ended == "cancelled"
    assert waiting.done() == Done([], "cancelled")
    after, _ = submit(service, stored.request())
    assert after.done().answers


def test_a_deadline_passes(stored: StoredEngine, service: AsyncEngine) -> None:
    go = held(service)
    waiting, ticket = submit(service, stored.request(deadline_s=3600.0))
    ticket.submitted -= 3600.0
    go.set()
    assert waiting.done() == Done([], "deadline")


def test_a_listener_that_fails_cancels_its_job_alone(stored: StoredEngine, service: AsyncEngine) -> None:
    last: Future[Event] = Future()

    def broken(event: Event) -> None:
        if isinstance(event, Done | Failed):
            last.set_result(event)
        if isinstance(event, Piece):
            raise RuntimeError("gone")

    service.submit(stored.request(stored.question(max_tokens=400)), broken)
    good, _ = submit(service, stored.request())
    ended = last.result(WAIT_S)
    assert isinstance(ended, Done)
    assert ended.ended == "cancelled"
    assert good.done().answers


def test_the_requests_of_a_step_that_fails_end_and_later_ones_are_answered(
    stored: StoredEngine, service: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = submit(service, stored.request())[0].done().answers[0].text

    def fail(step: object) -> None:
        raise MemoryError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(service._core._executor, "run", fail)
        listeners = [submit(service, stored.request())[0] for _ in range(2)]
        for listener in listeners:
            last = listener.last.result(WAIT_S)
            assert isinstance(last, Failed)
            assert "planted" in str(last.error)
    assert submit(service, stored.request())[0].done().answers[0].text == expected
    assert service.stats().running == 0


def test_a_step_that_fails_ends_requests_whose_chunks_are_being_stored(
    stored: StoredEngine, service: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.store.evict_chunks(stored.keys)
    core, failed = service._core, list[bool]()

    def fail() -> Step:
        if core.busy and not core.scheduler.states:  # nothing but the work of hooks
            failed.append(True)
            raise MemoryError("planted")
        return Scheduler.schedule(core.scheduler)

    monkeypatch.setattr(core.scheduler, "schedule", fail)
    last = submit(service, stored.request())[0].last.result(WAIT_S)
    assert isinstance(last, Failed)
    assert "planted" in str(last.error)
    assert failed == [True]
    assert not core.busy


def test_work_runs_in_the_engines_thread(stored: StoredEngine, service: AsyncEngine) -> None:
    thread = service.between_steps(lambda: threading.current_thread().name).result(WAIT_S)
    assert thread == "cacheblend-engine"
    with pytest.raises(ZeroDivisionError):
        service.between_steps(lambda: 1 // 0).result(WAIT_S)
    assert service.between_steps(lambda: stored.engine.context).result(WAIT_S) == 1024


def test_an_answer_goes_on_between_two_pieces_of_work(stored: StoredEngine, service: AsyncEngine) -> None:
    go = held(service)
    listener, _ = submit(service, stored.request(stored.question(max_tokens=100, logprobs=0)))
    lengths = [service.between_steps(lambda: len(listener.events)) for _ in range(20)]
    go.set()
    counts = [length.result(WAIT_S) for length in lengths]
    assert len(set(counts[-15:])) == 15
    assert listener.done().answers


def test_an_answer_goes_on_while_anothers_chunks_are_stored(
    stored: StoredEngine, service: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.store.evict_chunks(stored.keys)
    listener, counts = Listener(), list[int]()
    manifest = collector.chunk_manifest
    monkeypatch.setattr(
        collector, "chunk_manifest", lambda *given: (counts.append(len(listener.events)), manifest(*given))[1]
    )
    submit(
        service,
        stored.request(AskRequest("who?", (), BlendParams(), replace(SAMPLING, max_tokens=200, logprobs=0))),
        listener,
    )
    [answer] = submit(service, stored.request())[0].done().answers
    assert len(counts) == len(stored.keys) == len(set(counts))
    assert all(map(stored.store.has_kv, stored.keys))
    assert {chunk.status for chunk in answer.chunks} == {"computed"}
    assert listener.done().answers


def test_what_is_left_to_store_is_dropped_when_the_engine_closes(
    stored: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.store.evict_chunks(stored.keys)
    service, put = AsyncEngine(stored.engine.runtime, features=FEATURES), ChunkStore.put_chunks

    def closing(
        store: ChunkStore, chunks: Sequence[tuple[ChunkManifest, Sequence[bytes]]], *given: Any, **more: Any
    ) -> Any:
        if chunks[0][0].context != "prefix":
            service.cancel_all()
        return put(store, chunks, *given, **more)

    monkeypatch.setattr(ChunkStore, "put_chunks", closing)
    listener, _ = submit(service, stored.request())
    assert len(listener.done().answers) == 1
    assert sum(map(stored.store.has_kv, stored.keys)) == 1
    service.close()


def test_closing_lets_what_runs_finish_or_cancels_it(stored: StoredEngine) -> None:
    patient = AsyncEngine(stored.engine.runtime, features=FEATURES)
    listeners = [submit(patient, stored.request())[0] for _ in range(3)]
    patient.close(WAIT_S)
    assert all(listener.done().answers for listener in listeners)
    hasty = AsyncEngine(stored.engine.runtime, features=FEATURES)
    listeners = [submit(hasty, stored.request(stored.question(max_tokens=400)))[0] for _ in range(3)]
    assert listeners[0].first_text.wait(WAIT_S)
    hasty.close()
    assert [listener.done().ended for listener in listeners] == ["cancelled"] * 3


def test_the_engines_thread_makes_the_device_its_own(stored: StoredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current GPU is a setting of a thread, and applies to events and graphs created without a device."""
    made: list[tuple[str, object]] = []
    monkeypatch.setattr(
        "cacheblend_cli.engine.async_engine.make_current",
        lambda device: made.append((threading.current_thread().name, device)),
    )
    AsyncEngine(stored.engine.runtime, features=FEATURES).close()
    assert made == [("cacheblend-engine", stored.engine.model.decoder.device)]


def test_a_step_that_does_not_end_is_given_up(stored: StoredEngine, caplog: pytest.LogCaptureFixture) -> None:
    service = AsyncEngine(stored.engine.runtime, features=FEATURES)
    go = held(service)
    assert service.busy_s > 0
    assert not service.is_stuck
    assert not service.close(give_up_s=0.01)
    go.set()
    assert service.close()
    assert service.busy_s == 0


def test_a_cancelled_future_cancels_its_job(stored: StoredEngine, service: AsyncEngine) -> None:
    go = held(service)
    future = service.ask(stored.request())
    assert future.cancel()
    go.set()
    submit(service, stored.request())[0].done()
    assert service.stats().cancelled == 1
