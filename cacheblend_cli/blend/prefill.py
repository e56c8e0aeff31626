"""Blended prefill (CacheBlend, EuroSys'25, arXiv 2405.16444): old KV where it is right, fresh KV where it is not.

| status      | layers                 | does                                                                  |
|-------------|------------------------|-----------------------------------------------------------------------|
| PREFILL     | before the check layer | all rows; at layer 0 cached rows project Q only, and keep their K, V  |
| CHECK       | the check layer(s)     | fresh K, V for all rows; score; choose; then chosen rows + fresh rows |
| AFTER_CHECK | the rest               | the chosen rows: fresh K and V overwrite their slots, they attend     |
| DECODE      | generation             | one row a sequence (`forward`)                                        |

A selector that needs no check layer chooses before layer 0, and every layer is AFTER_CHECK.

Rows are positions, sorted. A row at position p sees the keys at positions <= p and no others: causality is by
position, never by row number. Exact spans are never rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from cacheblend_cli.blend.corrections import Correction
from cacheblend_cli.blend.evidence import AtCheckLayer, BeforeLayers
from cacheblend_cli.blend.policy import BlendPolicy
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import Candidates, Evidence
from cacheblend_cli.kv.device_time import DeviceTime
from cacheblend_cli.kv.forward import (
    NO_WORK,
    FreshKV,
    LayerStep,
    LayerWork,
    Pass,
    Steps,
    finish,
    last_narrowing,
    layer_by_layer,
    write_kv,
)
from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.rows import Rows, joined, positions_of
from cacheblend_cli.model.decoder import DecoderLayer
from cacheblend_cli.prompt.plan import PromptPlan
from cacheblend_cli.types import LayerReport, LayerStatus

_NOTHING = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class PrefillResult:
    """The prefill of a prompt: the whole one, or what is done after a step of it. It knows no request, so that a worker
    returns it as the algorithm does."""

    loader: KVLoader  # figures of loading, final once the prompt is done
    num_filled: int  # leading positions whose KV is final
    logits: Tensor = _NOTHING  # fp32 [number of output positions, vocab_size], once the prompt is done
    chosen: Tensor = _NOTHING  # sorted positions that were recomputed in the last layers, int64
    layers: Sequence[LayerReport] = ()  # of the whole prompt, () before it is done
    time: DeviceTime = field(default_factory=DeviceTime)  # of a worker's steps so far
    is_paused: bool = False  # between two layers of a step

    @property
    def is_done(self) -> bool:
        return bool(self.layers)

    @property
    def fresh_token_layers(self) -> int:
        return sum(report.fresh for report in self.layers)


def blended_prefill(prompt: Prompt, policy: BlendPolicy) -> PrefillResult:
    """`blended_layers` without pauses."""
    return finish(blended_layers(prompt, policy))


def blended_layers(prompt: Prompt, policy: BlendPolicy, output_positions: Tensor | None = None) -> Pass[PrefillResult]:
    """Fill the sequence's KV for the whole prompt, with pauses between layers, and return the logits at
    `output_positions` (default: the last).

    Without cached segments in the plan this is a full prefill. Raises BadChunk if stored KV cannot be used.
    """
    decoder = prompt.decoder
    if output_positions is None:
        output_positions = torch.full((1,), prompt.plan.num_tokens - 1, device=decoder.device)
    steps = BlendSteps(prompt, policy, output_positions)
    if not policy.needs_check_layer:
        evidence = BeforeLayers(prompt, policy.probe_layers)
        if steps.is_scored and policy.probes:
            for num_rows in evidence.probe(steps.candidates):
                steps.prepare()
                yield num_rows
        steps.choose_before(evidence)
    rows = steps.rows
    hidden = yield from layer_by_layer(decoder, rows, prompt.token_ids[rows.positions], steps)
    assert hidden is not None
    chosen, num_filled = steps.candidates.positions, prompt.plan.num_tokens
    return PrefillResult(prompt.loader, num_filled, hidden.logits(decoder), chosen, steps.reports)


class BlendSteps(Steps):
    """Steps of a blended prefill, and the rows still being computed: candidates (cached, inexact) and fresh rows."""

    def __init__(self, prompt: Prompt, policy: BlendPolicy, output_positions: Tensor) -> None:
        self._prompt, self._policy, self._output_positions = prompt, policy, output_positions
        self._all, self._fresh = _split(prompt.plan, prompt.decoder.device)
        self._correction: Correction | None = None
        self._work: LayerWork | None = NO_WORK
        self._ratios = dict(policy.checks) if policy.needs_check_layer and len(self._all) else {}
        self._last_check = max(self._ratios, default=-1)
        self._last_layer = last_narrowing(prompt.decoder)  # after its K and V only output rows go on
        self.reports: list[LayerReport] = []
        self.candidates = self._all
        if policy.needs_check_layer:  # else `choose_before` keeps some
            self._keep(self._all)

    def at(self, layer: DecoderLayer) -> LayerStep:
        if not layer.own_kv:
            self.reports.append(LayerReport(layer.index, LayerStatus.AFTER_CHECK, len(self._output_positions), 0))
            return LayerStep()
        self._prompt.loader.wait(layer.index)
        status = self._status(layer.index)
        self.reports.append(LayerReport(layer.index, status, len(self.rows), len(self.candidates)))
        if status is LayerStatus.CHECK:
            return LayerStep(next_rows=partial(self._check, last=layer.index == self._last_layer))
        if layer.index == self._last_layer:
            return LayerStep(next_rows=self.outputs())
        if layer.index == 0 and self._policy.layer0_exact and len(self.candidates):
            # at layer 0, K and V depend on the token alone
            return LayerStep(kv_rows=self._fresh_index, kv_taken=self._prompt.rows(self._fresh))
        return LayerStep()

    def outputs(self) -> Tensor:
        """Rows whose logits are needed: only these pass through the last layer."""
        return torch.searchsorted(self.rows.positions, self._output_positions)

    def fresh(self, fresh: FreshKV) -> None:
        """Correct the old KV of rows dropped by an earlier choice, based on the fresh K and V."""
        if self._correction is None or fresh.layer.index == 0:
            return
        if self._work is not None:
            self._work.fresh(fresh)
        else:
            self._correction.apply(fresh.layer, fresh.k[self._candidate_index], fresh.v[self._candidate_index])

    def work(self, layer: DecoderLayer) -> LayerWork | None:
        return self._work

    def prepare(self) -> None:
        """Compute what `choose_before` needs whatever is chosen, while the GPU computes the scores or waits for KV."""
        self._prompt.rows(self._fresh)
        if self._policy.correction is not None and self._prompt.decoder.kernels.has_correction:
            self._prompt.rows(self._all.positions)
            self._all.starts  # noqa: B018

    @property
    def is_scored(self) -> bool:
        """Return whether `choose_before` scores the candidates."""
        ratio, count = self._policy.checks[0][1], len(self._all)
        return self._policy.is_scored(ratio, count, count, len(self._fresh))

    def choose_before(self, evidence: Evidence) -> None:
        """Narrow the candidates before layer 0."""
        self._choose(self._policy.checks[0][1], evidence)

    def _check(self, fresh: FreshKV, last: bool) -> Tensor:
        """Narrow the candidates to the layer's ratio. Returns the rows that continue."""
        own = self._fresh_index
        write_kv(fresh.layer, fresh.k[own], fresh.v[own], fresh.rows.take(own))  # the suffix attends to itself too
        suffix = own[-len(self._prompt.plan.segments[-1].token_ids) :]
        evidence = AtCheckLayer(self._prompt, fresh, self._candidate_index, suffix, self._policy.deviation)
        self._choose(self._ratios[fresh.layer.index], evidence)
        kept = self._output_positions if last else self.rows.positions
        return torch.searchsorted(fresh.rows.positions, kept)

    def _choose(self, ratio: float, evidence: Evidence) -> None:
        kept = self._policy.select(ratio, len(self._all), self.candidates, evidence, len(self._fresh))
        # one rank chooses for all: rounding differences must not split them
        self._keep(self.candidates.take(self._prompt.decoder.part.ranks.of_first(kept)))

    def _keep(self, candidates: Candidates) -> None:
        self.candidates = candidates
        positions = torch.cat((candidates.positions, self._fresh)).sort().values
        narrowed = len(candidates) < len(self._all)
        self.rows: Rows = self._prompt.rows(positions)
        self._candidate_index = torch.searchsorted(positions, candidates.positions)
        self._fresh_index = torch.searchsorted(positions, self._fresh)
        if narrowed and len(candidates) and self._policy.correction is not None:
            self._correction = self._policy.correction(self._prompt, self._all, candidates)
            self._work = self._correction.work(self._candidate_index)

    def _status(self, layer: int) -> LayerStatus:
        if layer in self._ratios:
            return LayerStatus.CHECK
        return LayerStatus.PREFILL if layer < self._last_check else LayerStatus.AFTER_CHECK


def _split(plan: PromptPlan, device: torch.device) -> tuple[Candidates, Tensor]:
    """Return the plan's candidates, and the positions that are always computed."""
    blended = [(i, s) for i, s in enumerate(plan.segments) if s.status == "blended"]
    computed = [s for s in plan.segments if s.status == "computed"]

    chunk = joined([torch.full((s.num_tokens,), i) for i, s in blended], device)
    offset = joined([torch.arange(s.num_tokens) for _, s in blended], device)
    sizes = tuple(s.num_tokens for _, s in blended if s.token_ids)
    every = Candidates(positions_of([s for _, s in blended], device), chunk, offset, sizes)
    return every, positions_of(computed, device)
