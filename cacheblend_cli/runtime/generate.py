"""From the first logits to the answer: the decode loop, stop conditions, streaming text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.runtime.decode import DecodeRunner
from cacheblend_cli.runtime.prefill import Prefilled
from cacheblend_cli.runtime.reasoning import CLOSING, Speech
from cacheblend_cli.runtime.runtime import Runtime
from cacheblend_cli.runtime.sampling import Sampler, SamplingParams, TokenLogprob

FinishReason = Literal["stop", "length"]


@dataclass
class Generation:
    """token_ids include the EOS that ended it, and the reasoning; text does not. reasoning_cut: its tokens were used up.
    first_token_at: perf_counter when it was sampled."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    reasoning_tokens: int = 0
    reasoning_cut: bool = False
    finish_reason: FinishReason = "length"
    logprobs: list[TokenLogprob] = field(default_factory=list)
    first_token_at: float = 0.0
    decode_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, over the time after the first."""
        return (len(self.token_ids) - 1) / self.decode_s if self.decode_s > 0 and len(self.token_ids) > 1 else 0.0


@dataclass(frozen=True)
class Listener:
    """Who is told an answer while it is made, piece by piece. text: the answer; reasoning: what is said between think
    tags before it. A piece never breaks a UTF-8 character and never holds a stop string or a part of one."""

    text: Callable[[str], None] | None = None
    reasoning: Callable[[str], None] | None = None

    def tell(self, reasoning: str, text: str) -> None:
        if self.reasoning and reasoning:
            self.reasoning(reasoning)
        if self.text and text:
            self.text(text)


NOBODY = Listener()


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
    listener: Listener = NOBODY,
    *,
    runner: DecodeRunner | None = None,
    ahead: bool | None = None,
) -> Generation:
    """Decode until EOS, a stop string or max_tokens.

    Where the model may reason and params give that tokens of its own, the closing tag is said for the model once they are
    used up. ahead (default: on a GPU): from the first token on, a step is queued before the token before it is looked at,
    so the device never waits for the host; the step after the last token is then computed for nothing, and not seen.
    """
    sampler, eos_ids = Sampler(params, begin.logits.device, begin.prompt_ids), runtime.model.eos_ids
    runner = runner or runtime.decode_runner(begin.sequence.pool)
    ahead = begin.logits.is_cuda if ahead is None else ahead
    speech = Speech(runtime.model.tokenizer, params.stop, runtime.template.opens_reasoning)
    room, budget = runtime.room(params), runtime.reasoning_budget(params)
    closing, thought, out = deque[int](), 0, Generation()

    def close_when_used_up() -> None:
        if budget is not None and speech.reasoning.open and thought >= budget and not out.reasoning_cut:
            closing.extend(runtime.model.tokenizer.encode_template_rest(CLOSING))
            out.reasoning_cut = True

    def knows_next() -> bool:
        """Whether the token that is not looked at yet cannot use the reasoning's tokens up."""
        open_or_opens = speech.reasoning.open or speech.reasoning.may_open
        return budget is None or out.reasoning_cut or not open_or_opens or thought + 1 < budget

    close_when_used_up()
    newest, num_drawn = sampler.draw(begin.logits, closing.popleft() if closing else None), 1
    draws = deque([newest])  # drawn and not yet looked at

    def advance() -> None:
        nonlocal newest, num_drawn
        if num_drawn == 1:
            runner.begin([begin.sequence], [begin.kv_len], room - 1)
        newest = sampler.draw(runner.step(newest.token)[0], closing.popleft() if closing else None)
        num_drawn += 1
        draws.append(newest)

    def emit(reasoning: str, answer: str) -> None:
        out.reasoning += reasoning
        out.text += answer
        listener.tell(reasoning, answer)

    while True:
        if ahead and out.token_ids and num_drawn < room and knows_next():
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
        thinking = speech.reasoning.open
        thought += thinking
        emit(*speech.push(token_id))
        if thinking or speech.reasoning.before_answer:
            out.reasoning_tokens = len(out.token_ids)
        if speech.stopped:
            out.finish_reason = "stop"
            break
        answered = 0 if speech.reasoning.undecided else len(out.token_ids) - out.reasoning_tokens
        if len(out.token_ids) == room or answered >= params.max_tokens:
            break
        close_when_used_up()
        if not draws:
            advance()
    out.decode_s = time.perf_counter() - out.first_token_at
    emit(*speech.flush())
    if speech.stopped:
        out.finish_reason = "stop"
    out.reasoning = out.reasoning.strip()
    return out
