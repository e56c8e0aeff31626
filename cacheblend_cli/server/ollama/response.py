"""Responses in Ollama's form; the last object of an answer has "blend" as in /v1."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cacheblend_cli.engine.events import Done, Event, Reasoning, Text, Token
from cacheblend_cli.server.openai.response import OpenAIResponse, finish_reason
from cacheblend_cli.server.preprocessing import PreparedRequest
from cacheblend_cli.server.request_events import check_answered
from cacheblend_cli.types import Answer, TokenLogprob


@dataclass(frozen=True)
class OllamaResponse:
    """Builder of the response to one request."""

    chat: bool  # /api/chat, else /api/generate
    model: str  # name in the request
    openai: OpenAIResponse  # builder of the common parts
    started_ns: int = field(default_factory=time.monotonic_ns)

    def full(self, ends: Sequence[Done], prepared: Sequence[PreparedRequest]) -> dict[str, Any]:
        """Return one object with the answer."""
        [done], [one] = ends, prepared
        [answer] = done.answers
        logprobs = self._logprobs(answer.logprobs)
        return self._record(answer.text, answer.reasoning, **logprobs, **self._last(done, one))

    async def stream(self, events: AsyncIterator[Event], prepared: PreparedRequest) -> AsyncIterator[dict[str, Any]]:
        """Yield an object for each piece of text, and a last one with statistics.

        Log-probabilities come with the text that their tokens complete.
        """
        tokens: list[TokenLogprob] = []
        async for event in events:
            if isinstance(event, Token):
                tokens.append(event.logprob)
            elif isinstance(event, Text | Reasoning):
                text, reasoning = (event.text, "") if isinstance(event, Text) else ("", event.text)
                yield self._record(text, reasoning, done=False, **self._logprobs(tokens))
                tokens.clear()
            elif isinstance(event, Done):
                yield self._record("", **self._logprobs(tokens), **self._last(check_answered(event), prepared))

    def loaded(self) -> dict[str, Any]:
        """Return the response to a request without a prompt: the model is loaded."""
        return self._record("", done_reason="load")

    def _record(self, text: str, reasoning: str = "", *, done: bool = True, **rest: Any) -> dict[str, Any]:
        thinking = {"thinking": reasoning} if reasoning else {}
        content: dict[str, Any] = {"response": text, **thinking}
        if self.chat:
            content = {"message": {"role": "assistant", "content": text, **thinking}}
        return {"model": self.model, "created_at": timestamp(), "done": done, **rest, **content}

    def _last(self, done: Done, prepared: PreparedRequest) -> dict[str, Any]:
        answer = done.answers[0]
        return {
            "done_reason": finish_reason(answer),
            "total_duration": time.monotonic_ns() - self.started_ns,
            "load_duration": 0,
            "prompt_eval_count": answer.prompt_tokens,
            "prompt_eval_duration": _ns(answer.timing.ttft_s),
            "eval_count": len(answer.generated_ids),
            "eval_duration": _eval_ns(answer),
            "blend": self.openai.blend(done, prepared),
        }

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"logprobs": [self.openai.token(token) for token in tokens]} if tokens else {}


def timestamp(seconds: float | None = None) -> str:
    """Return an RFC 3339 time in UTC, by default the current one."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _eval_ns(answer: Answer) -> int:
    """Return the decoding time of the tokens after the first, at least 1 because clients divide by it."""
    rate = answer.timing.decode_tokens_per_s
    return max(1, _ns((len(answer.generated_ids) - 1) / rate if rate > 0 else 0))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
