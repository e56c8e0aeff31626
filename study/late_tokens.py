"""Fewer recomputed tokens in the first layers and more in the others: those that enter late begin with a stored hidden
state. And a prior for the selector from collecting. For `nearer_ideas.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Literal

import torch
from chunk_readings import Reading
from torch import Tensor

from cacheblend_cli.blend.corrections import CHUNK, LEAST_NOISE, LENGTHS, NEAR, NOISE
from cacheblend_cli.blend.evidence import BeforeLayers
from cacheblend_cli.blend.policy import BlendPolicy
from cacheblend_cli.blend.prefill import BlendSteps, PrefillResult
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import Candidates, Evidence, QueryAttention, choose
from cacheblend_cli.kv.forward import Pass, layer_by_layer

State = Literal["alone", "moved", "regressed", "true"]
"""Hidden state of a token that enters: of the chunk collected alone; moved by the mean change of its chunk's known
tokens; moved by a Gaussian process with the regression's prior; or of a full prefill, which nobody has."""
LITTLE = 0.25
"""A mean change over m known tokens is moved by m / (m + LITTLE)."""


class Entering(BlendSteps):
    """The default's steps, for a number of tokens that changes once."""

    scores: Tensor

    def choose_before(self, evidence: Evidence) -> None:
        self.scores = torch.zeros(self._prompt.plan.num_tokens)
        self.scores[self._all.positions] = self._policy.selector.scores(self._all, evidence)

    def narrow(self, ratio: float) -> None:
        self._keep(self._all.take(choose(self.scores[self._all.positions], round(ratio * len(self._all)), self._all)))

    def stored(self, states: Callable[[bytes], Tensor]) -> Tensor:
        """Return the chunks' stored states, one a position, [num_tokens, hidden_size]."""
        parts = [(s.start, s.end, states(s.key)) for s in self._prompt.plan.segments if s.status == "blended" and s.key]
        found = parts[0][2].new_zeros(self._prompt.plan.num_tokens, parts[0][2].shape[1])
        for start, end, own in parts:
            found[start:end] = own
        return found

    def moved(self, stored: Tensor, known: Tensor, fresh: Tensor, state: State) -> Tensor:
        """Return the stored states, each chunk's moved by what its known tokens show. known: their positions; fresh:
        their states, [m, hidden_size]."""
        moved = stored.float()
        for start, end in ((s.start, s.end) for s in self._prompt.plan.segments if s.status == "blended"):
            of = (known >= start) & (known < end)
            if count := int(of.sum()):
                old, own = moved[start:end].clone(), known[of] - start
                change = fresh[of].float() - old[own]
                if state == "moved":
                    moved[start:end] += count / (count + LITTLE) * change.mean(0)
                else:
                    moved[start:end] += regressed(old, own, change)
        return moved.to(stored.dtype)


def regressed(old: Tensor, own: Tensor, change: Tensor) -> Tensor:
    """Return the moves of a chunk's states by the regression's prior, where tokens are alike whose normed states are.
    old: [n, hidden_size]; own: offsets of known tokens; change: of these."""
    normed = old / old.square().mean(-1, keepdim=True).sqrt()
    unit = (normed - normed.mean(0)).square().sum(-1).mean()
    place = torch.arange(len(old))
    near = sum(torch.exp(-(place[own, None] - place).abs() / length) for length in LENGTHS)
    alike = CHUNK + NEAR * near + torch.exp(-torch.cdist(normed[own], normed).square() / (2 * unit))
    sizes = change.square().sum(-1)
    noise = NOISE * (sizes / sizes.mean()).clamp_min(LEAST_NOISE)
    lower = torch.linalg.cholesky_ex(alike[:, own] + torch.diag(noise)).L
    return alike.mT @ torch.cholesky_solve(change, lower)


def entering(
    readings: Mapping[bytes, Reading],
    true: Mapping[int, Tensor],
    at: Callable[[int], int],
    ratios: tuple[float, float],
    state: State,
) -> Callable[..., Pass[PrefillResult]]:
    """Return `blended_layers` with two ratios, in units of the policy's: before and from layer `at` of all layers on.
    true: hidden states of a full prefill at the input of layers, [num_tokens, hidden_size]."""

    def run(prompt: Prompt, policy: BlendPolicy, output_positions: Tensor | None = None) -> Pass[PrefillResult]:
        num, decoder = prompt.plan.num_tokens, prompt.decoder
        outputs = torch.tensor([num - 1]) if output_positions is None else output_positions
        steps, (_, ratio) = Entering(prompt, policy, outputs), policy.checks[0]
        if not steps.is_scored:
            raise ValueError("there is nothing to choose")
        evidence = BeforeLayers(prompt, policy.probe_layers)
        yield from evidence.probe(steps.candidates)
        steps.choose_before(evidence)
        cut, lower, upper = at(len(decoder.layers)), copy(decoder), copy(decoder)
        lower.layers, upper.layers = decoder.layers[:cut], decoder.layers[cut:]
        steps.narrow(ratios[0] * ratio)
        first = steps.rows.positions
        hidden = yield from layer_by_layer(lower, steps.rows, prompt.token_ids[first], steps)
        assert hidden is not None
        fresh = hidden.delta + hidden.residual
        known = steps.candidates.positions
        if state == "true":
            stored = true[cut].clone()
        else:
            stored = steps.stored(lambda key: readings[key].states[cut])
        if state in ("moved", "regressed"):
            stored = steps.moved(stored, known, fresh[torch.searchsorted(first, known)], state)
        stored[first] = fresh
        steps.narrow(ratios[1] * ratio)
        rows = steps.rows
        upper.embed = lambda ids: stored[rows.positions]  # type: ignore[method-assign]
        last = yield from layer_by_layer(upper, rows, prompt.token_ids[rows.positions], steps)
        assert last is not None
        return PrefillResult(last.logits(decoder), steps.candidates.positions, steps.reports)

    return run


class Prior(QueryAttention):
    """`query`, where keys that drew attention when their chunk was collected count for more. layers: "probe" or "all";
    over: of heads; among: top share of a chunk; times, plus: what the bit adds, by the score and by the mean score;
    per_row: whether attention is divided by the number of later tokens."""

    readings: Mapping[bytes, Reading]
    layers, over, among, times, plus, per_row = "probe", "sum", 0.2, 1.0, 0.0, False

    def scores(self, candidates: Candidates, evidence: Evidence) -> Tensor:
        assert isinstance(evidence, BeforeLayers)
        found, drawn = super().scores(candidates, evidence), torch.zeros(len(candidates))
        for number, segment in enumerate(evidence.prompt.plan.segments):
            if segment.status == "blended" and segment.key is not None:
                of = candidates.chunk == number
                drawn[of] = self._bits(self.readings[segment.key], evidence.probe_layers)[candidates.offset[of]]
        return found * (1 + self.times * drawn) + self.plus * found.mean() * drawn

    def _bits(self, reading: Reading, probed: frozenset[int]) -> Tensor:
        received = reading.received
        if self.layers == "probe":
            received = received[sorted(probed)]
        if self.per_row:
            received = received / torch.arange(received.shape[-1] - 1, -1, -1).clamp_min(8)
        received = received.flatten(0, 1)
        score = received.sum(0) if self.over == "sum" else received.amax(0)
        bits = torch.zeros(len(score))
        bits[score.topk(round(self.among * len(score))).indices] = 1
        return bits


def prior(readings: Mapping[bytes, Reading], **fields: object) -> type[Prior]:
    """Return the selector with these fields."""
    return type("GivenPrior", (Prior,), {"readings": readings, **fields})
