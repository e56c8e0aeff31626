"""One prompt prefilled outside of the engine, for measures that look at its KV."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cacheblend_cli.blend.cost import AutoReport
from cacheblend_cli.engine.auto.controller import controller_of, decided
from cacheblend_cli.engine.prefill_report import PrefillReport
from cacheblend_cli.engine.request.resolve import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.memory import out_of_memory
from cacheblend_cli.engine.worker.prefill import PrefillInput, PrefillState
from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.pool import KVPool, PagedSequence
from cacheblend_cli.kv.source import BadChunk
from cacheblend_cli.prompt.plan import PromptPlan


@dataclass(frozen=True)
class Prefilled(PrefillReport):
    """A prompt that was computed outside of the engine. The caller releases the sequence."""

    sequence: PagedSequence = field(kw_only=True)

    @property
    def pool(self) -> KVPool:
        return self.sequence.pool


def prefill(
    runtime: Runtime,
    request: Request,
    *,
    headroom: int = 0,
    output_positions: Callable[[PromptPlan], Tensor] | None = None,
    slice_rows: int | None = None,
) -> Prefilled:
    """Prefill one prompt outside of the engine, for measures. A chunk whose stored KV is bad is computed instead, and a
    note says so.

    headroom: positions to keep free after the prompt. output_positions: where logits are wanted, the last by default;
    with it the prompt is computed in one slice. slice_rows: positions of a slice, None for the engine's. Raises
    UsageError when the prompt is longer than the context, DeviceError when it does not fit the memory.
    """
    decoder = runtime.decoder
    if runtime.driver is not None:
        raise UsageError(
            "measures and prefills outside of the engine run in one process", "leave --tensor-parallel out"
        )
    while True:
        plan = request.plan
        runtime.check_length(plan.num_tokens, headroom)
        sequence = runtime.new_sequence(plan.num_tokens + headroom)
        rows = slice_rows or runtime.slice_rows
        given = PrefillInput(0, plan, tuple(sequence.blocks), request.blend, request.lossless, rows)
        try:
            with PrefillState(decoder, request.source, sequence, given) as state:
                output = state.whole(output_positions(plan)) if output_positions is not None else state.advance()
                while output.result is None:
                    output = state.advance()
                return Prefilled(request, output.result, output.loader, output.prefill_s, sequence=sequence)
        except BadChunk as bad:
            sequence.release()
            request = request.without(bad.key, bad.reason)
        except torch.OutOfMemoryError as error:
            sequence.release()
            raise out_of_memory(error, decoder.device, plan.num_tokens, runtime.memory()) from error
        except BaseException:
            sequence.release()
            raise


@dataclass(eq=False)
class AutoPrefill:
    """`prefill` under the controller, for `cacheblend eval`. reports: one a prompt, in order, ttft_s being the
    prefill's."""

    reports: list[AutoReport] = field(default_factory=list)

    def __call__(self, runtime: Runtime, request: Request, *, headroom: int = 0) -> Prefilled:
        asked, report = decided(runtime, replace(request, started=time.perf_counter()))
        assert report is not None
        start = time.perf_counter()
        done = prefill(runtime, asked, headroom=headroom)
        int(done.result.logits[-1].argmax())  # a GPU is done when its result is on the host
        seconds = time.perf_counter() - start
        controller_of(runtime, request).learn(report, done, seconds)
        self.reports.append(replace(report, ttft_s=seconds))
        return done
