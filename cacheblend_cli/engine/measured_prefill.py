"""A single prompt prefilled and held, for measurements of its KV."""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cacheblend_cli.engine.core.core import ALONE, EngineCore
from cacheblend_cli.engine.core.report import PrefillReport
from cacheblend_cli.engine.core.sequence import RequestState, Sequence, SequenceStatus
from cacheblend_cli.engine.core.sequence_output import Generation, SequenceOutput
from cacheblend_cli.engine.events import Failed
from cacheblend_cli.engine.features.auto_ratio import Controller, decided
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.decode import DecodeRunner, EagerRunner
from cacheblend_cli.engine.worker.memory import DeviceMemory, out_of_memory
from cacheblend_cli.engine.worker.prefill import PrefillInput, PrefillState
from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.forward import Steps
from cacheblend_cli.kv.pool import KVPool, PagedSequence, SequenceView
from cacheblend_cli.kv.source import BadChunk
from cacheblend_cli.prompt.plan import PromptPlan
from cacheblend_cli.types import AutoReport, SamplingParams


@dataclass(frozen=True)
class Prefilled(PrefillReport):
    """A prompt that was prefilled alone. The caller releases the sequence."""

    runtime: Runtime = field(kw_only=True)
    sequence: PagedSequence = field(kw_only=True)
    auto: AutoReport | None = None  # with --ratio auto; ttft_s is the prefill's

    @property
    def pool(self) -> KVPool:
        return self.sequence.pool

    def predict(self, answer_ids: abc.Sequence[int], steps: Steps | None = None) -> Tensor:
        """Return the logits that predict each token of an answer, fp32 [len(answer_ids), vocab_size]. Writes the
        answer's KV: see `teacher_forced`."""
        from cacheblend_cli.blend.fidelity import teacher_forced

        return teacher_forced(self.runtime.decoder, self.sequence, self.plan.token_ids, answer_ids, steps)

    def answer(
        self,
        sampling: SamplingParams,
        *,
        given: int = 0,
        logits: Tensor | None = None,
        on_logits: Callable[[Tensor], None] | None = None,
        runner: DecodeRunner | None = None,
    ) -> Generation:
        """Decode an answer in an engine core, even if another engine decodes users' answers. The sequence needs room
        for it.

        given: leading answer tokens with KV written by `predict`. logits: fp32 [vocab_size] after these tokens; None:
        after the prompt. on_logits: callback for the logits of each token. runner: None for the engine's own.
        """
        runtime, prompt_ids = self.runtime, self.plan.token_ids
        request = replace(self.request.in_full(), sampling=sampling)
        state = RequestState(request, 0, max_new_tokens=runtime.max_new_tokens(sampling))
        output = SequenceOutput(runtime, sampling, prompt_ids, on_logits=() if on_logits is None else (on_logits,))
        view = SequenceView(self.pool, self.sequence.blocks)
        sequence = Sequence(state, 0, SequenceStatus.RUNNING, view, len(prompt_ids) + given, output=output)
        state.sequences = [sequence]
        core = EngineCore(runtime, replace(ALONE, speculates=False), self._memory(runner))
        core.resume(sequence, self.logits if logits is None else logits)
        while core.busy:
            for _, event in core.step():
                if isinstance(event, Failed):
                    raise event.error
        return output.out

    def _memory(self, runner: DecodeRunner | None) -> DeviceMemory:
        lasting = self.runtime.memory()
        if runner is None and lasting is not None and lasting.pool is self.pool:
            return lasting
        return DeviceMemory(self.pool, runner or EagerRunner(self.runtime.decoder))


def prefill(
    runtime: Runtime,
    request: Request,
    headroom: int = 0,
    output_positions: Callable[[PromptPlan], Tensor] | None = None,
    slice_rows: int | None = None,
) -> Prefilled:
    """Prefill one prompt. If stored KV of a chunk is bad, the chunk is computed, and a note says so. With
    request.options.auto the loading controller chooses the ratio, request.blend.ratio at least, and learns from it.

    headroom: positions to keep free after the prompt. output_positions: positions whose logits are returned, None = the
    last; with it the prompt is computed in one slice. slice_rows: positions of a slice, None for the engine's. Raises
    UsageError if the prompt is longer than the context, DeviceError if it does not fit the memory.
    """
    decoder = runtime.decoder
    if not runtime.decoder.part.is_whole:
        raise UsageError("measurements run in one process", "leave --tensor-parallel out")
    report = None
    if request.options.auto:
        request, report = decided(runtime, replace(request, started=time.perf_counter()))
    start, memory = time.perf_counter(), runtime.memory()
    cache = None if memory is None else memory.host_cache
    while True:
        plan = request.plan
        runtime.check_length(plan.num_tokens, headroom)
        sequence = runtime.new_sequence(plan.num_tokens + headroom)
        rows = slice_rows or runtime.slice_rows
        given = PrefillInput(0, plan, tuple(sequence.blocks), request.blend, request.lossless, rows)
        try:
            with closing(PrefillState(decoder, request.source, sequence, given, host_cache=cache).open()) as state:
                result = state.rest() if output_positions is None else state.whole(output_positions(plan))
                done = Prefilled(request, result, runtime=runtime, sequence=sequence)
            if report is None:
                return done
            int(done.logits.argmax())  # a GPU is done when its result is on the host
            seconds = time.perf_counter() - start
            Controller(runtime, request).learn(report, done, seconds)
            return replace(done, auto=replace(report, ttft_s=seconds))
        except BadChunk as bad:
            sequence.release()
            request = request.without(bad.key, bad.reason)
        except torch.OutOfMemoryError as error:
            sequence.release()
            raise out_of_memory(error, decoder.device, plan.num_tokens, runtime.memory()) from error
        except BaseException:
            sequence.release()
            raise
