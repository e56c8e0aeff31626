"""Reports of a precompute run: events while it runs, and the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cacheblend_cli.collect.collector import ChunkStatus
from cacheblend_cli.collect.difference import Difference
from cacheblend_cli.collect.room import Room
from cacheblend_cli.corpus.documents import Skipped

OnEvent = Callable[["PrecomputeEvent"], None]


@dataclass(frozen=True)
class ChunkResult:
    """One line of `precompute --json`."""

    id: str
    source: str
    index: int
    tokens: int
    bytes: int  # size of the KV
    status: ChunkStatus
    omissions: tuple[str, ...] = ()  # parts left out of the document; only with its first chunk

    @property
    def record(self) -> dict[str, Any]:
        """Fields to print; no `omissions` if there are none."""
        return {name: value for name, value in vars(self).items() if name != "omissions" or value}


@dataclass(frozen=True)
class Incomplete:
    """A document whose converter left something out."""

    source: str  # relative to the current directory
    omissions: tuple[str, ...]  # in words
    is_news: bool  # the store does not have these omissions yet


@dataclass(frozen=True)
class PrecomputeEvent:
    """Progress of a run.

    | kind      | meaning                                                                                         |
    |-----------|-------------------------------------------------------------------------------------------------|
    | "reading" | `done` documents are found (`total` 0); then `done` of `total` bytes of them are read and cut   |
    | "room"    | the quota is too small for all KV                                                               |
    | "measure" | the machine's speed is measured, for no earlier run tells how long this one takes                |
    | "plan"    | `total` tokens to process; `planned` lists the changes                                          |
    | "ready"   | all documents can be searched and asked about; the KV that `planned` lists follows              |
    | "chunk"   | a chunk is stored; `done` of its tokens were worked on in this run, and `left_s` are left       |
    | "speed"   | the run's own speed is known and differs from that of earlier runs; `left_s` are left           |
    | "settled" | `done` tokens need no work; their chunks are not reported one by one                            |
    | "skipped" | a file is not a document                                                                        |
    | "omitted" | parts of documents are left out; `incomplete` lists them                                        |
    | "removed" | a document was renamed, or chunks were removed                                                  |
    | "kept"    | every stored document of a folder is gone, and the folder is left as it is                      |
    """

    kind: Literal[
        "reading", "room", "measure", "plan", "ready", "chunk", "speed", "settled", "skipped", "omitted", "removed", "kept"
    ]  # fmt: skip
    chunk: ChunkResult | None = None
    message: str = ""  # text to show the user
    done: int = 0
    total: int = 0
    left_s: float = 0.0  # estimated seconds until the run ends, 0 if unknown
    room: Room | None = None
    skipped: Skipped | None = None
    incomplete: Sequence[Incomplete] = ()
    planned: Difference | None = None
    report: PrecomputeReport | None = None  # of the run so far


@dataclass
class PrecomputeReport:
    """Result of a run."""

    documents: int = 0
    gone: int = 0  # documents that no longer exist
    new: int = 0  # chunks
    unchanged: int = 0  # chunks
    replaced: int = 0  # chunks
    removed: int = 0  # chunks
    chunks: int = 0  # total of the stored documents
    with_kv: int = 0  # chunks of these that are reported and have KV
    tokens: int = 0  # total of all chunks
    computed_tokens: int = 0
    bytes: int = 0  # KV of these documents that fits the quota
    taken: int = 0  # chunks with KV from the store's tier
    seconds: float = 0.0
    hidden: list[str] = field(default_factory=list)  # other documents that `ask` does not find because of the new date
    difference: Difference = field(default_factory=Difference)  # planned changes
    skipped: list[Skipped] = field(default_factory=list)
    emptied: list[str] = field(default_factory=list)  # folders left as they are: all their stored documents are gone
    incomplete: list[Incomplete] = field(default_factory=list)

    @property
    def unread(self) -> list[Skipped]:
        """Files that could not be read, and whose stored version was kept."""
        return [file for file in self.skipped if file.is_stored and not file.by_rule]

    @property
    def tokens_per_s(self) -> float:
        return self.computed_tokens / self.seconds if self.seconds else 0.0
