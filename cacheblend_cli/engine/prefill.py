"""A prompt's KV: stored KV is loaded layer by layer ahead of compute, the rest is computed in slices.

A prompt is always cut at the same positions, multiples of the slice size, whatever part of it a prefix cache holds already:
the same rows then go through the same matrix products, so that KV and logits are the same to the bit. What needs repair is
one slice with all that follows it, which pauses between layers: a step computes as many of its layers as cost about a slice."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cacheblend_cli.blend.policy import policy_of, row_tile_of
from cacheblend_cli.blend.prefill import PrefillResult, blended_layers
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.engine.memory import out_of_memory
from cacheblend_cli.engine.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.sampling import logprobs_of
from cacheblend_cli.kv.forward import LayerStep, Pass, finish, run_layers
from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.loading import make_loader
from cacheblend_cli.kv.pool import KVPool, PagedSequence
from cacheblend_cli.kv.rows import rows_of
from cacheblend_cli.kv.source import BadChunk
from cacheblend_cli.model.decoder import DecoderLayer
from cacheblend_cli.prompt.plan import PromptPlan
from cacheblend_cli.types import LayerReport, Status, TokenLogprob

LOGIT_ROWS = 64  # whose logits are held at once: each is as long as the vocabulary


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose KV is in the pool. The caller releases the sequence. request: as it was run in the end. hot_tokens: leading
    tokens whose KV came from the prefix cache; hot_exact: it was exact. prompt_logprobs: of every token but the first, where
    requested."""

    request: Request
    sequence: PagedSequence
    result: PrefillResult
    loader: KVLoader
    prefill_s: float
    hot_tokens: int = 0
    hot_exact: bool = False
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def plan(self) -> PromptPlan:
        return self.request.plan.with_exact(self.hot_tokens) if self.hot_exact else self.request.plan

    @property
    def pool(self) -> KVPool:
        return self.sequence.pool

    @property
    def logits(self) -> Tensor:
        """fp32 [vocab_size], after the prompt's last token."""
        return self.result.logits[-1]

    @property
    def recompute_fraction(self) -> float:
        """Fresh token-layers over layers x reusable tokens; 1 for a full prefill, which reuses nothing."""
        reusable = self.plan.cached_tokens
        return self.result.fresh_token_layers / (len(self.result.layers) * reusable) if reusable else 1.0


def prefill(
    runtime: Runtime,
    request: Request,
    *,
    room: int = 0,
    output_positions: Callable[[PromptPlan], Tensor] | None = None,
) -> Prefilled:
    """Prefill one prompt outside of the engine, for measures. A chunk whose stored KV is bad is computed instead, and a note
    says so.

    room: positions to keep free after the prompt. output_positions: where logits are wanted, the last by default; with it the
    prompt is computed in one slice.
    Raises UsageError when the prompt is longer than the context, DeviceError when it does not fit the memory.
    """
    while True:
        runtime.check_length(request.plan.num_tokens, room)
        sequence = runtime.new_sequence(request.plan.num_tokens + room)
        try:
            with PrefillState(runtime, request, sequence) as state:
                if output_positions is not None:
                    return state.whole(output_positions)
                while (done := state.advance()) is None:
                    pass
                return done
        except BadChunk as bad:
            sequence.release()
            request = request.without(bad.key, bad.reason)
        except torch.OutOfMemoryError as error:
            sequence.release()
            raise out_of_memory(error, runtime.decoder.device, request.plan.num_tokens, runtime.memory()) from error
        except BaseException:
            sequence.release()
            raise


class PrefillState:
    """A prompt on its way into a sequence's blocks, a slice at a time; its stored KV loads from `__enter__` to `__exit__`.

    slice_rows: positions of a slice, None for the runtime's. hit_tokens: leading positions whose KV the sequence holds already
    (`PromptPlan.cut_for`); hit_exact: as a full prefill computes them. outputs_from: the position from which on every row's
    logits are given to on_logits, fp32 [n, vocab_size], in order; without it only the last row has logits. Raises BadChunk, when
    it is made or when it computes, for stored KV that cannot be used.
    """

    def __init__(
        self,
        runtime: Runtime,
        request: Request,
        sequence: PagedSequence,
        slice_rows: int | None = None,
        hit: tuple[int, bool] = (0, False),
        outputs: tuple[int, Callable[[Tensor], None]] | None = None,
    ) -> None:
        """hit: (hit_tokens, hit_exact); outputs: (outputs_from, on_logits)."""
        self.request, self.sequence, self._hit = request, sequence, hit
        self._decoder, self._plan = runtime.decoder, request.plan.with_hot(hit[0]) if hit[0] else request.plan
        tile = row_tile_of(runtime.decoder.device)
        self._policy = policy_of(request.blend, runtime.model.spec.num_layers, request.lossless, tile)
        self._loader = make_loader(runtime.decoder, request.store, sequence, self._plan)
        slice_rows = slice_rows or runtime.slice_rows
        self._slices = slices_of(self._plan, slice_rows)
        self._step_rows = slice_rows * len(self._decoder.layers)  # rows x layers that a step computes
        self._blending: Pass[PrefillResult] | None = None  # paused between two layers
        self._done, self._prefill_s, self._logprobs = 0, 0.0, list[TokenLogprob]()
        if outputs is None and request.sampling.prompt_logprobs is not None:
            outputs = 0, self._note_logprobs
        self._outputs = outputs

    def __enter__(self) -> PrefillState:
        self._loader.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._blending is not None:
            self._blending.close()
        self._blending = None
        self._loader.__exit__(*exc)

    @property
    def num_filled(self) -> int:
        """Leading positions whose KV is final, as far as slices are done."""
        return self._slices[self._done - 1].end if self._done else self._hit[0]

    @torch.inference_mode()
    def whole(self, output_positions: Callable[[PromptPlan], Tensor] | None = None) -> Prefilled:
        """Compute the prompt in one go. output_positions: where logits are wanted, the last by default."""
        start = time.perf_counter()
        positions = output_positions(self._plan).to(self._decoder.device) if output_positions else None
        return self._prefilled(finish(self._blend(self._plan, positions)), start)

    @torch.inference_mode()
    def advance(self) -> Prefilled | None:
        """Compute the next slice, or some layers of what is blended. Returns None unless it was the last one."""
        start, piece = time.perf_counter(), self._slices[self._done]
        last = self._done == len(self._slices) - 1
        if piece.blended:
            if (result := self._next_layers(piece)) is None:
                self._prefill_s += time.perf_counter() - start
                return None
            self._done += 1
            return self._prefilled(result, start)
        positions = torch.tensor(piece.positions, device=self._decoder.device)
        token_ids, total = torch.tensor(self._plan.token_ids, device=positions.device), self._plan.num_tokens
        first = len(positions) - last if self._outputs is None else bisect_left(piece.positions, self._outputs[0])
        rows = rows_of(self._decoder, self.sequence, positions, piece.positions[-1] + 1, total)
        steps = _SliceSteps(
            self._loader, len(self._decoder.layers) - 1, torch.arange(first, len(positions), device=positions.device)
        )
        hidden = run_layers(self._decoder, rows, token_ids[positions], steps)
        self._done += 1
        if hidden is not None and self._outputs is not None:  # each row once: logits are computed in place
            end = len(positions) - first - last
            for at in range(0, end, LOGIT_ROWS):
                self._outputs[1](hidden.logits(self._decoder, slice(at, min(at + LOGIT_ROWS, end))))
        if not last or hidden is None:
            self._prefill_s += time.perf_counter() - start
            return None
        logits = hidden.logits(self._decoder, slice(-1, None))
        if self._outputs is not None:
            self._outputs[1](logits)
        count = sum(len(s.positions) for s in self._slices)
        layers = [LayerReport(layer.index, Status.AFTER_CHECK, count, 0) for layer in self._decoder.layers]
        return self._prefilled(PrefillResult(logits, positions[:0], layers), start)

    def _next_layers(self, piece: Slice) -> PrefillResult | None:
        """Compute as many layers of the blended slice as have the rows of a step, one at least. None unless it is done then."""
        if self._blending is None:
            self._blending = self._blend(self._plan.filled_until(piece.start), None)
        left = self._step_rows
        try:
            while left > 0:
                rows = next(self._blending)
                left -= rows if left >= 2 * rows else left  # the next layer has as many rows
        except StopIteration as end:
            self._blending = None
            result: PrefillResult = end.value
            return result
        return None

    def _blend(self, plan: PromptPlan, output_positions: Tensor | None) -> Pass[PrefillResult]:
        prompt = Prompt(self._decoder, plan, self.sequence, self._loader)
        return blended_layers(prompt, self._policy, output_positions)

    def _note_logprobs(self, logits: Tensor) -> None:
        """logits: of the rows behind those noted so far; the last row of the prompt predicts none of its tokens."""
        assert self.request.sampling.prompt_logprobs is not None
        begin = len(self._logprobs) + 1
        ids = torch.tensor(self._plan.token_ids[begin : begin + len(logits)], device=logits.device)
        if len(ids):
            self._logprobs += logprobs_of(logits[: len(ids)], ids, self.request.sampling.prompt_logprobs)

    def _prefilled(self, result: PrefillResult, start: float) -> Prefilled:
        seconds = self._prefill_s + time.perf_counter() - start
        return Prefilled(self.request, self.sequence, result, self._loader, seconds, *self._hit, tuple(self._logprobs))


@dataclass(frozen=True)
class Slice:
    """Rows that one step computes. positions: sorted; start, end: what they are part of. blended: all from `start` on, where
    KV is repaired, chosen by the policy."""

    start: int
    end: int
    positions: tuple[int, ...] = ()
    blended: bool = False


def slices_of(plan: PromptPlan, slice_rows: int) -> list[Slice]:
    """Cut the computed positions before the first blended chunk at multiples of slice_rows; the rest is one slice."""
    until = plan.exact_until
    fresh = [p for s in plan.segments if s.status == "computed" for p in range(s.start, min(s.end, until))]
    slices = []
    for start in range(0, until, slice_rows):
        end = min(start + slice_rows, until)
        if rows := fresh[bisect_left(fresh, start) : bisect_left(fresh, end)]:
            slices.append(Slice(start, end, tuple(rows)))
    return slices if until == plan.num_tokens else [*slices, Slice(until, plan.num_tokens, blended=True)]


class _SliceSteps:
    """Every row at every layer but the last, which computes K and V of all rows and the rest of the rows `outputs` [n] alone."""

    def __init__(self, loader: KVLoader, last: int, outputs: Tensor) -> None:
        self._loader, self._last, self._outputs = loader, last, outputs

    def at(self, layer: DecoderLayer) -> LayerStep:
        self._loader.wait(layer.index)
        return LayerStep(next_rows=self._outputs if layer.index == self._last else None)
