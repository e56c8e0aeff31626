"""A request's KV: blocks allocated, stored KV loaded layer by layer ahead of compute, the rest computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cacheblend_cli.blend.prefill import PrefillResult, blended_prefill
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.loading import make_loader
from cacheblend_cli.kv.pool import KVPool, PagedSequence
from cacheblend_cli.kv.source import BadChunk
from cacheblend_cli.prompt.plan import PromptPlan
from cacheblend_cli.runtime.memory import out_of_memory
from cacheblend_cli.runtime.request import Request
from cacheblend_cli.runtime.runtime import Runtime


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose KV is in the pool. The caller releases the sequence. request: as it was run in the end."""

    request: Request
    sequence: PagedSequence
    result: PrefillResult
    loader: KVLoader
    prefill_s: float

    @property
    def plan(self) -> PromptPlan:
        return self.request.plan

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
            return _prefill(runtime, request, sequence, output_positions)
        except BadChunk as bad:
            sequence.release()
            request = request.without(bad.key, bad.reason)
        except torch.OutOfMemoryError as error:
            sequence.release()
            raise out_of_memory(error, runtime.decoder.device, request.plan.num_tokens, runtime.memory()) from error
        except BaseException:
            sequence.release()
            raise


@torch.inference_mode()
def _prefill(
    runtime: Runtime,
    request: Request,
    sequence: PagedSequence,
    output_positions: Callable[[PromptPlan], Tensor] | None,
) -> Prefilled:
    decoder, plan = runtime.decoder, request.plan
    policy = request.blend.policy(runtime.model.spec.num_layers, request.lossless)
    loader = make_loader(decoder, request.store, sequence, plan)
    positions = output_positions(plan) if output_positions else None
    start = time.perf_counter()
    with loader:
        result = blended_prefill(Prompt(decoder, plan, sequence, loader), policy, positions)
    return Prefilled(request, sequence, result, loader, time.perf_counter() - start)
