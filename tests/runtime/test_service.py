"""An engine that many ask at once: every job gets its answer, in order, and ends exactly once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import pytest
from cacheblend_store import ChunkStore
from checkpoints import WORDS, write_checkpoint

from cacheblend_cli.api import BlendConfig, Engine, EngineConfig, PrecomputeOptions, Question, SamplingParams
from cacheblend_cli.errors import NotFoundError, QueueFull, UsageError
from cacheblend_cli.runtime.service import Done, Event, Failed, Job, Limits, Service, Started, Text, Ticket

SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)
WAIT_S = 60.0


@dataclass
class Listener:
    """Keeps a job's events until its last."""

    events: list[Event] = field(default_factory=list)
    last: Future[Event] = field(default_factory=Future)
    first_text: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        assert not self.last.done()
        self.events.append(event)
        if isinstance(event, Text):
            self.first_text.set()
        if isinstance(event, Done | Failed):
            self.last.set_result(event)

    def text(self, index: int = 0) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Text) and e.index == index)

    def done(self) -> Done:
        last = self.last.result(WAIT_S)
        assert isinstance(last, Done), last
        return last


@dataclass(frozen=True)
class House:
    engine: Engine
    store: ChunkStore
    keys: list[bytes]

    def question(self, text: str = "where does Mara work?", **sampling: object) -> Question:
        return Question(text, self.keys, BlendConfig(ratio=0.3), replace(SAMPLING, **sampling))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    base = tmp_path_factory.mktemp("service")
    write_checkpoint(base / "model", "llama-gqa", max_position_embeddings=1024)
    (base / "docs").mkdir()
    for page in range(3):
        words = [WORDS[(5 * page + i) % len(WORDS)] for i in range(40)]
        (base / "docs" / f"{page}.md").write_text(" ".join(words) + "\n")
    with ChunkStore.open(base / "store", mode="write") as store:
        engine = Engine.load(EngineConfig(model=str(base / "model"), block_size=16))
        options = PrecomputeOptions(chunk_tokens=24, context="sink")
        engine.precompute(store, [str(base / "docs")], options, lambda event: None)
        yield House(engine, store, [m.key for m in store.chunks()])


def submit(service: Service, job: Job) -> tuple[Listener, Ticket]:
    listener = Listener()
    return listener, service.submit(job, listener)


@pytest.fixture
def service(house: House) -> Iterator[Service]:
    service = Service(house.engine.runtime, house.store)
    yield service
    service.close()


def held(service: Service) -> threading.Event:
    """The engine does nothing until this is set."""
    go, began = threading.Event(), threading.Event()

    def wait(runtime: object) -> None:
        began.set()
        assert go.wait(WAIT_S)

    service.run(wait)
    assert began.wait(WAIT_S)
    return go


def test_a_job_gets_the_answer_that_ask_gives(house: House, service: Service) -> None:
    alone = house.engine.ask(house.store, house.question())
    listener, _ = submit(service, Job(house.question(), verify=True))
    [answer] = listener.done().answers
    assert answer.generated_ids == alone.generated_ids
    assert answer.verify is not None
    assert answer.cached_tokens == alone.cached_tokens > 0
    assert isinstance(listener.events[0], Started)
    assert listener.text() == answer.text == alone.text


def test_several_answers_each_have_a_seed(house: House, service: Service) -> None:
    listener, _ = submit(service, Job(house.question(temperature=2.0, seed=4, n=3)))
    answers = listener.done().answers
    assert len({tuple(a.generated_ids) for a in answers}) == 3
    assert [listener.text(i) for i in range(3)] == [a.text for a in answers]
    listener, _ = submit(service, Job(house.question(temperature=2.0, seed=4)))
    assert listener.done().answers[0].generated_ids == answers[0].generated_ids


def test_first_come_first_served_among_equals(house: House, service: Service) -> None:
    order: list[str] = []
    go = held(service)
    listeners = []
    for name, priority in (("a", 0), ("b", 0), ("c", -1), ("d", 1), ("e", 0)):
        listener = Listener()

        def heard(event: Event, name: str = name, listener: Listener = listener) -> None:
            if isinstance(event, Started):
                order.append(name)
            listener(event)

        service.submit(Job(house.question(), priority=priority), heard)
        listeners.append(listener)
    go.set()
    for listener in listeners:
        listener.done()
    assert order == ["c", "a", "b", "e", "d"]


def test_what_cannot_be_answered_fails_alone(house: House, service: Service) -> None:
    bad, _ = submit(service, Job(Question("who?", [b"\0" * 16], BlendConfig(), SAMPLING)))
    empty, _ = submit(service, Job(Question(" ", [], BlendConfig(), SAMPLING)))
    long, _ = submit(service, Job(house.question("Mara works in Bergen. " * 300)))
    good, _ = submit(service, Job(house.question()))
    for listener, kind in ((bad, NotFoundError), (empty, UsageError), (long, UsageError)):
        last = listener.last.result(WAIT_S)
        assert isinstance(last, Failed)
        assert isinstance(last.error, kind)
    assert good.done().answers
    stats = service.stats()
    assert (stats.failed, stats.finished) == (3, 1)


def test_what_can_never_fit_is_refused_at_once(house: House, service: Service) -> None:
    with pytest.raises(UsageError, match="1024"):
        service.submit(Job(house.question(max_tokens=1024)), Listener())


def test_a_full_queue_refuses_and_says_when_to_come_back(house: House) -> None:
    service = Service(house.engine.runtime, house.store, Limits(max_waiting=2))
    go = held(service)
    waiting = [submit(service, Job(house.question()))[0] for _ in range(2)]
    assert service.stats().waiting == 2
    with pytest.raises(QueueFull) as caught:
        service.submit(Job(house.question()), Listener())
    assert caught.value.retry_after_s > 0
    go.set()
    for listener in waiting:
        assert listener.done().answers
    service.close()
    with pytest.raises(QueueFull):
        service.submit(Job(house.question()), Listener())


def test_a_job_is_cancelled_while_it_waits_and_while_it_runs(house: House, service: Service) -> None:
    go = held(service)
    running, ticket = submit(service, Job(house.question(max_tokens=400)))
    waiting, waits = submit(service, Job(house.question()))
    service.cancel(waits)
    go.set()
    assert running.first_text.wait(WAIT_S)
    service.cancel(ticket)
    assert running.done().ended == "cancelled"
    assert waiting.done() == Done([], "cancelled")
    after, _ = submit(service, Job(house.question()))
    assert after.done().answers


def test_a_deadline_passes(house: House, service: Service) -> None:
    go = held(service)
    waiting, ticket = submit(service, Job(house.question(), deadline_s=3600.0))
    ticket.submitted -= 3600.0
    go.set()
    assert waiting.done() == Done([], "deadline")


def test_a_listener_that_fails_cancels_its_job_alone(house: House, service: Service) -> None:
    last: Future[Event] = Future()

    def broken(event: Event) -> None:
        if isinstance(event, Done | Failed):
            last.set_result(event)
        if isinstance(event, Text):
            raise RuntimeError("gone")

    service.submit(Job(house.question(max_tokens=400)), broken)
    good, _ = submit(service, Job(house.question()))
    ended = last.result(WAIT_S)
    assert isinstance(ended, Done)
    assert ended.ended == "cancelled"
    assert good.done().answers


def test_work_runs_in_the_engines_thread(house: House, service: Service) -> None:
    thread = service.run(lambda runtime: threading.current_thread().name).result(WAIT_S)
    assert thread == "cacheblend-engine"
    with pytest.raises(ZeroDivisionError):
        service.run(lambda runtime: 1 // 0).result(WAIT_S)
    assert service.run(lambda runtime: runtime.context).result(WAIT_S) == 1024


def test_closing_lets_what_runs_finish_or_cancels_it(house: House) -> None:
    patient = Service(house.engine.runtime, house.store)
    listeners = [submit(patient, Job(house.question()))[0] for _ in range(3)]
    patient.close(WAIT_S)
    assert all(listener.done().answers for listener in listeners)
    hasty = Service(house.engine.runtime, house.store)
    listeners = [submit(hasty, Job(house.question(max_tokens=400)))[0] for _ in range(3)]
    assert listeners[0].first_text.wait(WAIT_S)
    hasty.close()
    assert [listener.done().ended for listener in listeners] == ["cancelled"] * 3
