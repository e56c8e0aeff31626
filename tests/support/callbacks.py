"""Callbacks for the pieces of an answer."""

from __future__ import annotations

from collections.abc import Callable

from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.engine_thread import first_answer
from cacheblend_cli.engine.events import Event, OnEvent, ignore
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.types import Answer, Piece


def answered(engine: Engine, request: Request, on_event: OnEvent = ignore) -> Answer:
    """Answer a request in this thread, and give its events to on_event as they come."""
    return first_answer(event for event in engine.events(request) if (on_event(event), True)[1])


def pieces_to(text: Callable[[str], object], reasoning: Callable[[str], object] = lambda piece: None) -> OnEvent:
    """Give pieces of the answer to `text`, and those of its reasoning to `reasoning`."""

    def on_event(event: Event) -> None:
        if isinstance(event, Piece):
            (reasoning if event.reasoning else text)(event.text)

    return on_event
