"""Events of an answer while it is generated."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_cli.types.answer import Answer, TokenUse


@dataclass(frozen=True)
class Notes:
    """Messages about the sources. They arrive before the answer."""

    notes: list[str]


@dataclass(frozen=True)
class Progress:
    """Progress of a prompt's prefill. The first one says that the request has left the queue."""

    num_filled: int  # leading positions with KV
    num_tokens: int
    num_chunks: int
    is_check: bool = False  # of the full prefill of --verify or --confirm


@dataclass(frozen=True)
class Piece:
    """A piece of an answer, or of the reasoning before it. It ends with a whole character, and an answer's contains no
    part of a stop string."""

    text: str
    reasoning: bool = False
    index: int = 0  # of the answer, if there are several


@dataclass(frozen=True)
class CompletedAnswer:
    """A complete answer, the last event."""

    answer: Answer
    names: list[str]  # document names of the chunks, see corpus/places.py
    explained: list[str]  # see engine/engine.py: Engine.explain
    tokens: list[list[TokenUse]]  # see engine/engine.py: Engine.explain
    pid: int | None = None  # process id of the engine, None for this process


AnswerEvent = Notes | Progress | Piece | CompletedAnswer
EVENTS: dict[str, type[AnswerEvent]] = {"notes": Notes, "progress": Progress, "piece": Piece, "done": CompletedAnswer}
"""Type of an event by its name on the engine's socket."""
