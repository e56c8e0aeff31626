"""Prefill of a prompt: stored KV is loaded layer by layer ahead of compute, the rest is computed in slices.

A prompt is always cut at multiples of the slice size, whatever part of it the prefix cache has: the same rows go
through the same matrix products, so KV and logits are the same to the bit. Everything from the first blended chunk on
is one slice, which pauses between layers: a step computes as many of its layers as cost about a slice.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from cacheblend_cli.blend.policy import policy_of, row_tile_of
from cacheblend_cli.blend.prefill import PrefillResult, blended_layers
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.engine.worker.slices import SlicePart, last_logits, slices_of, slices_pass
from cacheblend_cli.kv.forward import Hidden, Pass, finish
from cacheblend_cli.kv.loader import KVLoader, agree, make_loader
from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.kv.source import KVSource
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.linear import STEADY_ROWS
from cacheblend_cli.prompt.plan import PromptPlan
from cacheblend_cli.types import BlendParams, LayerReport, LayerStatus

LOGIT_ROWS = 64  # maximum rows whose logits are held at once


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


@dataclass(frozen=True)
class PrefillOutput:
    """Result of a prefill step."""

    num_filled: int  # leading positions whose KV is final
    loader: KVLoader  # figures of loading, final once the prompt is done
    result: PrefillResult | None = None  # once the prompt is done
    prefill_s: float = 0.0  # seconds of all steps so far


class PrefillState:
    """Prefill of one prompt into a sequence's blocks, step by step. Its stored KV loads from `__enter__` to `__exit__`.

    on_logits: callback for the logits of the rows from `outputs_from` on, fp32 [n, vocab_size], in order. Raises
    BadChunk, on creation and in each step, for unusable stored KV.
    """

    def __init__(
        self,
        decoder: Decoder,
        source: KVSource | None,
        sequence: PagedSequence,
        given: PrefillInput,
        on_logits: Callable[[Tensor], None] = lambda logits: None,
    ) -> None:
        self._decoder, self._sequence, self._given, self._on_logits = decoder, sequence, given, on_logits
        self._plan = given.plan
        tile = row_tile_of(decoder.device)
        self._policy = policy_of(given.blend, decoder.spec.num_kv_layers, given.lossless, tile)
        self._loader = make_loader(decoder, source, sequence, self._plan)
        self._slices = slices_of(self._plan, given.slice_rows, given.outputs_from)
        self._step_rows = given.slice_rows * len(decoder.layers)  # rows x layers that a step computes
        self._blending: Pass[PrefillResult] | None = None  # paused between two layers
        self._done, self._prefill_s = 0, 0.0

    def __enter__(self) -> PrefillState:
        self._loader.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._blending is not None:
            self._blending.close()
        self._blending = None
        self._loader.__exit__(*exc)

    @torch.inference_mode()
    def whole(self, output_positions: Tensor) -> PrefillOutput:
        """Compute the whole prompt. output_positions: positions whose logits are returned."""
        start = time.perf_counter()
        result = finish(self._blend(self._plan, output_positions.to(self._decoder.device)))
        agree(self._decoder, self._plan, self._loader.bad)
        return self._output(result, start, self._done)

    def advance(self) -> PrefillOutput:
        """Compute the next slice, or as many layers of what is blended as have the rows of a step, at least one. Raises
        BadChunk."""
        piece = self._slices[self._done]
        if not piece.blended:
            return compute_slices([self])[0]
        start, left, result = time.perf_counter(), self._step_rows, None
        with torch.inference_mode():
            if self._blending is None:
                self._blending = self._blend(self._plan.filled_until(piece.start), None)
            try:
                while left > 0:
                    rows = next(self._blending)
                    left -= rows if left >= 2 * rows else left  # the next layer has as many rows
            except StopIteration as end:
                self._blending, self._done, result = None, self._done + 1, end.value
            agree(self._decoder, self._plan, self._loader.bad)
        return self._output(result, start, self._done)

    def _part(self) -> SlicePart:
        """Return the next slice as a part of a launch."""
        positions, outputs_from = self._slices[self._done].positions, self._given.outputs_from
        first = len(positions)
        if outputs_from is not None:
            first = bisect_left(positions, outputs_from)
        elif self._done == len(self._slices) - 1:
            first = max(0, first - STEADY_ROWS)
        return SlicePart(self._sequence, self._loader, self._plan, positions, first)

    def _computed(self, hidden: Hidden | None, logits: Tensor | None, start: float) -> PrefillOutput:
        """Return the output of the next slice, which does not count as done yet.

        hidden: rows from `outputs_from` on, if logits are wanted. logits: of the prompt's last row, fp32 [1,
        vocab_size], after the last slice.
        """
        if hidden is not None and self._given.outputs_from is not None:  # each row once: logits are computed in place
            end = len(hidden.delta) - (logits is not None)
            for at in range(0, end, LOGIT_ROWS):
                self._on_logits(hidden.logits(self._decoder, slice(at, min(at + LOGIT_ROWS, end))))
            if logits is not None:
                self._on_logits(logits)
        if logits is None:
            return self._output(None, start, self._done + 1)
        count = sum(len(s.positions) for s in self._slices)
        layers = [LayerReport(layer.index, LayerStatus.AFTER_CHECK, count, 0) for layer in self._decoder.layers]
        chosen = torch.empty(0, dtype=torch.int64, device=logits.device)
        return self._output(PrefillResult(logits, chosen, layers), start, self._done + 1)

    def _blend(self, plan: PromptPlan, output_positions: Tensor | None) -> Pass[PrefillResult]:
        prompt = Prompt(self._decoder, plan, self._sequence, self._loader)
        return blended_layers(prompt, self._policy, output_positions)

    def _output(self, result: PrefillResult | None, start: float, done: int) -> PrefillOutput:
        """done: slices that are computed."""
        self._prefill_s += time.perf_counter() - start
        cached = next(s.start for s in self._plan.segments if s.status != "prefix_cached")  # the suffix at the latest
        num_filled = self._slices[done - 1].end if done else cached
        return PrefillOutput(num_filled, self._loader, result, self._prefill_s)


@torch.inference_mode()
def compute_slices(prompts: Sequence[PrefillState]) -> list[PrefillOutput]:
    """Compute the next slice of a prompt, or the only slice of several short ones (`short_rows`), in one launch. RoPE
    must have the same frequencies for all.

    Raises BadChunk, after which every prompt can be computed again, alone.
    """
    start, decoder = time.perf_counter(), prompts[0]._decoder
    parts = [prompt._part() for prompt in prompts]
    hidden = finish(slices_pass(decoder, parts))
    for prompt in prompts:
        agree(decoder, prompt._plan, prompt._loader.bad)
    ending = prompts[0]._done == len(prompts[0]._slices) - 1
    logits: Sequence[Tensor | None] = [None] * len(prompts)
    if hidden is not None and ending:
        ends = list(accumulate(len(part.positions) - part.first for part in parts))
        logits = last_logits(decoder, hidden, ends)
    outputs = [prompt._computed(hidden, row, start) for prompt, row in zip(prompts, logits, strict=True)]
    for prompt in prompts:  # all of them, or none
        prompt._done += 1
    return outputs
