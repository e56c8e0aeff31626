"""Replies in OpenAI's form, and beside it, under "blend", what became of the chunks."""

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
from cacheblend_cli.server.asking import Prepared
from cacheblend_cli.server.passages import Passage
from cacheblend_cli.server.request_events import checked
from cacheblend_cli.types import Answer, ChunkUse, TokenLogprob


@dataclass(frozen=True)
class Reply:
    """Writer of the answers to one request. chat: as messages, else as text. public: returns a note without private
    paths. usage: in a stream, too. explain: report each token's use. echo: put the prompt before the text; silent:
    nothing behind it. passages: found in the messages, None where they are not looked for."""

    chat: bool
    model: str
    tokenizer: Tokenizer
    public: Callable[[str], str]
    usage: bool = False
    explain: bool = False
    echo: bool = False
    silent: bool = False
    passages: Sequence[Passage] | None = None
    number: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, ends: Sequence[Done], prepared: Sequence[Prepared]) -> dict[str, Any]:
        """One object. ends: of every prompt, with what was prepared for it."""
        choices: list[dict[str, Any]] = []
        if self.silent:
            ends = [replace(done, answers=[unsaid(answer) for answer in done.answers]) for done in ends]
        for done, of in zip(ends, prepared, strict=True):
            before = of.request.question if self.echo else ""
            choices += [self._choice(len(choices) + i, answer, before) for i, answer in enumerate(done.answers)]
        blends = [self.blend(done, of) for done, of in zip(ends, prepared, strict=True)]
        answers = [answer for done in ends for answer in done.answers]
        firsts = [done.answers[0] for done in ends]
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            **self._head(kind),
            "choices": choices,
            "usage": usage(firsts, answers),
            "blend": blends[0] if len(blends) == 1 else {"prompts": blends},
        }

    async def stream(self, events: AsyncIterator[Event], prepared: Prepared) -> AsyncIterator[dict[str, Any]]:
        """Objects of a stream. The last one with a choice has "blend". Tokens go with the piece of text that they
        end."""
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
                last = len(checked(event).answers) - 1
                for i, answer in enumerate(event.answers):
                    extra = {"blend": self.blend(event, prepared)} if i == last else {}
                    yield {**self._chunk(i, {}, logprobs(i), finish_reason(answer)), **extra}
                if self.usage:
                    yield {
                        **self._head(self._streamed),
                        "choices": [],
                        "usage": usage(event.answers[:1], event.answers),
                    }

    def blend(self, done: Done, prepared: Prepared) -> dict[str, Any]:
        """Return the chunks' use and the timing."""
        answer = done.answers[0]
        reported = answer.to_dict(explain=self.explain)
        chunks: list[dict[str, Any]] = [
            {
                "id": c.id, "document": of.document, "title": of.title, "tokens": c.tokens, "status": c.status,
                "recomputed": c.recomputed, "place": c.place,
            }
            for c, of in zip(answer.chunks, prepared.origins, strict=True)
        ]  # fmt: skip
        if self.explain:
            for record, chunk in zip(chunks, answer.chunks, strict=True):
                record["pieces"] = self._pieces(answer, chunk)
        timing = {
            name: value for name, value in reported["timing"].items() if name not in ("process_s", "model_load_s")
        }
        names = (
            "mode", "selector", "ratio", "ratio_from", "prompt_tokens", "cached_tokens", "exact_tokens", "recomputed_tokens",
            "recompute_fraction", "kv_bytes_loaded", "weak_match",
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
        """The chunk's text in runs of tokens whose KV came to be in one way: exact, reused, recomputed or computed."""
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
        """before: what stands before the text."""
        generated: dict[str, Any] = {"text": before + answer.text}
        if self.chat:
            reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
            generated = {"message": {"role": "assistant", "content": answer.text, **reasoning}}
        reported, first = [*answer.prompt_logprobs, *answer.logprobs], answer.prompt_ids[:1] if self.echo else []
        logprobs = self._logprobs(reported, first=first)
        return {"index": index, **generated, "logprobs": logprobs, "finish_reason": finish_reason(answer)}

    def _logprobs(
        self, of: Sequence[TokenLogprob], offset: int = 0, first: Sequence[int] = ()
    ) -> dict[str, Any] | None:
        """offset: characters of the tokens before. first: a token before them that nothing predicts."""
        if not of:
            return None
        if self.chat:
            return {"content": [self.token(p) for p in of], "refusal": None}
        tokens = [self._text(i) for i in (*first, *(p.token_id for p in of))]
        return {
            "tokens": tokens,
            "token_logprobs": [*(None for _ in first), *(p.logprob for p in of)],
            "top_logprobs": [*(None for _ in first), *({self._text(i): v for i, v in p.top} for p in of)],
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)),
        }

    def token(self, of: TokenLogprob) -> dict[str, Any]:
        top = [self._named(token_id, value) for token_id, value in of.top]
        return {**self._named(of.token_id, of.logprob), "top_logprobs": top}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}

    def _text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], skip_special_tokens=False)


def unsaid(answer: Answer) -> Answer:
    """Return the answer with no text: one token is always sampled."""
    return replace(answer, text="", finish_reason="length", generated_ids=[], logprobs=[])


def finish_reason(answer: Answer) -> str:
    """OpenAI's names: an answer that was ended by its time has no other than "length". One that repeated itself has
    nothing more to say: clients ask for the rest of one that was cut."""
    return "stop" if answer.finish_reason in ("stop", "repetition") else "length"


def usage(prompts: Sequence[Answer], answers: Sequence[Answer]) -> dict[str, Any]:
    """prompts: an answer of every prompt."""
    asked = sum(a.prompt_tokens for a in prompts)
    generated = sum(len(a.generated_ids) for a in answers)
    return {
        "prompt_tokens": asked,
        "completion_tokens": generated,
        "total_tokens": asked + generated,
        "prompt_tokens_details": {"cached_tokens": sum(a.cached_tokens for a in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(a.reasoning_tokens for a in answers)},
    }
