"""Responses in OpenAI's form, with a report on the use of chunks under "blend"."""

from __future__ import annotations

import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any

from cacheblend_cli.engine.events import Done, Event, Reasoning, Text, Token
from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.server.passages import MessagePassage
from cacheblend_cli.server.preprocessing import PreparedRequest
from cacheblend_cli.server.request_events import check_answered
from cacheblend_cli.types import Answer, ChunkUse, TokenLogprob


@dataclass(frozen=True)
class OpenAIResponse:
    """Builder of the response to one request."""

    chat: bool  # chat completion, else text completion
    model: str
    tokenizer: Tokenizer
    public: Callable[[str], str]  # removes private paths from a note
    usage: bool = False  # token counts in a stream, too
    explain: bool = False  # report the use of each token
    echo: bool = False  # repeat the prompt before the text
    prompt_only: bool = False  # return no generated text (echo with max_tokens 0)
    passages: Sequence[MessagePassage] | None = None  # extracted from the messages; None if not looked for
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
            choices += [self._choice(len(choices) + i, answer, before) for i, answer in enumerate(done.answers)]
        blends = [self.blend(done, one) for done, one in zip(ends, prepared, strict=True)]
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
        """Yield the objects of a stream. The last choice has "blend". Log-probabilities come with the text that their
        tokens complete."""
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
            elif isinstance(event, Text | Reasoning):
                if self.chat and event.index not in begun:
                    begun.add(event.index)
                    yield self._chunk(event.index, {"role": "assistant", "content": ""})
                if isinstance(event, Text):
                    yield self._chunk(event.index, {"content": event.text}, logprobs(event.index))
                elif self.chat:
                    yield self._chunk(event.index, {"reasoning_content": event.text}, logprobs(event.index))
            elif isinstance(event, Done):
                last = len(check_answered(event).answers) - 1
                for i, answer in enumerate(event.answers):
                    extra = {"blend": self.blend(event, prepared)} if i == last else {}
                    yield {**self._chunk(i, {}, logprobs(i), finish_reason(answer)), **extra}
                if self.usage:
                    yield {
                        **self._head(self._streamed),
                        "choices": [],
                        "usage": usage(event.answers[:1], event.answers),
                    }

    def blend(self, done: Done, prepared: PreparedRequest) -> dict[str, Any]:
        """Return the report on chunks and timing."""
        answer = done.answers[0]
        reported = answer.to_dict(explain=self.explain)
        chunks: list[dict[str, Any]] = [
            {
                "id": c.id, "document": origin.document, "title": origin.title, "tokens": c.tokens, "status": c.status,
                "recomputed": c.recomputed, "place": c.place, "rank": c.rank,
            }
            for c, origin in zip(answer.chunks, prepared.origins, strict=True)
        ]  # fmt: skip
        if self.explain:
            for record, chunk in zip(chunks, answer.chunks, strict=True):
                record["pieces"] = self._pieces(answer, chunk)
        timing = {
            name: value for name, value in reported["timing"].items() if name not in ("process_s", "model_load_s")
        }
        names = (
            "schema_version", "mode", "selector", "ratio", "ratio_from", "prompt_tokens", "cached_tokens", "exact_tokens", "recomputed_tokens",
            "recompute_fraction", "kv_bytes_loaded", "weak_match", "hits_cut",
        )  # fmt: skip
        rest: dict[str, Any] = {
            name: reported[name]
            for name in ("prefix_cache_tokens", "verify", "risk", "layers", "auto")
            if name in reported
        }
        return {
            **{name: reported[name] for name in names},
            "notes": [self.public(note) for note in reported["notes"]],
            "chunks": chunks,
            "timing": timing,
            "ended": done.ended,
            **({} if self.passages is None else {"passages": [vars(passage) for passage in self.passages]}),
            **rest,
        }

    def _pieces(self, answer: Answer, chunk: ChunkUse) -> list[tuple[str, str]]:
        """Return the chunk's text in runs of tokens of one kind: exact, reused, recomputed or computed."""
        at, pieces = chunk.start, list[tuple[str, str]]()
        for how, run in groupby(answer.kinds(chunk)):
            end = at + len(list(run))
            pieces.append((self.tokenizer.decode(answer.prompt_ids[at:end], skip_special_tokens=False), how))
            at = end
        return pieces

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    @property
    def _streamed(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(
        self, index: int, delta: dict[str, str], logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        generated: dict[str, Any] = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        choice = {"index": index, **generated, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head(self._streamed), "choices": [choice]}

    def _choice(self, index: int, answer: Answer, before: str) -> dict[str, Any]:
        """before: text to put before the answer."""
        generated: dict[str, Any] = {"text": before + answer.text}
        if self.chat:
            reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
            generated = {"message": {"role": "assistant", "content": answer.text, **reasoning}}
        reported, first = [*answer.prompt_logprobs, *answer.logprobs], answer.prompt_ids[:1] if self.echo else []
        logprobs = self._logprobs(reported, first=first)
        return {"index": index, **generated, "logprobs": logprobs, "finish_reason": finish_reason(answer)}

    def _logprobs(
        self, logprobs: Sequence[TokenLogprob], offset: int = 0, first: Sequence[int] = ()
    ) -> dict[str, Any] | None:
        """Return the log-probabilities in the API's form.

        offset: number of characters of the preceding tokens. first: the prompt's first token id, which has no
        log-probability.
        """
        if not logprobs:
            return None
        if self.chat:
            return {"content": [self.token(p) for p in logprobs], "refusal": None}
        tokens = [self._text(i) for i in (*first, *(p.token_id for p in logprobs))]
        return {
            "tokens": tokens,
            "token_logprobs": [*(None for _ in first), *(p.logprob for p in logprobs)],
            "top_logprobs": [*(None for _ in first), *({self._text(i): v for i, v in p.top} for p in logprobs)],
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)),
        }

    def token(self, logprob: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token_id, value) for token_id, value in logprob.top]
        return {**self._token(logprob.token_id, logprob.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}

    def _text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], skip_special_tokens=False)


def finish_reason(answer: Answer) -> str:
    """Return OpenAI's name: "length" also for an answer ended by its deadline, "stop" for one ended by repetition, so
    that clients do not ask for more."""
    return "stop" if answer.finish_reason in ("stop", "repetition") else "length"


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
