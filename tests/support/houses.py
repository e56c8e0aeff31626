"""An engine over a small store, and who listens to what it says, for tests of many questions at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from cacheblend_store import ChunkStore
from checkpoints import WORDS, write_checkpoint

from cacheblend_cli.api import BlendConfig, Engine, EngineConfig, PrecomputeOptions, Question, SamplingParams
from cacheblend_cli.runtime.service import Done, Event, Failed, Text

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


@contextmanager
def open_house(base: Path, family: str = "llama-gqa", pages: int = 3, **config: object) -> Iterator[House]:
    """A random model of the family, in blocks of 16, and documents of two chunks of 24 tokens each."""
    write_checkpoint(base / "model", family, **{"max_position_embeddings": 1024} | config)
    (base / "docs").mkdir()
    for page in range(pages):
        words = [WORDS[(5 * page + i) % len(WORDS)] for i in range(40)]
        (base / "docs" / f"{page}.md").write_text(" ".join(words) + "\n")
    with ChunkStore.open(base / "store", mode="write") as store:
        engine = Engine.load(EngineConfig(model=str(base / "model"), block_size=16))
        options = PrecomputeOptions(chunk_tokens=24, context="sink")
        engine.precompute(store, [str(base / "docs")], options, lambda event: None)
        yield House(engine, store, [m.key for m in store.chunks()])
