"""Events of an answer while it is generated: also the JSON records of the engine's socket."""

from __future__ import annotations

from msgspec import Struct

from cacheblend_cli.types.answer import Answer, TokenUse


class Notes(Struct, frozen=True, tag_field="event", tag="notes"):
    """Messages about the sources. They arrive before the answer."""

    notes: list[str]


class Piece(Struct, frozen=True, tag_field="event", tag="piece"):
    """A piece of the answer, or of the reasoning before it."""

    text: str
    reasoning: bool = False


class CompletedAnswer(Struct, frozen=True, tag_field="event", tag="done"):
    """A complete answer, the last event."""

    answer: Answer
    names: list[str]  # document names of the chunks, see corpus/places.py
    explained: list[str]  # see engine/engine.py: Engine.explain
    tokens: list[list[TokenUse]]  # see engine/engine.py: Engine.explain
    pid: int  # process id of the engine


AnswerEvent = Notes | Piece | CompletedAnswer
