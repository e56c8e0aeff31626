"""Callbacks for the pieces of an answer."""

from __future__ import annotations

from collections.abc import Callable

from cacheblend_cli.engine.events import Event, OnEvent, Reasoning, Text


def pieces_to(text: Callable[[str], object], reasoning: Callable[[str], object] = lambda piece: None) -> OnEvent:
    """Give pieces of the answer to `text`, and those of its reasoning to `reasoning`."""

    def on_event(event: Event) -> None:
        if isinstance(event, Text):
            text(event.text)
        elif isinstance(event, Reasoning):
            reasoning(event.text)

    return on_event
