"""Replies in the form of Ollama's API; the last object of an answer has "blend" as /v1 has it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cacheblend_cli.engine.events import Done, Event, Reasoning, Text, Token
from cacheblend_cli.server import replies
from cacheblend_cli.server.asking import Prepared
from cacheblend_cli.server.request_events import checked
from cacheblend_cli.types import Answer, TokenLogprob


@dataclass(frozen=True)
class OllamaReply:
    """Writer of the reply to one request. chat: as a message, else as a response. model: its name in the request.
    written: the reply of /v1 to the same request, which has the parts in common."""

    chat: bool
    model: str
    written: replies.Reply
    started_ns: int = field(default_factory=time.monotonic_ns)

    def whole(self, ends: Sequence[Done], prepared: Sequence[Prepared]) -> dict[str, Any]:
        """One object for the answer."""
        [done], [of] = ends, prepared
        [answer] = done.answers
        logprobs = self._logprobs(answer.logprobs)
        return self._record(answer.text, answer.reasoning, **logprobs, **self._last(done, of))

    async def stream(self, events: AsyncIterator[Event], prepared: Prepared) -> AsyncIterator[dict[str, Any]]:
        """A line for each piece of text, and one with the numbers. Tokens go with the piece that they end."""
        tokens: list[TokenLogprob] = []
        async for event in events:
            if isinstance(event, Token):
                tokens.append(event.logprob)
            elif isinstance(event, Text | Reasoning):
                text, thought = (event.text, "") if isinstance(event, Text) else ("", event.text)
                yield self._record(text, thought, done=False, **self._logprobs(tokens))
                tokens.clear()
            elif isinstance(event, Done):
                yield self._record("", **self._logprobs(tokens), **self._last(checked(event), prepared))

    def loaded(self) -> dict[str, Any]:
        """The reply to a request without a prompt: the model is loaded."""
        return self._record("", done_reason="load")

    def _record(self, text: str, thought: str = "", *, done: bool = True, **rest: Any) -> dict[str, Any]:
        thinking = {"thinking": thought} if thought else {}
        said: dict[str, Any] = {"response": text, **thinking}
        if self.chat:
            said = {"message": {"role": "assistant", "content": text, **thinking}}
        return {"model": self.model, "created_at": timestamp(), "done": done, **rest, **said}

    def _last(self, done: Done, prepared: Prepared) -> dict[str, Any]:
        answer = done.answers[0]
        return {
            "done_reason": replies.finish_reason(answer),
            "total_duration": time.monotonic_ns() - self.started_ns,
            "load_duration": 0,
            "prompt_eval_count": answer.prompt_tokens,
            "prompt_eval_duration": _ns(answer.timing.ttft_s),
            "eval_count": len(answer.generated_ids),
            "eval_duration": _eval_ns(answer),
            "blend": self.written.blend(done, prepared),
        }

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"logprobs": [self.written.token(token) for token in tokens]} if tokens else {}


def timestamp(seconds: float | None = None) -> str:
    """RFC 3339 in UTC; now by default."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _eval_ns(answer: Answer) -> int:
    """Time of the tokens behind the first one, 1 where there are none: clients divide by it."""
    rate = answer.timing.decode_tokens_per_s
    return max(1, _ns((len(answer.generated_ids) - 1) / rate if rate > 0 else 0))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
