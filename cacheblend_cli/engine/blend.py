"""Blended prefill (CacheBlend, EuroSys'25, arXiv 2405.16444): old KV where it is right, fresh KV where it is not.

| status      | layers                 | does                                                                  |
|-------------|------------------------|-----------------------------------------------------------------------|
| PREFILL     | before the check layer | all rows; at layer 0 cached rows project Q only, their K and V stand  |
| CHECK       | the check layer(s)     | fresh K, V for all rows; score; choose; then chosen rows + fresh rows |
| AFTER_CHECK | the rest               | the chosen rows: fresh K and V overwrite their slots, they attend     |
| DECODE      | generation             | one row a sequence (forward.decode_one_token)                         |

Rows are positions, sorted. A row at position p sees the keys at positions <= p and no others: causality is by
position, never by row number. Exact spans are never rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise

import torch
from torch import Tensor

from cacheblend_cli.engine.device import upload
from cacheblend_cli.engine.forward import attend, write_kv
from cacheblend_cli.engine.kv_loader import KVLoader
from cacheblend_cli.engine.kv_pool import KVPool, PagedSequence
from cacheblend_cli.engine.rows import Rows, rows_of
from cacheblend_cli.engine.selectors import Candidates, Selector, budget, choose
from cacheblend_cli.model.decoder import Decoder, DecoderLayer
from cacheblend_cli.prompt.plan import PromptPlan


class Status(IntEnum):
    DECODE = -1
    PREFILL = 0
    CHECK = 1
    AFTER_CHECK = 2


@dataclass(frozen=True)
class BlendPolicy:
    """What to recompute. checks: (layer, ratio) pairs, layers rising and ratios falling (gradual filtering); a selector
    that needs no check layer uses the ratio of the first one before layer 0. deviation: "v", "k" or "kv".
    layer0_exact: the stored K and V of layer 0 are what this run would compute (a lossless codec)."""

    selector: Selector
    checks: tuple[tuple[int, float], ...]
    deviation: str = "k"
    block: int = 1
    layer0_exact: bool = True


@dataclass(frozen=True)
class LayerReport:
    """One layer of a blended prefill. fresh: reusable tokens whose KV or hidden state was computed at this layer."""

    layer: int
    status: Status
    rows: int
    fresh: int
    mean_deviation: float | None = None


@dataclass
class PrefillResult:
    """logits: fp32 [len(output positions), vocab_size]. chosen: sorted positions recomputed in the last layers."""

    logits: Tensor
    chosen: Tensor
    layers: list[LayerReport] = field(default_factory=list)

    @property
    def fresh_token_layers(self) -> int:
        return sum(report.fresh for report in self.layers)


def blended_prefill(
    decoder: Decoder,
    pool: KVPool,
    sequence: PagedSequence,
    plan: PromptPlan,
    policy: BlendPolicy,
    loader: KVLoader,
    *,
    output_positions: Tensor | None = None,
) -> PrefillResult:
    """Fill the sequence's KV for the whole prompt and return the logits at `output_positions` (default: the last).

    With no cached segment in the plan this is a full prefill. Raises BadChunk when stored KV cannot be used.
    """
    state = _RowState.start(decoder, sequence, plan, policy)
    last = len(decoder.layers) - 1
    if output_positions is None:
        output_positions = torch.full((1,), plan.num_tokens - 1, device=decoder.device)
    delta, residual = decoder.embed(state.token_ids), None
    reports: list[LayerReport] = []
    deviations: dict[int, Tensor] = {}
    for layer in decoder.layers:
        loader.wait(layer.index)
        h, residual = decoder.input_norm(layer, delta, residual)
        del delta  # whatever is not needed any more goes before the MLP: activations are most of a prefill's memory
        status, rows, deviation = state.status(layer.index), len(state.rows), None
        fresh = state.num_fresh
        if status is Status.CHECK:
            k, v = layer.project_kv(h)
            score = _deviation(layer, k, v, pool, state, policy.deviation)
            write_kv(layer, k, v, pool, state.rows)
            deviation = score.mean() if len(score) else None
            keep = state.choose(layer.index, score)
            h, residual = h[keep], residual[keep]
            q = layer.project_q(h)
        elif layer.index == 0 and policy.layer0_exact and len(state.candidates):
            q = layer.project_q(h)
            own = state.fresh_index
            if len(own):
                k, v = layer.project_kv(h[own])
                write_kv(layer, k, v, pool, state.subset(own))
        elif layer.index == last:
            k, v = layer.project_kv(h)
            write_kv(layer, k, v, pool, state.rows)
            q = None
        else:
            q, k, v = layer.project_qkv(h)
            write_kv(layer, k, v, pool, state.rows)
        current = state.rows
        if layer.index == last:  # only the rows whose logits are asked for go on
            keep = torch.searchsorted(current.positions, output_positions)
            current = state.subset(keep)
            residual = residual[keep]
            q = layer.project_q(h[keep]) if q is None else q[keep]
        assert q is not None
        q = decoder.kernels.rope(q, current.cos, current.sin)
        del h
        attended = attend(layer, q, pool, current)
        del q
        delta, residual = layer.finish(attended, residual)
        del attended
        reports.append(LayerReport(layer.index, status, rows, fresh))
        if deviation is not None:
            deviations[layer.index] = deviation
    assert residual is not None
    logits = decoder.logits(delta, residual)
    return PrefillResult(logits, state.candidates.positions, _with_deviations(reports, deviations))


def _with_deviations(reports: list[LayerReport], means: dict[int, Tensor]) -> list[LayerReport]:
    """The reports with the mean deviations, fetched from the device at once, after everything is queued."""
    if not means:
        return reports
    found = dict(zip(means, torch.stack(list(means.values())).tolist(), strict=True))
    return [replace(report, mean_deviation=found.get(report.layer)) for report in reports]


def _deviation(layer: DecoderLayer, k: Tensor, v: Tensor, pool: KVPool, state: _RowState, kind: str) -> Tensor:
    """Deviation [num_candidates] fp32 of fresh from old KV, before the old is overwritten."""
    index = state.candidate_index
    rows = state.rows
    k_rotated = layer.kernels.rope(k[index], rows.cos[index], rows.sin[index])
    return layer.kernels.kv_deviation(
        k_rotated,
        v[index],
        pool.k[layer.index],
        pool.v[layer.index],
        rows.slots[index],
        kind=kind,
        k_scale=pool.k_scales[layer.index],
        v_scale=pool.v_scales[layer.index],
    )


class _RowState:
    """The rows still being computed, and which of them are candidates (cached, inexact) or fresh."""

    def __init__(
        self,
        decoder: Decoder,
        sequence: PagedSequence,
        plan: PromptPlan,
        policy: BlendPolicy,
        candidates: Candidates,
        fresh: Tensor,
    ) -> None:
        self._decoder, self._sequence, self._plan, self._policy = decoder, sequence, plan, policy
        self._total = len(candidates)
        self._ratios = dict(policy.checks) if policy.selector.needs_check_layer and self._total else {}
        self._last_check = max(self._ratios, default=-1)
        self._fresh = fresh
        inexact = [s for s in plan.segments if s.status != "exact" and s.start < s.end]
        self._one_run = all(a.end == b.start for a, b in pairwise(inexact)) and bool(inexact)
        self._set(candidates)

    @classmethod
    def start(cls, decoder: Decoder, sequence: PagedSequence, plan: PromptPlan, policy: BlendPolicy) -> _RowState:
        device = decoder.device
        candidates, fresh = _split(plan, device)
        state = cls(decoder, sequence, plan, policy, candidates, fresh)
        if not policy.selector.needs_check_layer or _trivial(policy):
            scores = _no_check_scores(policy, candidates)
            kept = choose(scores, budget(policy.checks[0][1], len(candidates)), candidates, policy.block)
            state._ratios, state._last_check = {}, -1
            state._set(candidates.take(kept))
        return state

    def _set(self, candidates: Candidates) -> None:
        self.candidates = candidates
        positions = torch.cat((candidates.positions, self._fresh)).sort().values
        num_tokens = self._plan.num_tokens
        dense = self._one_run if len(candidates) == self._total else None
        self.rows: Rows = rows_of(self._decoder, self._sequence, positions, num_tokens, num_tokens, dense)
        self.candidate_index = torch.searchsorted(positions, candidates.positions)
        self.fresh_index = torch.searchsorted(positions, self._fresh)

    @property
    def token_ids(self) -> Tensor:
        return upload(self._plan.token_ids, self._decoder.device)[self.rows.positions]

    @property
    def num_fresh(self) -> int:
        return len(self.candidates)

    def status(self, layer: int) -> Status:
        if layer in self._ratios:
            return Status.CHECK
        return Status.PREFILL if layer < self._last_check else Status.AFTER_CHECK

    def choose(self, layer: int, score: Tensor) -> Tensor:
        """Narrow the candidates to the layer's ratio. Returns the indexes of the kept rows among the rows before."""
        before = self.rows.positions
        scores = self._policy.selector.scores(self.candidates, lambda: score)
        kept = choose(scores, budget(self._ratios[layer], self._total), self.candidates, self._policy.block)
        self._set(self.candidates.take(kept))
        return torch.searchsorted(before, self.rows.positions)

    def subset(self, index: Tensor) -> Rows:
        return rows_of(
            self._decoder,
            self._sequence,
            self.rows.positions[index],
            self._plan.num_tokens,
            self._plan.num_tokens,
        )


def _trivial(policy: BlendPolicy) -> bool:
    """Ratio 0 or 1: nothing to choose, so no layer is spent on checking."""
    return all(ratio in (0.0, 1.0) for _, ratio in policy.checks)


def _no_check_scores(policy: BlendPolicy, candidates: Candidates) -> Tensor:
    if policy.selector.needs_check_layer:
        return torch.zeros(len(candidates), device=candidates.positions.device)

    def no_deviation() -> Tensor:
        raise AssertionError("a selector without a check layer has no deviation")

    return policy.selector.scores(candidates, no_deviation)


def _split(plan: PromptPlan, device: torch.device) -> tuple[Candidates, Tensor]:
    """The candidates of the plan and the positions that are fresh whatever is chosen."""
    positions: list[int] = []
    chunk: list[int] = []
    offset: list[int] = []
    fresh: list[int] = []
    for index, segment in enumerate(plan.segments):
        span = range(segment.start, segment.end)
        if segment.status == "blended":
            positions += span
            chunk += [index] * len(span)
            offset += range(len(span))
        elif segment.status == "computed":
            fresh += span

    def tensor(values: Sequence[int]) -> Tensor:
        return upload(values, device)

    return Candidates(tensor(positions), tensor(chunk), tensor(offset)), tensor(fresh)
