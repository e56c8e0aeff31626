"""Request bodies of OpenAI's chat and text completions."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from cacheblend_cli.server.bodies import MAX_MESSAGES, AskBody, Count, Message, TopLogprobs

MAX_PROMPTS = 256


class ChatBody(AskBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    echo: Literal[False] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(AskBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions: continue a text without chat template. echo: repeat the prompt before the answer, with
    log-probabilities if requested; with max_tokens 0, return only the prompt."""

    prompt: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]
    logprobs: TopLogprobs | None = None
    echo: bool = False
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt
