"""An engine over a small store, with listeners for its events, for tests of concurrent requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

from cacheblend_store import ChunkStore
from checkpoints import WORDS, write_checkpoint

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.core.core import EngineCore
from cacheblend_cli.engine.core.sequence import RequestState, SequenceStatus
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.events import Done, Event, Failed, Limits
from cacheblend_cli.engine.features import FEATURES
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.types import Answer, AskRequest, BlendParams, Piece, SamplingParams

SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)
WAIT_S = 60.0


@dataclass
class Listener:
    """Keeps a request's events until its last."""

    events: list[Event] = field(default_factory=list)
    last: Future[Event] = field(default_factory=Future)
    first_text: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        assert not self.last.done()
        self.events.append(event)
        if isinstance(event, Piece) and not event.reasoning:
            self.first_text.set()
        if isinstance(event, Done | Failed):
            self.last.set_result(event)

    def text(self, index: int = 0) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Piece) and (e.reasoning, e.index) == (False, index))

    def done(self) -> Done:
        last = self.last.result(WAIT_S)
        assert isinstance(last, Done), last
        return last


@dataclass(frozen=True)
class StoredEngine:
    engine: Engine
    store: ChunkStore
    keys: list[bytes]

    def question(self, text: str = "where does Mara work?", **sampling: object) -> AskRequest:
        return AskRequest(text, self.keys, BlendParams(ratio=0.3), replace(SAMPLING, **sampling))

    def request(self, ask: AskRequest | None = None, **options: object) -> Request:
        """The question with its chunks resolved; `question` without one."""
        ask = ask or self.question()
        return self.engine.resolve(self.store, replace(ask, options=replace(ask.options, **options)))


@contextmanager
def open_stored_engine(
    base: Path, family: str = "llama-gqa", pages: int = 3, dtype: str = "auto", block_size: int = 16, **config: object
) -> Iterator[StoredEngine]:
    """A random model of the family, and documents of two chunks of 24 tokens each."""
    write_checkpoint(base / "model", family, **{"max_position_embeddings": 1024} | config)
    (base / "docs").mkdir()
    for page in range(pages):
        words = [WORDS[(5 * page + i) % len(WORDS)] for i in range(40)]
        (base / "docs" / f"{page}.md").write_text(" ".join(words) + "\n")
    with ChunkStore.open(base / "store", mode="write") as store:
        settings = {"dtype": dtype, "block_size": block_size, "speculate": "off"}  # a token a step
        engine = Engine.load(EngineConfig(model=str(base / "model"), **settings))
        options = PrecomputeOptions(chunk_tokens=24, context="sink")
        engine.precompute(store, [str(base / "docs")], options, lambda event: None)
        yield StoredEngine(engine, store, [m.key for m in store.chunks()])


class CoreDriver:
    """An EngineCore driven step by step. prefill_s: maximum seconds of a prompt's step beside running answers, unless a
    layer takes longer; at 0 it pauses after each layer, and else tests do not depend on the machine's speed."""

    def __init__(self, stored: StoredEngine, limits: Limits, prefill_s: float = inf) -> None:
        self.stored = stored
        self.core = EngineCore(stored.engine.runtime, limits, features=FEATURES)
        self.core.scheduler.prefill_s = prefill_s
        self.listeners: dict[RequestState, Listener] = {}
        self.count = 0
        self.seen: set[SequenceStatus] = set()

    def arrive(self, question: AskRequest, **options: object) -> tuple[Listener, RequestState]:
        listener = Listener()
        request = self.stored.request(question, save=False, **options)
        state = RequestState(request, self.count)
        self.count += 1
        self.listeners[state] = listener
        try:
            self.core.add(state)
        except Exception as error:
            listener(Failed(error))
        return listener, state

    def step(self) -> None:
        for state, event in self.core.step():
            self.listeners[state](event)
        scheduler = self.core.scheduler
        assert (
            len(scheduler.with_status(SequenceStatus.RUNNING)) + len(scheduler.with_status(SequenceStatus.SWAPPED))
            <= scheduler.max_sequences
        )
        self.seen |= {s.status for state in scheduler.states for s in state.sequences}
        self.core.blocks.space.allocator.check_integrity()

    def run(self) -> None:
        while self.core.busy:
            self.step()
        self.core.blocks.check_idle()

    def ask(self, question: AskRequest, **options: object) -> list[list[int]]:
        listener, _ = self.arrive(question, **options)
        self.run()
        return ids_of(listener)

    def answer(self, question: AskRequest) -> Answer:
        """The first answer, with the others run to their end."""
        listener, _ = self.arrive(question)
        self.run()
        ids_of(listener)
        return listener.done().answers[0]


def ids_of(listener: Listener) -> list[list[int]]:
    last = listener.last.result(0)
    assert isinstance(last, Done), last
    assert last.ended is None
    assert [listener.text(i) for i in range(len(last.answers))] == [a.text for a in last.answers]
    return [a.generated_ids for a in last.answers]


ROOMY = Limits(pool_tokens=4096, max_rows=16)


def cold(stored: StoredEngine, question: AskRequest) -> Answer:
    """The first answer of a new core without a prefix cache."""
    return CoreDriver(stored, replace(ROOMY, enable_prefix_caching=False)).answer(question)
