"""Chat messages in OpenAI's form: a system prompt, turns and the question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from cacheblend_cli.server.api_errors import bad_request
from cacheblend_cli.server.openai.protocol import Message, TextPart

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class ChatTurns:
    """The texts of a chat."""

    system: str | None
    history: tuple[str, ...]  # alternately by user and model, before the question
    question: str


def read_messages(messages: Sequence[Message]) -> ChatTurns:
    """Join consecutive messages of one role. Raises ApiError for a conversation that cannot be rendered."""
    messages_read: list[tuple[str, str]] = []
    for i, message in enumerate(messages):
        place = f"messages.{i}"
        role = _ROLES.get(message.role)
        if role is None:
            raise bad_request(f"{place}.role is {message.role[:80]!r}; known: {', '.join(_ROLES)}", f"{place}.role")
        if message.calls_tools:
            raise bad_request("tools are not supported", f"{place}.tool_calls")
        messages_read.append((role, _text(message.content, f"{place}.content")))
    turns = [(role, "\n\n".join(text for _, text in run)) for role, run in groupby(messages_read, key=itemgetter(0))]
    system = turns.pop(0)[1] if turns[0][0] == "system" else None
    if any(role == "system" for role, _ in turns):
        raise bad_request("a system message must come first", "messages")
    if not turns or turns[0][0] != "user" or turns[-1][0] != "user":
        raise bad_request("a conversation must begin and end with a user message", "messages")
    if not turns[-1][1].strip():
        raise bad_request("the question is empty", "messages")
    *history, question = (text for _, text in turns)
    return ChatTurns(system, tuple(history), question)


def _text(content: str | list[TextPart] | None, place: str) -> str:
    if content is None:
        raise bad_request(f"{place} is missing", place)
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
