"""From the first logits to the answer: the decode loop, stop conditions, streaming text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.model.text_stream import TextStream
from cacheblend_cli.runtime.decode import DecodeRunner
from cacheblend_cli.runtime.prefill import Prefilled
from cacheblend_cli.runtime.runtime import Runtime
from cacheblend_cli.runtime.sampling import Sampler, SamplingParams, TokenLogprob

FinishReason = Literal["stop", "length"]


@dataclass
class Generation:
    """token_ids include the EOS that ended it; text does not. first_token_at: perf_counter when it was sampled."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason = "length"
    logprobs: list[TokenLogprob] = field(default_factory=list)
    first_token_at: float = 0.0
    decode_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, over the time after the first."""
        return (len(self.token_ids) - 1) / self.decode_s if self.decode_s > 0 and len(self.token_ids) > 1 else 0.0


@dataclass(frozen=True)
class Continuation:
    """Where decoding begins: the sequence holds kv_len tokens; logits, fp32 [vocab_size], are those after the last.
    prompt_ids: the tokens, for a repetition penalty."""

    sequence: PagedSequence
    kv_len: int
    logits: Tensor
    prompt_ids: Sequence[int] = ()

    @classmethod
    def of(cls, done: Prefilled) -> Continuation:
        """Behind the prompt."""
        return cls(done.sequence, done.plan.num_tokens, done.logits, done.plan.token_ids)


def generate(
    runtime: Runtime,
    begin: Continuation,
    params: SamplingParams,
    on_text: Callable[[str], None] | None = None,
    *,
    runner: DecodeRunner | None = None,
    ahead: bool | None = None,
) -> Generation:
    """Decode until EOS, a stop string or max_tokens.

    `on_text` gets pieces that never break a UTF-8 character and never contain a stop string or a part of one.
    ahead (default: on a GPU): from the first token on, a step is queued before the token before it is looked at, so
    the device never waits for the host; the step after the last token is then computed for nothing, and not seen.
    """
    sampler, eos_ids = Sampler(params, begin.logits.device, begin.prompt_ids), runtime.model.eos_ids
    runner = runner or runtime.decode_runner(begin.sequence.pool)
    ahead = begin.logits.is_cuda if ahead is None else ahead
    newest, num_drawn = sampler.draw(begin.logits), 1
    draws = deque([newest])  # drawn and not yet looked at

    def advance() -> None:
        nonlocal newest, num_drawn
        if num_drawn == 1:
            runner.begin([begin.sequence], [begin.kv_len], params.max_tokens - 1)
        newest = sampler.draw(runner.step(newest.token)[0])
        num_drawn += 1
        draws.append(newest)

    stream, stop, out = TextStream(runtime.model.tokenizer), StopStrings(params.stop), Generation()

    def emit(piece: str) -> None:
        out.text += piece
        if on_text and piece:
            on_text(piece)

    while True:
        if ahead and out.token_ids and num_drawn < params.max_tokens:
            advance()
        token_id, logprob = draws.popleft().fetch()
        out.token_ids.append(token_id)
        if len(out.token_ids) == 1:
            out.first_token_at = time.perf_counter()
        if logprob is not None:
            out.logprobs.append(logprob)
        if token_id in eos_ids and not params.ignore_eos:
            out.finish_reason = "stop"
            break
        emit(stop.push(stream.push(token_id)))
        if stop.hit or (params.stop and stop.is_in(stream.held())):
            out.finish_reason = "stop"
            break
        if len(out.token_ids) == params.max_tokens:
            break
        if not draws:
            advance()
    out.decode_s = time.perf_counter() - out.first_token_at
    emit(stop.push(stream.flush()))
    if stop.hit:
        out.finish_reason = "stop"
    emit(stop.flush())
    return out


class StopStrings:
    """Holds back text that may be the beginning of a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops, self._held, self.hit = stops, "", False

    def push(self, piece: str) -> str:
        """The text that is safe to show. After a hit nothing more is."""
        if self.hit:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = [i for s in self._stops if (i := text.find(s)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)]
        keep = max((n for s in self._stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def is_in(self, piece: str) -> bool:
        """Whether pushing the piece would be a hit."""
        return any(s in self._held + piece for s in self._stops)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return "" if self.hit else held
