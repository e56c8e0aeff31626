"""Sampling of the next token: penalties, grammar, greedy or temperature, top-k, top-p and min-p; log-probabilities."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.pool import to_host, upload
from cacheblend_cli.types import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from cacheblend_cli.engine.worker.grammar import Grammar

LEAST_TEMPERATURE = 1e-5  # below it, logits in fp32 become infinite: it is as greedy


def logprobs_of(logits: Tensor, token_ids: Tensor, num_top: int) -> list[TokenLogprob]:
    """Return the log-probabilities of given tokens. logits: fp32 [num_tokens, vocab_size], predicting token_ids
    [num_tokens] int64."""
    logprobs = torch.log_softmax(logits, dim=-1)
    own, top = logprobs.gather(1, token_ids[:, None])[:, 0], logprobs.topk(num_top)
    parts = (token_ids, own, top.indices, top.values)
    rows = zip(*(part.tolist() for part in parts), strict=True)
    return [TokenLogprob(i, p, tuple(zip(ids, values, strict=True))) for i, p, ids, values in rows]


@dataclass(frozen=True)
class Draw:
    """A token that was drawn, on its way to the host with the others of its batch."""

    tokens: Tensor  # of the batch, [n] int64 on the device
    index: int  # in the batch
    # of the batch, on the host: tokens [n] int64; log-probabilities fp32 [n, 1 + k] of the token and the k likeliest;
    # ids of these [n, k]; None if not requested
    parts: tuple[Tensor | None, ...]
    ready: torch.cuda.Event | None  # set when the parts have arrived

    @property
    def token(self) -> Tensor:
        """The token on the device, [1] int64, for the next step."""
        return self.tokens[self.index : self.index + 1]

    def fetch(self) -> tuple[int, TokenLogprob | None]:
        """Wait for this batch alone, not for what was queued after it. Returns the token and, if requested, its
        log-probability."""
        if self.ready is not None:
            self.ready.synchronize()
        tokens, logprobs, ids = self.parts
        assert tokens is not None
        token_id = int(tokens[self.index])
        if logprobs is None or ids is None:
            return token_id, None
        own, *values = logprobs[self.index].tolist()
        return token_id, TokenLogprob(token_id, own, tuple(zip(ids[self.index].tolist(), values, strict=True)))


def draws_of(tokens: Tensor, logprobs: Tensor | None = None, ids: Tensor | None = None) -> list[Draw]:
    """Start copying a batch of tokens to the host. Arguments: as `Draw.parts`, on the device."""
    parts, ready = tuple(None if t is None else to_host(t) for t in (tokens, logprobs, ids)), None
    if tokens.is_cuda:
        ready = torch.cuda.Event()
        ready.record()
    return [Draw(tokens, i, parts, ready) for i in range(len(tokens))]


def tokens_of(draws: Sequence[Draw]) -> Tensor:
    """Return the tokens of draws for the next step, [n] int64 on the device."""
    batch = draws[0].tokens
    if len(draws) == len(batch) and all(d.tokens is batch and d.index == i for i, d in enumerate(draws)):
        return batch
    return torch.cat([draw.token for draw in draws])


class Sampler:
    """Settings and state of one sequence's draws, with its own generator, so that an answer does not depend on its
    batch."""

    def __init__(
        self,
        params: SamplingParams,
        device: torch.device,
        prompt_ids: Sequence[int] = (),
        grammar: Grammar | None = None,
    ) -> None:
        """prompt_ids: tokens that a repetition penalty counts too. grammar: constraint on the answer."""
        self.params, self.grammar = params, grammar
        self._bias: tuple[Tensor, Tensor] | None = None  # ids and values, on the device
        self._penalties = Penalties(params, prompt_ids) if params.penalises else None
        self.generator = torch.Generator(device=device)
        if params.seed is not None:
            self.generator.manual_seed(params.seed)
        else:
            self.generator.seed()

    @property
    def settings(self) -> Hashable:
        """Rows with equal settings are drawn together."""
        params = self.params
        return params.temperature, params.top_k, params.top_p, params.min_p, params.logprobs

    @property
    def alters(self) -> bool:
        """Return whether the sampler changes the model's logits."""
        return self._penalties is not None or bool(self.params.logit_bias) or self.grammar is not None

    def adjusted(self, logits: Tensor) -> Tensor:
        """Return logits [vocab_size] after penalties, bias and grammar; the same tensor if there are none."""
        if self._penalties is not None:
            logits = self._penalties.applied(logits)
        if self.params.logit_bias:
            logits = logits.index_add(0, *self._bias_of(logits))
        return logits if self.grammar is None else self.grammar.allowed(logits)

    def _bias_of(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids and values of the logit bias, uploaded once. Raises UsageError for an unknown token."""
        if self._bias is None:
            ids, values = zip(*self.params.logit_bias, strict=True)
            if not 0 <= min(ids) <= max(ids) < len(logits):
                raise UsageError("logit_bias names an unknown token", f"tokens are 0 to {len(logits) - 1}")
            self._bias = upload(ids, logits.device), upload(values, logits.device, logits.dtype)
        return self._bias

    def note(self, token: Tensor) -> None:
        """Record the token [1] int64 that was drawn. With a grammar this waits for the device."""
        if self._penalties is not None:
            self._penalties.note(token)
        if self.grammar is not None:
            self.grammar.take(int(token))


def draw_together(samplers: Sequence[Sampler], logits: Tensor, forced: Sequence[int | None]) -> list[Draw | Exception]:
    """Draw a token from each row of logits, fp32 [n, vocab_size]; a sampler's error takes the place of its own draw.
    Rows with equal settings share one operation, and get the same tokens as alone. forced: token to take instead, or
    None. Does not wait for the device; the logits may be overwritten afterwards."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, (sampler, token) in enumerate(zip(samplers, forced, strict=True)):
        groups[sampler.settings, token is None].append(index)
    draws: dict[int, Draw | Exception] = {}
    for own in groups.values():
        adjusted = dict[int, Tensor]()
        for index in own:
            try:
                adjusted[index] = samplers[index].adjusted(logits[index])
            except Exception as error:
                draws[index] = error
        if not adjusted:
            continue
        own = list(adjusted)
        rows = logits if len(own) == len(samplers) else logits[upload(own, logits.device)]
        drawn = _drawn([samplers[i] for i in own], rows, list(adjusted.values()), [forced[i] for i in own])
        for index, draw in zip(own, drawn, strict=True):
            try:
                samplers[index].note(draw.token)
                draws[index] = draw
            except Exception as error:
                draws[index] = error
    return [draws[index] for index in range(len(samplers))]


def _drawn(
    samplers: Sequence[Sampler], logits: Tensor, adjusted: Sequence[Tensor], forced: Sequence[int | None]
) -> list[Draw]:
    """Draw for samplers of the same settings; all tokens are forced, or none is. adjusted: their rows as altered."""
    params = samplers[0].params
    if forced[0] is not None:
        tokens = upload([token for token in forced if token is not None], logits.device)
    else:
        changed = any(sampler.alters for sampler in samplers)
        tokens = _tokens(samplers, torch.stack(list(adjusted)) if changed else logits)
    if params.logprobs is None:
        return draws_of(tokens)
    logprobs = torch.log_softmax(logits, dim=-1)
    top = logprobs.topk(params.logprobs)
    return draws_of(tokens, torch.cat((logprobs.gather(1, tokens[:, None]), top.values), dim=-1), top.indices)


def _tokens(samplers: Sequence[Sampler], logits: Tensor) -> Tensor:
    """Draw tokens [n] int64 from logits [n, vocab_size]."""
    if samplers[0].params.temperature == 0:
        return logits.argmax(-1)
    probs = filtered_probs(logits, samplers[0].params)
    # As torch.multinomial draws one sample, without its checks, which wait for the device: argmax of p / Exp(1).
    noise = torch.empty_like(probs)
    if all(sampler.params.seed is None for sampler in samplers):
        noise.exponential_(1, generator=samplers[0].generator)
    else:
        for row, sampler in zip(noise, samplers, strict=True):
            row.exponential_(1, generator=sampler.generator)
    return (probs / noise).argmax(-1)


class Penalties:
    """Penalties for tokens that occurred before. The repetition penalty divides positive logits of tokens of the prompt
    and the answer, and multiplies negative ones, as in transformers. The frequency penalty is subtracted once for each
    occurrence in the answer, the presence penalty once. All state is on the logits' device, so that nothing waits."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params, self._prompt_ids = params, prompt_ids
        self._in_prompt: Tensor | None = None  # [vocab_size] bool
        self._counts: Tensor | None = None  # [vocab_size] fp32, of the answer

    def applied(self, logits: Tensor) -> Tensor:
        """Return new logits, fp32 [vocab_size]."""
        if self._in_prompt is None or self._counts is None:
            self._in_prompt = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
            self._in_prompt.index_fill_(0, upload(self._prompt_ids, logits.device), True)
            self._counts = torch.zeros_like(logits)
        generated, factor = self._counts > 0, self._params.repetition_penalty
        weaker = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(generated | self._in_prompt, weaker, logits)
        return logits - self._params.frequency_penalty * self._counts - self._params.presence_penalty * generated

    def note(self, token: Tensor) -> None:
        """Count the token [1] int64 that was drawn."""
        assert self._counts is not None
        self._counts.index_add_(0, token, torch.ones_like(token, dtype=self._counts.dtype))


def filtered_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return probabilities [..., vocab_size] after temperature, top-k, top-p and min-p, in this order, not normalised;
    at least one token remains. A row's bits do not depend on the number of rows."""
    logits = logits / max(params.temperature, LEAST_TEMPERATURE)
    if params.top_k:
        kth = logits.topk(min(params.top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    probs = torch.softmax(logits, dim=-1)
    if params.top_p < 1:
        ordered, order = probs.sort(descending=True)
        outside = ordered.cumsum(-1) - ordered >= params.top_p
        probs = torch.empty_like(probs).scatter_(-1, order, ordered.masked_fill(outside, 0.0))
    if params.min_p > 0:
        probs = probs.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), 0.0)
    return probs
