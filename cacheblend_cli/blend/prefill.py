"""Blended prefill (CacheBlend, EuroSys'25, arXiv 2405.16444): old KV where it is right, fresh KV where it is not.

| status      | layers                 | does                                                                  |
|-------------|------------------------|-----------------------------------------------------------------------|
| PREFILL     | before the check layer | all rows; at layer 0 cached rows project Q only, their K and V stand  |
| CHECK       | the check layer(s)     | fresh K, V for all rows; score; choose; then chosen rows + fresh rows |
| AFTER_CHECK | the rest               | the chosen rows: fresh K and V overwrite their slots, they attend     |
| DECODE      | generation             | one row a sequence (forward.decode_step)                              |

A selector that needs no check layer chooses before layer 0, and every layer is AFTER_CHECK.

Rows are positions, sorted. A row at position p sees the keys at positions <= p and no others: causality is by
position, never by row number. Exact spans are never rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise

import torch
from torch import Tensor

from cacheblend_cli.blend.corrections import MeanShift
from cacheblend_cli.blend.evidence import AtCheckLayer, BeforeLayers
from cacheblend_cli.blend.selectors import Candidates, Evidence, Selector, budget, select
from cacheblend_cli.kv.device import upload
from cacheblend_cli.kv.forward import attend, write_kv
from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.pool import KVPool, PagedSequence
from cacheblend_cli.kv.rows import Rows, joined, positions_of, rows_of
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
    block, nucleus: see `selectors.choose`. probe_layers, draft_tokens: where a selector that follows the question's
    attention looks, and how many tokens of the answer it drafts. mean_shift: see `corrections.MeanShift`.
    layer0_exact: the stored K and V of layer 0 are what this run would compute (a lossless codec)."""

    selector: Selector
    checks: tuple[tuple[int, float], ...]
    deviation: str = "k"
    block: int = 1
    nucleus: float = 0.0
    probe_layers: tuple[int, ...] = (0,)
    draft_tokens: int = 0
    mean_shift: bool = False
    layer0_exact: bool = True

    @property
    def needs_check_layer(self) -> bool:
        """False for ratios 0 and 1 too: there is nothing to choose, so no layer is spent on checking."""
        trivial = all(ratio in (0.0, 1.0) for _, ratio in self.checks) and (
            self.nucleus == 0 or self.checks[-1][1] == 0
        )
        return self.selector.needs_check_layer and not trivial

    def select(self, ratio: float, total: int, candidates: Candidates, evidence: Evidence) -> Tensor:
        """Indexes of the candidates to recompute: a share `ratio` of all `total` there were."""
        count = budget(ratio, total)
        return select(self.selector, candidates, evidence, count, block=self.block, nucleus=self.nucleus)


@dataclass(frozen=True)
class LayerReport:
    """One layer of a blended prefill. fresh: reusable tokens whose KV or hidden state was computed at this layer."""

    layer: int
    status: Status
    rows: int
    fresh: int


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
    if not policy.needs_check_layer:
        state.choose_before(
            BeforeLayers(decoder, pool, sequence, plan, loader, policy.probe_layers, policy.draft_tokens)
        )
    last = len(decoder.layers) - 1
    if output_positions is None:
        output_positions = torch.full((1,), plan.num_tokens - 1, device=decoder.device)
    delta, residual = decoder.embed(state.token_ids), None
    reports: list[LayerReport] = []
    for layer in decoder.layers:
        loader.wait(layer.index)
        h, residual = decoder.input_norm(layer, delta, residual)
        del delta  # whatever is not needed any more goes before the MLP: activations are most of a prefill's memory
        status, rows, fresh = state.status(layer.index), len(state.rows), len(state.candidates)
        if status is Status.CHECK:
            k, v = layer.project_kv(h)
            state.correct(layer, k, v)  # the rows an earlier check layer left behind
            index = (state.candidate_index, state.suffix_index)
            evidence = AtCheckLayer(layer, h, k, v, pool, sequence, state.rows, *index, policy.deviation)
            own, checked = state.fresh_index, state.rows
            write_kv(layer, k[own], v[own], pool, state.subset(own))  # the suffix attends to itself too
            keep = state.choose(layer.index, evidence)
            write_kv(layer, k, v, pool, checked)
            h, residual = h[keep], residual[keep]
            q = layer.project_q(h)
        elif layer.index == 0 and policy.layer0_exact and len(state.candidates):
            q = layer.project_q(h)
            own = state.fresh_index
            k, v = layer.project_kv(h[own])
            write_kv(layer, k, v, pool, state.subset(own))
        elif layer.index == last:
            k, v = layer.project_kv(h)
            state.correct(layer, k, v)
            write_kv(layer, k, v, pool, state.rows)
            q = None
        else:
            q, k, v = layer.project_qkv(h)
            state.correct(layer, k, v)
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
    assert residual is not None
    return PrefillResult(decoder.logits(delta, residual), state.candidates.positions, reports)


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
        self._all, self._total = candidates, len(candidates)
        self._shift: MeanShift | None = None
        self._ratios = dict(policy.checks) if policy.needs_check_layer and self._total else {}
        self._last_check = max(self._ratios, default=-1)
        self._fresh = fresh
        inexact = [s for s in plan.segments if s.status != "exact" and s.start < s.end]
        self._one_run = all(a.end == b.start for a, b in pairwise(inexact)) and bool(inexact)
        self._set(candidates)

    @classmethod
    def start(cls, decoder: Decoder, sequence: PagedSequence, plan: PromptPlan, policy: BlendPolicy) -> _RowState:
        return cls(decoder, sequence, plan, policy, *_split(plan, decoder.device))

    def _set(self, candidates: Candidates) -> None:
        self.candidates = candidates
        positions = torch.cat((candidates.positions, self._fresh)).sort().values
        num_tokens = self._plan.num_tokens
        dense = self._one_run if len(candidates) == self._total else None
        self.rows: Rows = rows_of(self._decoder, self._sequence, positions, num_tokens, num_tokens, dense)
        self.candidate_index = torch.searchsorted(positions, candidates.positions)
        self.fresh_index = torch.searchsorted(positions, self._fresh)
        self.suffix_index = self.fresh_index[-len(self._plan.segments[-1].token_ids) :]
        if self._policy.mean_shift and 0 < len(candidates) < self._total:
            self._shift = MeanShift(self._decoder, self._sequence, num_tokens, self._all, candidates)

    @property
    def token_ids(self) -> Tensor:
        return upload(self._plan.token_ids, self._decoder.device)[self.rows.positions]

    def status(self, layer: int) -> Status:
        if layer in self._ratios:
            return Status.CHECK
        return Status.PREFILL if layer < self._last_check else Status.AFTER_CHECK

    def choose_before(self, evidence: Evidence) -> None:
        """Narrow the candidates before layer 0."""
        self._set(
            self.candidates.take(self._policy.select(self._policy.checks[0][1], self._total, self.candidates, evidence))
        )

    def choose(self, layer: int, evidence: Evidence) -> Tensor:
        """Narrow the candidates to the layer's ratio. Returns the indexes of the kept rows among the rows before."""
        before = self.rows.positions
        kept = self._policy.select(self._ratios[layer], self._total, self.candidates, evidence)
        self._set(self.candidates.take(kept))
        return torch.searchsorted(before, self.rows.positions)

    def correct(self, layer: DecoderLayer, k: Tensor, v: Tensor) -> None:
        """Correct the layer's old KV by what its fresh K (before RoPE) and V of the rows say, before they are written."""
        if self._shift is not None and layer.index > 0:
            self._shift.apply(layer, k[self.candidate_index], v[self.candidate_index])

    def subset(self, index: Tensor) -> Rows:
        return rows_of(
            self._decoder,
            self._sequence,
            self.rows.positions[index],
            self._plan.num_tokens,
            self._plan.num_tokens,
        )


def _split(plan: PromptPlan, device: torch.device) -> tuple[Candidates, Tensor]:
    """The candidates of the plan and the positions that are fresh whatever is chosen."""
    blended = [(i, s) for i, s in enumerate(plan.segments) if s.status == "blended"]
    computed = [s for s in plan.segments if s.status == "computed"]

    chunk = joined([torch.full((len(s.token_ids),), i) for i, s in blended], device)
    offset = joined([torch.arange(len(s.token_ids)) for _, s in blended], device)
    return Candidates(positions_of([s for _, s in blended], device), chunk, offset), positions_of(computed, device)
