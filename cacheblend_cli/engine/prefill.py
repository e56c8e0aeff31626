"""A request's KV: blocks allocated, stored KV loaded layer by layer ahead of compute, the rest computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cacheblend_cli.blend.policy import LayerReport, Status, row_tile_of
from cacheblend_cli.blend.prefill import PrefillResult, blended_prefill
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.engine.memory import out_of_memory
from cacheblend_cli.engine.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.sampling import TokenLogprob, logprobs_of
from cacheblend_cli.kv.forward import Hidden, LayerStep, run_layers
from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.loading import make_loader
from cacheblend_cli.kv.pool import KVPool, PagedSequence
from cacheblend_cli.kv.rows import positions_of, rows_of
from cacheblend_cli.kv.source import BadChunk
from cacheblend_cli.model.decoder import DecoderLayer
from cacheblend_cli.prompt.plan import PromptPlan

PIECE_ROWS = 512  # of a prompt that is computed in pieces though nobody else waits
LOGIT_ROWS = 64  # whose logits are held at once: each is as long as the vocabulary


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose KV is in the pool. The caller releases the sequence. request: as it was run in the end. hot_tokens: those
    at its beginning whose KV was in the pool before; hot_exact: it was exact. prompt_logprobs: of every token but the first,
    where they were asked for."""

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
    """Fill the prompt's KV. A chunk whose stored KV is bad is computed instead, and a note says so.

    room: positions to keep free after the prompt. output_positions: where logits are wanted, the last by default.
    Raises UsageError when the prompt is longer than the context, DeviceError when it does not fit the memory.
    """
    while True:
        runtime.check_length(request.plan.num_tokens, room)
        sequence = runtime.new_sequence(request.plan.num_tokens + room)
        try:
            with PrefillState(runtime, request, sequence) as prefilling:
                if request.sampling.prompt_logprobs is None:
                    return prefilling.whole(output_positions)
                while (done := prefilling.advance(PIECE_ROWS)) is None:
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
    """A prompt on its way into a sequence's blocks; its stored KV loads from when it is entered until it is left.

    hot_tokens: positions at its beginning that the sequence holds already (`PromptPlan.cut_for`); hot_exact: as a full prefill
    computes them. Raises BadChunk, when it is made or when it computes, for stored KV that cannot be used.
    """

    def __init__(
        self, runtime: Runtime, request: Request, sequence: PagedSequence, hot_tokens: int = 0, hot_exact: bool = False
    ) -> None:
        self.request, self.sequence, self._hot = request, sequence, (hot_tokens, hot_exact)
        self._decoder, self._plan = runtime.decoder, request.plan.with_hot(hot_tokens) if hot_tokens else request.plan
        tile = row_tile_of(runtime.decoder.device)
        self._policy = request.blend.policy(runtime.model.spec.num_layers, request.lossless, tile)
        self._loader = make_loader(runtime.decoder, request.store, sequence, self._plan)
        self._positions = positions_of(
            [s for s in self._plan.segments if s.status == "computed"], runtime.decoder.device
        )
        self._done, self._prefill_s = 0, 0.0
        self._num_top, self._logprobs = request.sampling.prompt_logprobs, list[TokenLogprob]()

    def __enter__(self) -> PrefillState:
        self._loader.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loader.__exit__(*exc)

    @torch.inference_mode()
    def whole(self, output_positions: Callable[[PromptPlan], Tensor] | None = None) -> Prefilled:
        """Compute it in one go. output_positions: where logits are wanted, the last by default."""
        positions = output_positions(self._plan).to(self._decoder.device) if output_positions else None
        start = time.perf_counter()
        prompt = Prompt(self._decoder, self._plan, self.sequence, self._loader)
        result = blended_prefill(prompt, self._policy, positions)
        return self._prefilled(result, start)

    @torch.inference_mode()
    def advance(self, max_rows: int) -> Prefilled | None:
        """Compute it, or of what has nothing to repair at most so many rows; None: there is more to be done."""
        rows = len(self._positions)
        all_logits = self._num_top is not None
        if not all_logits and (rows <= max_rows or any(s.status == "blended" for s in self._plan.segments)):
            return self.whole()
        start = time.perf_counter()
        end = min(self._done + max_rows, rows)
        piece = self._positions[self._done : end]
        kv_len, total = int(piece[-1]) + 1, self._plan.num_tokens
        first_output = 0 if all_logits else len(piece) - (end == rows)
        outputs = torch.arange(first_output, len(piece), device=piece.device)
        prompt_ids = torch.tensor(self._plan.token_ids, device=piece.device)
        steps = _PieceSteps(self._loader, len(self._decoder.layers) - 1, outputs)
        hidden = run_layers(
            self._decoder, rows_of(self._decoder, self.sequence, piece, kv_len, total), prompt_ids[piece], steps
        )
        self._done = end
        if hidden is not None and self._num_top is not None:
            self._note_logprobs(hidden, prompt_ids[piece[0] + 1 : kv_len + 1])
        if end < rows or hidden is None:
            self._prefill_s += time.perf_counter() - start
            return None
        layers = [LayerReport(layer.index, Status.AFTER_CHECK, rows, 0) for layer in self._decoder.layers]
        logits = hidden.logits(self._decoder, slice(-1, None))
        return self._prefilled(PrefillResult(logits, self._positions[:0], layers), start)

    def _note_logprobs(self, hidden: Hidden, token_ids: Tensor) -> None:
        """token_ids: those that the piece's rows predict, one less at the end of the prompt."""
        assert self._num_top is not None
        for start in range(0, len(token_ids), LOGIT_ROWS):
            ids = token_ids[start : start + LOGIT_ROWS]
            logits = hidden.logits(self._decoder, slice(start, start + len(ids)))
            self._logprobs += logprobs_of(logits, ids, self._num_top)

    def _prefilled(self, result: PrefillResult, start: float) -> Prefilled:
        seconds = self._prefill_s + time.perf_counter() - start
        return Prefilled(self.request, self.sequence, result, self._loader, seconds, *self._hot, tuple(self._logprobs))


class _PieceSteps:
    """Every row at every layer but the last, whose K and V are wanted of all, and more of the rows `outputs` [n] alone."""

    def __init__(self, loader: KVLoader, last: int, outputs: Tensor) -> None:
        self._loader, self._last, self._outputs = loader, last, outputs

    def at(self, layer: DecoderLayer) -> LayerStep:
        self._loader.wait(layer.index)
        return LayerStep(next_rows=self._outputs if layer.index == self._last else None)
