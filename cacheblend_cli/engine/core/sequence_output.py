"""Output of one sequence: draws tokens, streams text, and applies stop conditions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from cacheblend_cli.engine.core.detokenizer import Detokenizer
from cacheblend_cli.engine.events import OnEvent, Token, ignore
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.sampling import Draw, Sampler, draw_together
from cacheblend_cli.types import FinishReason, Piece, SamplingParams, TokenLogprob

REPEATED_COPIES = 3
REPEATED_TOKENS = 32  # all copies together: a ruled line or a row of zeros may be long
REPEATED_PERIOD = 256  # maximum tokens of one copy
REPEATED_EVERY = 4  # tokens between checks


@dataclass
class Generation:
    """Tokens and text of one answer."""

    token_ids: list[int] = field(default_factory=list)  # with the reasoning and the EOS that ended it
    text: str = ""  # without them
    reasoning: str = ""
    reasoning_tokens: int = 0
    reasoning_cut: bool = False  # the reasoning budget was used up
    finish_reason: FinishReason = "length"
    logprobs: list[TokenLogprob] = field(default_factory=list)
    first_token_at: float = 0.0  # perf_counter
    decode_s: float = 0.0
    index: int = 0  # of the answer
    accepted_tokens: int = 0  # tokens that were proposed

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the sampled tokens in nats, if log-probabilities were requested."""
        return sum(p.logprob for p in self.logprobs) / max(1, len(self.logprobs))

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, over the time after the first."""
        return (len(self.token_ids) - 1) / self.decode_s if self.decode_s > 0 and len(self.token_ids) > 1 else 0.0


class SequenceOutput:
    """Output state of one sequence: `draw` the next token from logits, then `append` it.

    on_event: callback for Token and Piece events, which carry `index`. on_logits: callbacks for the logits
    that each token is drawn from. Once the budget for reasoning is used up, the closing tag is inserted.
    """

    def __init__(
        self,
        runtime: Runtime,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        on_event: OnEvent = ignore,
        index: int = 0,
        on_logits: Sequence[Callable[[Tensor], None]] = (),
    ) -> None:
        self._params, self._on_event, self._index, self.on_logits = params, on_event, index, on_logits
        self._grammar = runtime.grammar_of(params) if params.has_form else None
        self._sampler = Sampler(params, runtime.decoder.device, prompt_ids, self._grammar)
        self._ending = {*params.stop_ids, *(() if params.ignore_eos else runtime.model.eos_ids)}
        template = runtime.template
        opened, tags = template.opens_reasoning, template.reasoning_tags
        self._detokenizer = Detokenizer(runtime.model.tokenizer, params.stop, opened, tags)
        self._closing_ids = partial(runtime.model.tokenizer.encode_template_rest, self._detokenizer.closing)
        self._closing, self._thought = deque[int](), 0
        self.max_tokens, self._budget = runtime.max_new_tokens(params), runtime.reasoning_budget(params)
        self.out = Generation(index=index)
        self._close_when_used_up()

    def draw(self, logits: Tensor) -> Draw:
        """Draw the next token from logits, fp32 [vocab_size]. Does not wait for the device."""
        (draw,) = draw_next([self], logits[None])
        if isinstance(draw, Exception):
            raise draw
        return draw

    @property
    def can_run_ahead(self) -> bool:
        """Return whether the token after the next one can be drawn before the host knows the next one: not if the next
        one is the last, or changes the following draw on the host."""
        closes = self._budget is not None and not self.out.reasoning_cut and self._thought + 1 >= self._budget
        is_last = len(self.out.token_ids) + 1 >= self.max_tokens
        return not (is_last or closes or self._grammar is not None or self.on_logits)

    def append(self, draw: Draw) -> bool:
        """Append the token, and stream the text that it completes. Returns whether the answer continues."""
        out, reasoning = self.out, self._detokenizer.reasoning
        token_id, logprob = draw.fetch()
        out.token_ids.append(token_id)
        if len(out.token_ids) == 1:
            out.first_token_at = time.perf_counter()
        if logprob is not None:
            out.logprobs.append(logprob)
            self._on_event(Token(logprob, self._index))
        if token_id in self._ending:
            out.finish_reason = "stop"
            return False
        thinking = reasoning.open
        self._thought += thinking
        self._emit(*self._detokenizer.push(token_id))
        if thinking or reasoning.before_answer:
            out.reasoning_tokens = len(out.token_ids)
        if self._detokenizer.stopped:
            out.finish_reason = "stop"
            return False
        if self._params.stop_repetition and not self._params.ignore_eos and repeats_itself(out.token_ids):
            out.finish_reason = "repetition"
            return False
        answered = 0 if reasoning.undecided else len(out.token_ids) - out.reasoning_tokens
        if len(out.token_ids) == self.max_tokens or answered >= self._params.max_tokens:
            return False
        if self._grammar is not None and self._grammar.complete:
            out.finish_reason = "stop"
            return False
        self._close_when_used_up()
        return True

    def end(self) -> Generation:
        """Flush the text held back and return the finished generation."""
        out = self.out
        out.decode_s = time.perf_counter() - out.first_token_at if out.token_ids else 0.0
        self._emit(*self._detokenizer.flush())
        if self._detokenizer.stopped:
            out.finish_reason = "stop"
        out.reasoning = out.reasoning.strip()
        return out

    def _emit(self, reasoning: str, answer: str) -> None:
        self.out.reasoning += reasoning
        self.out.text += answer
        for text, is_reasoning in ((reasoning, True), (answer, False)):
            if text:
                self._on_event(Piece(text, is_reasoning, self._index))

    def _close_when_used_up(self) -> None:
        used_up = self._budget is not None and self._thought >= self._budget
        if used_up and self._detokenizer.reasoning.open and not self.out.reasoning_cut:
            self._closing.extend(self._closing_ids())
            self.out.reasoning_cut = True


def draw_next(outputs: Sequence[SequenceOutput], logits: Tensor) -> list[Draw | Exception]:
    """Draw the next token of each output from its row of logits, fp32 [n, vocab_size]. An output's own error takes the
    place of its draw. Does not wait for the device."""
    unseen = dict[int, Exception]()
    for index, (output, row) in enumerate(zip(outputs, logits, strict=True)):
        try:
            for take in output.on_logits:
                take(row)
        except Exception as error:
            unseen[index] = error
    forced = [output._closing.popleft() if output._closing else None for output in outputs]
    draws = draw_together([output._sampler for output in outputs], logits, forced)
    return [unseen.get(index, draw) for index, draw in enumerate(draws)]


def repeats_itself(ids: Sequence[int]) -> bool:
    """Return whether the tokens end in at least REPEATED_COPIES copies of one run, REPEATED_TOKENS in all. Checks one
    in REPEATED_EVERY lengths. (Ollama ends an answer after thirty equal tokens.)"""
    if len(ids) % REPEATED_EVERY:
        return False
    for period in range(1, min(len(ids) // REPEATED_COPIES, REPEATED_PERIOD) + 1):
        count = max(REPEATED_COPIES * period, REPEATED_TOKENS)  # tokens of all copies
        if count <= len(ids) and ids[-1] == ids[-1 - period] and ids[-count:-period] == ids[period - count :]:
            return True
    return False
