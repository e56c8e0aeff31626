"""Responses in OpenAI's form, with a report on the use of chunks under "blend"."""

from __future__ import annotations

import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from cacheblend_cli.engine.events import Done, Event, Token
from cacheblend_cli.server.answer_report import AnswerReport, finish_reason
from cacheblend_cli.server.openai.annotations import annotations_of
from cacheblend_cli.server.preprocessing import PreparedRequest
from cacheblend_cli.types import Answer, Piece, TokenLogprob


@dataclass(frozen=True)
class OpenAIResponse:
    """Builder of the response to one request."""

    chat: bool  # chat completion, else text completion
    model: str
    report: AnswerReport
    page: str  # URL of the server's page
    usage: bool = False  # token counts in a stream, too
    echo: bool = False  # repeat the prompt before the text
    prompt_only: bool = False  # return no generated text (echo with max_tokens 0)
    number: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def full(self, ends: Sequence[Done], prepared: Sequence[PreparedRequest]) -> dict[str, Any]:
        """Return one object. ends, prepared: one entry per prompt."""
        choices: list[dict[str, Any]] = []
        if self.prompt_only:
            no_text: dict[str, Any] = {"text": "", "finish_reason": "length", "generated_ids": [], "logprobs": []}
            # one token is always sampled
            ends = [replace(done, answers=[replace(answer, **no_text) for answer in done.answers]) for done in ends]
        for done, one in zip(ends, prepared, strict=True):
            before = one.request.question if self.echo else ""
            choices += [self._choice(len(choices) + i, answer, one, before) for i, answer in enumerate(done.answers)]
        blends = [self.report.blend(done, one) for done, one in zip(ends, prepared, strict=True)]
        answers = [answer for done in ends for answer in done.answers]
        firsts = [done.answers[0] for done in ends]
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            **self._head(kind),
            "choices": choices,
            "usage": usage(firsts, answers),
            "blend": blends[0] if len(blends) == 1 else {"prompts": blends},
        }

    async def stream(self, events: AsyncIterator[Event], prepared: PreparedRequest) -> AsyncIterator[dict[str, Any]]:
        """Yield the objects of a stream. Each choice's last delta has its annotations, the last choice "blend".
        Log-probabilities come with the text that their tokens complete."""
        begun: set[int] = set()
        tokens: defaultdict[int, list[TokenLogprob]] = defaultdict(list)
        offsets: Counter[int] = Counter()

        def logprobs(index: int) -> dict[str, Any] | None:
            reported = self._logprobs(tokens.pop(index, []), offsets[index])
            if reported and not self.chat:
                offsets[index] += sum(map(len, reported["tokens"]))
            return reported

        async for event in events:
            if isinstance(event, Token):
                tokens[event.index].append(event.logprob)
            elif isinstance(event, Piece):
                if self.chat and event.index not in begun:
                    begun.add(event.index)
                    yield self._chunk(event.index, {"role": "assistant", "content": ""})
                if not event.reasoning:
                    yield self._chunk(event.index, {"content": event.text}, logprobs(event.index))
                elif self.chat:
                    yield self._chunk(event.index, {"reasoning_content": event.text}, logprobs(event.index))
            elif isinstance(event, Done):
                last = len(event.answers) - 1
                for i, answer in enumerate(event.answers):
                    extra = {"blend": self.report.blend(event, prepared)} if i == last else {}
                    delta = self._annotations(answer, prepared)
                    yield {**self._chunk(i, delta, logprobs(i), finish_reason(answer)), **extra}
                if self.usage:
                    yield {
                        **self._head(self._streamed),
                        "choices": [],
                        "usage": usage(event.answers[:1], event.answers),
                    }

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    @property
    def _streamed(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        generated: dict[str, Any] = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        choice = {"index": index, **generated, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head(self._streamed), "choices": [choice]}

    def _annotations(self, answer: Answer, prepared: PreparedRequest) -> dict[str, Any]:
        """Return a chat message's field for its sources, none without sources."""
        found = annotations_of(answer, prepared.origins, self.page) if self.chat else []
        return {"annotations": found} if found else {}

    def _choice(self, index: int, answer: Answer, prepared: PreparedRequest, before: str) -> dict[str, Any]:
        """before: text to put before the answer."""
        generated: dict[str, Any] = {"text": before + answer.text}
        if self.chat:
            reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
            annotations = self._annotations(answer, prepared)
            generated = {"message": {"role": "assistant", "content": answer.text, **reasoning, **annotations}}
        reported, first = [*answer.prompt_logprobs, *answer.logprobs], answer.prompt_ids[:1] if self.echo else []
        logprobs = self._logprobs(reported, first=first)
        return {"index": index, **generated, "logprobs": logprobs, "finish_reason": finish_reason(answer)}

    def _logprobs(
        self, logprobs: Sequence[TokenLogprob], offset: int = 0, first: Sequence[int] = ()
    ) -> dict[str, Any] | None:
        """Return the log-probabilities in the API's form. offset: number of characters of the preceding tokens. first:
        the prompt's first token id, which has no log-probability."""
        if not logprobs:
            return None
        if self.chat:
            return {"content": [self.report.token(p) for p in logprobs], "refusal": None}
        tokens = [self.report.text(i) for i in (*first, *(p.id for p in logprobs))]
        return {
            "tokens": tokens,
            "token_logprobs": [*(None for _ in first), *(p.logprob for p in logprobs)],
            "top_logprobs": [*(None for _ in first), *({self.report.text(i): v for i, v in p.top} for p in logprobs)],
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)),
        }


def usage(prompts: Sequence[Answer], answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the token counts. prompts: one answer per prompt."""
    prompt_tokens = sum(a.prompt_tokens for a in prompts)
    generated = sum(len(a.generated_ids) for a in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": sum(a.cached_tokens for a in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(a.reasoning_tokens for a in answers)},
    }
