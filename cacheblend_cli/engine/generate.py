"""From the first logits to the answer: the decode loop, stop conditions, streaming text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torch import Tensor

from cacheblend_cli.engine.decode import DecodeRunner
from cacheblend_cli.engine.detokenizer import Detokenizer
from cacheblend_cli.engine.grammar import grammar_of
from cacheblend_cli.engine.prefill import Prefilled
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.sampling import Draw, Sampler, SamplingParams, TokenLogprob
from cacheblend_cli.kv.pool import PagedSequence

FinishReason = Literal["stop", "length", "cancelled", "deadline"]


@dataclass
class Generation:
    """token_ids include the EOS that ended it, and the reasoning; text does not. reasoning_cut: its tokens were used up.
    first_token_at: perf_counter when it was sampled. attention: of each chunk its share, see engine/attention.py."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    reasoning_tokens: int = 0
    reasoning_cut: bool = False
    finish_reason: FinishReason = "length"
    logprobs: list[TokenLogprob] = field(default_factory=list)
    first_token_at: float = 0.0
    decode_s: float = 0.0
    attention: list[float] | None = None

    @property
    def mean_logprob(self) -> float:
        """Of a token that was drawn, in nats, where they were asked for."""
        return sum(p.logprob for p in self.logprobs) / max(1, len(self.logprobs))

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, over the time after the first."""
        return (len(self.token_ids) - 1) / self.decode_s if self.decode_s > 0 and len(self.token_ids) > 1 else 0.0


@dataclass(frozen=True)
class Listener:
    """Who is told an answer while it is made, piece by piece. text: the answer; reasoning: what is said between think
    tags before it. A piece never breaks a UTF-8 character and never holds a stop string or a part of one. token: told of every
    token before the piece that it makes certain, where log-probabilities are asked for."""

    text: Callable[[str], None] | None = None
    reasoning: Callable[[str], None] | None = None
    token: Callable[[TokenLogprob], None] | None = None

    def tell(self, reasoning: str, text: str) -> None:
        if self.reasoning and reasoning:
            self.reasoning(reasoning)
        if self.text and text:
            self.text(text)


NOBODY = Listener()
Passes = Callable[[Tensor, Sequence[int]], Tensor]
"""Given a step's logits, fp32 [vocab_size], and the ids said so far: those to draw from, the same or others."""


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


class SequenceOutput:
    """One answer while it is made: what is drawn next, what of it is said, and when it ends.

    Tokens are drawn from logits, and looked at later: `draw`, then `hear` of what it gave, in that order. Where the model may
    reason and params give that tokens of its own, the closing tag is said for the model once they are used up.
    """

    def __init__(
        self, runtime: Runtime, params: SamplingParams, prompt_ids: Sequence[int] = (), listener: Listener = NOBODY
    ) -> None:
        self._params, self._listener = params, listener
        self._grammar = grammar_of(runtime, params) if params.has_form else None
        self._sampler = Sampler(params, runtime.decoder.device, prompt_ids, self._grammar)
        self._ending = {*params.stop_ids, *(() if params.ignore_eos else runtime.model.eos_ids)}
        self._speech = Detokenizer(runtime.model.tokenizer, params.stop, runtime.template.opens_reasoning)
        self._closing_ids = partial(runtime.model.tokenizer.encode_template_rest, self._speech.closing)
        self._closing, self._thought = deque[int](), 0
        self.room, self._budget = runtime.room(params), runtime.reasoning_budget(params)
        self.num_drawn = 0
        self.out = Generation()
        self._close_when_used_up()

    def draw(self, logits: Tensor) -> Draw:
        """The next token, from logits fp32 [vocab_size]. Nothing waits for the device."""
        self.num_drawn += 1
        return self._sampler.draw(logits, self._closing.popleft() if self._closing else None)

    def hear(self, draw: Draw) -> bool:
        """Look at the token and say what it makes certain. Returns whether the answer goes on."""
        out, reasoning = self.out, self._speech.reasoning
        token_id, logprob = draw.fetch()
        out.token_ids.append(token_id)
        if len(out.token_ids) == 1:
            out.first_token_at = time.perf_counter()
        if logprob is not None:
            out.logprobs.append(logprob)
            if self._listener.token:
                self._listener.token(logprob)
        if token_id in self._ending:
            out.finish_reason = "stop"
            return False
        thinking = reasoning.open
        self._thought += thinking
        self._say(*self._speech.push(token_id))
        if thinking or reasoning.before_answer:
            out.reasoning_tokens = len(out.token_ids)
        if self._speech.stopped:
            out.finish_reason = "stop"
            return False
        answered = 0 if reasoning.undecided else len(out.token_ids) - out.reasoning_tokens
        if len(out.token_ids) == self.room or answered >= self._params.max_tokens:
            return False
        if self._grammar is not None and self._grammar.complete:
            out.finish_reason = "stop"
            return False
        self._close_when_used_up()
        return True

    def knows_next(self) -> bool:
        """Whether one more token can be drawn before the newest was heard: it cannot use the reasoning's tokens up."""
        open_or_opens = self._speech.reasoning.open or self._speech.reasoning.may_open
        if self._grammar is not None:
            return False
        free = self._budget is None or self.out.reasoning_cut or not open_or_opens or self._thought + 1 < self._budget
        return free and bool(self.out.token_ids) and self.num_drawn < self.room

    def end(self) -> Generation:
        """No token follows: say what was held back."""
        out = self.out
        out.decode_s = time.perf_counter() - out.first_token_at if out.token_ids else 0.0
        self._say(*self._speech.flush())
        if self._speech.stopped:
            out.finish_reason = "stop"
        out.reasoning = out.reasoning.strip()
        return out

    def _say(self, reasoning: str, answer: str) -> None:
        self.out.reasoning += reasoning
        self.out.text += answer
        self._listener.tell(reasoning, answer)

    def _close_when_used_up(self) -> None:
        used_up = self._budget is not None and self._thought >= self._budget
        if used_up and self._speech.reasoning.open and not self.out.reasoning_cut:
            self._closing.extend(self._closing_ids())
            self.out.reasoning_cut = True


def generate(
    runtime: Runtime,
    begin: Continuation,
    params: SamplingParams,
    listener: Listener = NOBODY,
    *,
    runner: DecodeRunner | None = None,
    ahead: bool | None = None,
    passes: Passes | None = None,
) -> Generation:
    """Decode until EOS, a stop string or max_tokens.

    ahead (default: on a GPU): from the first token on, a step is queued before the token before it is looked at, so the
    device never waits for the host; the step after the last token is then computed for nothing, and not seen. Not with
    `passes`, which is to know what was said.
    """
    utterance = SequenceOutput(runtime, params, begin.prompt_ids, listener)
    runner = runner or runtime.decode_runner(begin.sequence.pool)
    ahead = begin.logits.is_cuda and passes is None if ahead is None else ahead

    def drawn(logits: Tensor) -> Draw:
        return utterance.draw(logits if passes is None else passes(logits, utterance.out.token_ids))

    newest = drawn(begin.logits)
    draws = deque([newest])  # drawn and not yet looked at

    def advance() -> None:
        nonlocal newest
        if utterance.num_drawn == 1:
            runner.begin([begin.sequence], [begin.kv_len], utterance.room - 1)
        newest = drawn(runner.step(newest.token)[0])
        draws.append(newest)

    while True:
        if not draws:
            advance()
        if ahead and utterance.knows_next():
            advance()
        if not utterance.hear(draws.popleft()):
            return utterance.end()
