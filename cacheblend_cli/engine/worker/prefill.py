"""Prefill of a prompt: stored KV is loaded layer by layer ahead of compute, the rest is computed in slices.

A prompt is always cut at multiples of the slice size, whatever part of it the prefix cache has: the same rows go
through the same matrix products, so KV and logits are the same to the bit. Everything from the first blended chunk on
is one slice. A slice pauses between layers.

Several short prompts may share a launch. On a CPU a row's K, V and logits are the same to the bit with and without the
other prompts: attention is computed per sequence, and the products of at least SHORT_ROWS rows do not depend on further
rows. The last layer and the head get STEADY_ROWS rows of each prompt, and a multiple of STEADY_ROWS in all.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cacheblend_cli.blend.policy import policy_of, row_tile_of
from cacheblend_cli.blend.prefill import PrefillResult, blended_layers
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.kv.device_time import DeviceTime, Mark, mark
from cacheblend_cli.kv.forward import Hidden, LayerStep, Pass, Steps, finish, last_narrowing, layer_by_layer
from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.loading import agree, make_loader, stored_state
from cacheblend_cli.kv.pool import PagedSequence, upload
from cacheblend_cli.kv.rows import packed_rows
from cacheblend_cli.kv.source import KVSource
from cacheblend_cli.model.decoder import Decoder, DecoderLayer
from cacheblend_cli.model.linear import STEADY_ROWS
from cacheblend_cli.prompt.plan import PromptPlan
from cacheblend_cli.types import BlendParams, LayerReport, LayerStatus

if TYPE_CHECKING:
    from cacheblend_cli.kv.block_states import BlockStates
    from cacheblend_cli.kv.host_cache import HostCache

SHORT_ROWS = 16
"""Minimum rows of a slice whose products do not depend on further rows, with any layout of the weights: measured for 16
to 513 rows. MKL's fp32 products of 5, 7 and 9 rows differ, with two threads."""
LOGIT_ROWS = 64  # maximum rows whose logits are held at once


@dataclass(frozen=True)
class Slice:
    """Rows of one step, within positions start:end."""

    start: int
    end: int
    positions: tuple[int, ...] = ()  # sorted
    blended: bool = False  # the policy chooses the rows


def slices_of(plan: PromptPlan, slice_rows: int, outputs_from: int | None = None) -> list[Slice]:
    """Cut the computed positions before the first blended chunk at multiples of slice_rows; the rest is one slice.
    outputs_from: also cut after this position, so that the step with its logits is known."""
    until = plan.exact_until
    fresh = [p for s in plan.segments if s.status == "computed" for p in range(s.start, min(s.end, until))]
    cuts, slices = [*range(0, until, slice_rows), until], list[Slice]()
    if plan.in_order:
        cuts = sorted({*cuts, *(s.start for s in plan.segments if s.start < until)})
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


class _SliceSteps(Steps):
    """Every row at every layer. From the last layer with its own K and V on, only the rows `outputs` [n] continue after
    K and V."""

    def __init__(self, loaders: Sequence[KVLoader], last: int, outputs: Tensor) -> None:
        self._loaders, self._last, self._outputs = loaders, last, outputs

    def at(self, layer: DecoderLayer) -> LayerStep:
        if layer.own_kv:
            for loader in self._loaders:
                loader.wait(layer.index)
        return LayerStep(next_rows=self._outputs if layer.index == self._last else None)

    def outputs(self) -> Tensor:
        return self._outputs


@dataclass(frozen=True)
class PrefillInput:
    """A prompt to compute, as plain data."""

    number: int  # key of the prompt while it is computed
    plan: PromptPlan  # token ids, positions, and the sources of their KV
    blocks: tuple[int, ...]  # of the pool
    blend: BlendParams
    lossless: bool  # stored KV is what this run would compute
    slice_rows: int  # positions of a slice
    outputs_from: int | None = None  # first position whose logits are returned, None = the last


class PrefillState:
    """Prefill of one prompt into a sequence's blocks, step by step. Its stored KV loads from `open` to `close`.
    on_logits: callback for the logits of the rows from `outputs_from` on, fp32 [n, vocab_size], in order. Raises
    BadChunk, on creation and in each step, for unusable stored KV."""

    def __init__(
        self,
        decoder: Decoder,
        source: KVSource | None,
        sequence: PagedSequence,
        given: PrefillInput,
        on_logits: Callable[[Tensor], None] = lambda logits: None,
        host_cache: HostCache | None = None,
    ) -> None:
        self._begun = time.perf_counter()
        self._decoder, self._sequence, self._given, self._on_logits = decoder, sequence, given, on_logits
        self._plan, self._source = given.plan, source
        tile = row_tile_of(decoder.device)
        self._policy = policy_of(given.blend, decoder.spec.num_kv_layers, given.lossless, tile)
        self._loader = make_loader(decoder, source, sequence, self._plan, host_cache)
        self._slices = slices_of(self._plan, given.slice_rows, given.outputs_from)
        self._done, self._time = 0, DeviceTime()
        self.has_begun = False  # with a layer

    def open(self) -> PrefillState:
        """Start loading. Raises BadChunk."""
        self._loader.open()
        try:
            if self._sequence.pool.states is not None:
                self._open_state(self._sequence.pool.states)
        except BaseException:
            self.close()
            raise
        if self._decoder.device.type == "cuda":  # the device waits for the look-ups
            self._time = self._time.plus(self._begun, time.perf_counter())
        return self

    def _open_state(self, states: BlockStates) -> None:
        """Put the recurrent state from the store where the computed tokens begin. Raises BadChunk."""
        if stored := self._plan.stored:
            state = stored_state(self._decoder, self._source, stored[-1])
            states.put(self._sequence, stored[-1].end, state)
        elif first := self._plan.num_prefix_cached:
            states.pin(self._sequence, first)

    def close(self) -> None:
        self._loader.close()

    @torch.inference_mode()
    def whole(self, output_positions: Tensor) -> PrefillResult:
        """Compute the whole prompt. output_positions: positions whose logits are returned."""
        start = mark(self._decoder.device)
        [result] = finish(self._blended(self._plan, output_positions.to(self._decoder.device)))
        return self._timed(result, start)

    def rest(self) -> PrefillResult:
        """Compute the slices that are left. Raises BadChunk."""
        while True:
            [result] = Launch([self]).advance(inf)
            if result.is_done:
                return result

    def _blended(self, plan: PromptPlan, output_positions: Tensor | None = None) -> Pass[list[PrefillResult]]:
        prompt = Prompt(self._decoder, plan, self._sequence, self._loader)
        result = yield from blended_layers(prompt, self._policy, output_positions)
        agree(self._decoder, self._plan, self._loader.bad)
        return [result]

    def _first_output(self) -> int:
        """Return the index of the next slice's first row whose hidden state is needed."""
        positions, outputs_from = self._slices[self._done].positions, self._given.outputs_from
        if outputs_from is not None:
            return bisect_left(positions, outputs_from)
        is_last = self._done == len(self._slices) - 1
        return max(0, len(positions) - STEADY_ROWS) if is_last else len(positions)

    def _sliced(self, hidden: Hidden | None, logits: Tensor | None) -> Pass[PrefillResult]:
        """Return the result of a slice. hidden: rows from `outputs_from` on, if logits are wanted. logits: of the
        prompt's last row, fp32 [1, vocab_size], after the last slice."""
        if hidden is not None and self._given.outputs_from is not None:  # each row once: logits are computed in place
            end = len(hidden.delta) - (logits is not None)
            for at in range(0, end, LOGIT_ROWS):
                self._on_logits(hidden.logits(self._decoder, slice(at, min(at + LOGIT_ROWS, end))))
                yield 1
            if logits is not None:
                self._on_logits(logits)
        num_filled = self._slices[self._done].end
        if logits is None:
            return PrefillResult(self._loader, num_filled)
        count = sum(len(s.positions) for s in self._slices)
        layers = [LayerReport(layer.index, LayerStatus.AFTER_CHECK, count, 0) for layer in self._decoder.layers]
        return PrefillResult(self._loader, num_filled, logits, layers=layers)

    def _paused(self) -> PrefillResult:
        num_filled = self._slices[self._done - 1].end if self._done else self._plan.num_prefix_cached
        return PrefillResult(self._loader, num_filled, is_paused=True)

    def _timed(self, result: PrefillResult, start: Mark) -> PrefillResult:
        self._time = self._time.plus(start, mark(self._decoder.device))
        return replace(result, time=self._time)


class Launch:
    """The next slice of a prompt, or the only slice of several short ones (`short_rows`), which pauses between layers.
    RoPE must have the same frequencies for all. After an error every prompt can be computed again, alone."""

    def __init__(self, prompts: Sequence[PrefillState]) -> None:
        self._prompts, self._decoder = prompts, prompts[0]._decoder
        first, piece = prompts[0], prompts[0]._slices[prompts[0]._done]
        self._pass = first._blended(first._plan.filled_until(piece.start)) if piece.blended else _computed(prompts)

    @torch.inference_mode()
    def advance(self, max_rows: float, waits: bool = True) -> list[PrefillResult]:
        """Compute the next layers, at most max_rows rows x layers, at least one layer. waits: False to end before a
        layer whose stored KV is not read yet, without results if that is the first. Raises BadChunk."""
        if not (waits or self._is_ready):
            return []
        for prompt in self._prompts:
            prompt.has_begun = True
        start, results = mark(self._decoder.device), None
        try:
            while max_rows >= 2 * (rows := next(self._pass)) and (waits or self._is_ready):  # the next has as many
                max_rows -= rows
        except StopIteration as end:
            results = end.value
            for prompt in self._prompts:  # all of them, or none
                prompt._done += 1
        results = results or [prompt._paused() for prompt in self._prompts]
        return [prompt._timed(result, start) for prompt, result in zip(self._prompts, results, strict=True)]

    @property
    def _is_ready(self) -> bool:
        """Return whether the next layer can be computed without waiting for stored KV. A slice after the first, or a
        blend after its probe, begins again with layers that have been waited for."""
        num_layers, loaders = self._decoder.spec.num_kv_layers, [prompt._loader for prompt in self._prompts]
        return all(loader.next_layer >= num_layers or loader.is_ready(loader.next_layer) for loader in loaders)


def _computed(prompts: Sequence[PrefillState]) -> Pass[list[PrefillResult]]:
    """Compute the next slice of each prompt in one launch."""
    decoder = prompts[0]._decoder
    device, parts, ids, output_rows, ends = decoder.device, [], list[int](), list[int](), list[int]()
    for prompt in prompts:
        positions, token_ids = prompt._slices[prompt._done].positions, prompt._plan.token_ids
        parts.append((prompt._sequence, upload(positions, device), positions[-1] + 1))
        output_rows += range(len(ids) + prompt._first_output(), len(ids) + len(positions))
        ends.append(len(output_rows))
        ids += [token_ids[p] for p in positions]
    rows = packed_rows(decoder, parts, max(prompt._plan.num_tokens for prompt in prompts))
    steps = _SliceSteps([p._loader for p in prompts], last_narrowing(decoder), upload(output_rows, device))
    hidden = yield from layer_by_layer(decoder, rows, upload(ids, device), steps)
    for prompt in prompts:
        agree(decoder, prompt._plan, prompt._loader.bad)
    logits: list[Tensor | None] = [None] * len(prompts)
    if hidden is not None and prompts[0]._done == len(prompts[0]._slices) - 1:
        last_rows = [end - 1 for end in (*ends, *ends[-1:] * (-len(ends) % STEADY_ROWS))]
        last = hidden.logits(decoder, upload(last_rows, device))
        logits = [last[i : i + 1].clone() for i in range(len(prompts))]
    results = list[PrefillResult]()
    for prompt, row in zip(prompts, logits, strict=True):
        results.append((yield from prompt._sliced(hidden, row)))
    return results
