"""Slices: rows that need no repair and are computed in one launch, of one prompt or of several short ones.

On a CPU a row's K, V and logits are the same to the bit with and without other prompts in the launch: attention is
computed per sequence, and the products of at least SHORT_ROWS rows do not depend on further rows. The last layer and
the head get STEADY_ROWS rows of each prompt, and a multiple of STEADY_ROWS in all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from cacheblend_cli.kv.forward import Hidden, LayerStep, Pass, Steps, layer_by_layer
from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.pool import PagedSequence, upload
from cacheblend_cli.kv.rows import packed_rows
from cacheblend_cli.model.decoder import Decoder, DecoderLayer
from cacheblend_cli.model.linear import STEADY_ROWS
from cacheblend_cli.prompt.plan import PromptPlan

SHORT_ROWS = 16
"""Minimum rows of a slice whose products do not depend on further rows, with any layout of the weights: measured for 16
to 513 rows. MKL's fp32 products of 5, 7 and 9 rows differ, with two threads."""


@dataclass(frozen=True)
class Slice:
    """Rows of one step, within positions start:end."""

    start: int
    end: int
    positions: tuple[int, ...] = ()  # sorted
    blended: bool = False  # the policy chooses the rows


@dataclass(frozen=True)
class SlicePart:
    """A prompt's part of a launch."""

    sequence: PagedSequence
    loader: KVLoader  # loads the prompt's stored KV
    plan: PromptPlan
    positions: tuple[int, ...]
    first: int  # index of the first row whose hidden state is returned


def slices_of(plan: PromptPlan, slice_rows: int, outputs_from: int | None = None) -> list[Slice]:
    """Cut the computed positions before the first blended chunk at multiples of slice_rows; the rest is one slice.
    outputs_from: also cut after this position, so that the step with its logits is known."""
    until = plan.exact_until
    fresh = [p for s in plan.segments if s.status == "computed" for p in range(s.start, min(s.end, until))]
    cuts, slices = [*range(0, until, slice_rows), until], list[Slice]()
    if outputs_from:
        cuts = sorted({*cuts, min(outputs_from + 1, until)})
    for start, end in pairwise(cuts):
        if rows := fresh[bisect_left(fresh, start) : bisect_left(fresh, end)]:
            slices.append(Slice(start, end, tuple(rows)))
    return slices if until == plan.num_tokens else [*slices, Slice(until, plan.num_tokens, blended=True)]


def short_rows(plan: PromptPlan, slice_rows: int) -> int | None:
    """Return the number of rows of a prompt that may share a launch: a single slice without repair. Else None."""
    if plan.exact_until != plan.num_tokens or not SHORT_ROWS <= plan.fresh_tokens <= slice_rows:
        return None
    slices = slices_of(plan, slice_rows)
    return len(slices[0].positions) if len(slices) == 1 else None


def slices_pass(decoder: Decoder, parts: Sequence[SlicePart]) -> Pass[Hidden | None]:
    """Return the pass of all parts' rows in one launch. The last layer computes only the rows from `first` on; without
    any the result is None. RoPE must have the same frequencies for all. The pass raises BadChunk."""
    device, given, outputs, ids, base = decoder.device, [], list[int](), list[int](), 0
    for part in parts:
        count, token_ids = len(part.positions), part.plan.token_ids
        given.append((part.sequence, torch.tensor(part.positions, device=device), part.positions[-1] + 1))
        outputs += range(base + part.first, base + count)
        ids += [token_ids[p] for p in part.positions]
        base += count
    rows = packed_rows(decoder, given, max(part.plan.num_tokens for part in parts))
    steps = _SliceSteps([p.loader for p in parts], decoder.spec.num_kv_layers - 1, upload(outputs, device))
    return layer_by_layer(decoder, rows, upload(ids, device), steps)


def last_logits(decoder: Decoder, hidden: Hidden, ends: Sequence[int]) -> list[Tensor]:
    """Return the logits of each part's last row, fp32 [1, vocab_size]. ends: end of each part's rows in `hidden`."""
    filled_up = [*ends, *(ends[-1] for _ in range(-len(ends) % STEADY_ROWS))]
    logits = hidden.logits(decoder, upload([end - 1 for end in filled_up], decoder.device))
    return [logits[i : i + 1].clone() for i in range(len(ends))]


class _SliceSteps(Steps):
    """Every row at every layer, except that from the last layer with its own K and V on, only the rows `outputs` [n]
    continue after K and V."""

    def __init__(self, loaders: Sequence[KVLoader], last: int, outputs: Tensor) -> None:
        self._loaders, self._last, self._outputs = loaders, last, outputs

    def at(self, layer: DecoderLayer) -> LayerStep:
        if layer.own_kv:
            for loader in self._loaders:
                loader.wait(layer.index)
        return LayerStep(next_rows=self._outputs if layer.index == self._last else None)
