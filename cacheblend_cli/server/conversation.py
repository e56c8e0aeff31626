"""Messages as OpenAI's API has them: a system prompt, turns, and the question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend_cli.server.errors import bad

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class Conversation:
    """system: None where there is none. history: what the user and the model said in turn, before the question."""

    system: str | None
    history: tuple[str, ...]
    question: str


def read_messages(messages: Sequence[dict[str, Any]]) -> Conversation:
    """Messages of one role that follow each other are one. Raises ApiError for what cannot be rendered."""
    turns: list[tuple[str, str]] = []
    for i, message in enumerate(messages):
        place = f"messages.{i}"
        role = _ROLES.get(str(message.get("role")))
        if role is None:
            raise bad(f"{place}.role is {message.get('role')!r}; known: {', '.join(_ROLES)}", f"{place}.role")
        if message.get("tool_calls") or message.get("function_call"):
            raise bad("tools are not supported", f"{place}.tool_calls")
        text = _text(message.get("content"), f"{place}.content")
        if turns and turns[-1][0] == role:
            turns[-1] = (role, f"{turns[-1][1]}\n\n{text}")
        else:
            turns.append((role, text))
    system = turns.pop(0)[1] if turns[0][0] == "system" else None
    if any(role == "system" for role, _ in turns):
        raise bad("a system message stands before all others", "messages")
    if not turns or turns[0][0] != "user" or turns[-1][0] != "user":
        raise bad("a conversation begins and ends with a message of the user", "messages")
    if not turns[-1][1].strip():
        raise bad("the question is empty", "messages")
    *history, question = (text for _, text in turns)
    return Conversation(system, tuple(history), question)


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(f"{place} is no text", place)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad(f"{place} has a part that is no text", place)
        texts.append(part["text"])
    return "\n".join(texts)
