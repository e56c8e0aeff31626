"""EngineCore: the loop that generates answers. Each step is scheduled, executed and processed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from torch import Tensor

from cacheblend_cli.engine.core.block_manager import BlockManager
from cacheblend_cli.engine.core.executor import Executor
from cacheblend_cli.engine.core.finisher import Aside, Events, Finisher
from cacheblend_cli.engine.core.hooks import Feature
from cacheblend_cli.engine.core.output_processor import OutputProcessor
from cacheblend_cli.engine.core.scheduler import Proposer, Scheduler
from cacheblend_cli.engine.core.sequence import RequestState, Sequence
from cacheblend_cli.engine.events import EngineStats, Limits
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.memory import DeviceMemory
from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.block_allocator import Allocation
from cacheblend_cli.kv.pool import bytes_per_token
from cacheblend_cli.kv.prefix_cache import PrefixHit

PREFILL_S = 0.3  # maximum seconds of a prompt's step beside running answers, unless a layer takes longer
ALONE = Limits(max_sequences=128, enable_prefix_caching=False)  # for one request: all of its answers at once


@dataclass(frozen=True)
class Features:
    """Features that a core runs: their hooks, in order, and the proposer of tokens."""

    hooks: tuple[Feature, ...] = ()
    speculation: Callable[[Runtime], Proposer | None] = lambda runtime: None


class EngineCore:
    """Runs requests, one step at a time, in the calling thread."""

    def __init__(
        self,
        runtime: Runtime,
        limits: Limits,
        memory: DeviceMemory | None = None,
        features: Features = Features(),
        aside: Aside | None = None,
    ) -> None:
        """memory: pool of a single request, None for a shared one. aside: runs hooks' reviews of answers, None to run
        them in the calling thread."""
        self._runtime, self._features, decoder = runtime, features, runtime.decoder
        watermark = 0.02 if memory is None else 0.0
        memory = memory or runtime.shared_memory(limits.pool_tokens, limits.max_sequences)
        self.worker = runtime.driver.worker(decoder, memory)
        # where RoPE depends on the prompt's length, so does KV
        caches = limits.enable_prefix_caching and decoder.rope.switches_at is None
        windows = [layer.attention.sliding_window for layer in decoder.layers]
        window = None if None in windows else max(w for w in windows if w is not None)
        self.blocks = BlockManager(self.worker, watermark, caches, window)
        size = self.worker.block_size
        slice_rows = -(-(limits.max_rows or runtime.slice_rows) // size) * size
        self.block_bytes = int(bytes_per_token(decoder) * size)
        # short prompts share a launch if a row does not depend on the rows beside it
        joins = decoder.steady and decoder.rope.switches_at is None and decoder.part.is_whole
        joins = joins and not decoder.multiplies_by_torch
        self.counts = EngineStats()
        self.scheduler = Scheduler(
            self.blocks,
            self.worker,
            slice_rows,
            limits.max_sequences,
            prefill_s=PREFILL_S if decoder.device.type == "cpu" else inf,  # a GPU's time is not known at once
            in_turn=decoder.device.type != "cpu",  # a GPU's memory has room to compute one
            launch_rows=slice_rows if joins else 0,
            swap_blocks=int(runtime.config.swap_space * 2**30 / self.block_bytes),
            counts=self.counts,
            speculation=features.speculation(runtime) if limits.speculates else None,
        )
        self._executor = Executor(decoder, self.worker, slice_rows)
        is_async = runtime.async_scheduling and self.scheduler.speculation is None
        self._finisher = Finisher(runtime, self.scheduler, self.counts, aside)
        self._outputs = OutputProcessor(runtime, self.scheduler, self._finisher, self.counts, is_async)

    @property
    def busy(self) -> bool:
        return self._finisher.concluding or bool(self.scheduler.states)

    @property
    def waits(self) -> bool:
        """Return whether a step has nothing to do, because every request waits for another thread."""
        return self._finisher.waits and not self._finisher.concluding

    def add(self, state: RequestState) -> None:
        """Admit and queue a request. Raises UsageError if it is impossible, or can never fit the pool."""
        if not state.sequences:
            admit(self._runtime, state, self._features)
        headroom = state.max_new_tokens
        if self.blocks.can_allocate(state.num_tokens, headroom, PrefixHit()) is Allocation.NEVER:
            raise UsageError(
                f"prompt ({state.num_tokens} tokens) and answer (up to {headroom}) exceed the KV pool "
                f"({self.blocks.most_tokens} tokens)",
                "ask with fewer chunks or a smaller --max-tokens",
            )
        self.scheduler.add(state)

    def resume(self, sequence: Sequence, logits: Tensor) -> None:
        """Continue an answer whose prompt is already prefilled. The next token is drawn from logits, fp32
        [vocab_size]."""
        assert sequence.output is not None
        self.scheduler.add(sequence.state)
        self._outputs.append({sequence: sequence.output.draw(logits)})

    def step(self) -> Events:
        """Run one step: end requests, compute layers of a prompt, or decode a token of every answer; and do at most
        one launch of a hook's work. Returns the requests' events, in order."""
        start = scheduled_from = time.perf_counter()
        concluding = self._finisher.concluding
        step = self.scheduler.schedule_ahead(self._outputs.pending)
        if step is None:
            self._outputs.flush()
            scheduled_from = time.perf_counter()
            step = self.scheduler.schedule()
        scheduled = time.perf_counter()
        self.counts.scheduling_s += scheduled - scheduled_from
        self._outputs.process(step, self._executor.run(step))
        end = time.perf_counter()
        self.counts.step_s += end - start
        if self.scheduler.speculation is not None and step.num_rows and not concluding:
            self.scheduler.speculation.record(step.num_rows, end - scheduled)
        if not self.scheduler.states:
            self.blocks.check_idle()
        return self._finisher.take_events()

    def flush(self) -> Events:
        """Append the tokens that are drawn already, and return their events."""
        self._outputs.flush()
        return self._finisher.take_events()

    def drop_all(self) -> list[RequestState]:
        """Drop all requests, without an event, and give back their blocks. Returns them, without further requests."""
        dropped = [*self.scheduler.states, *self._finisher.stop_concluding()]
        for state in dropped:
            self._finisher.drop(state)
        return [state for state in dropped if state.parent is None]

    def close(self) -> None:
        self.drop_all()
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.close()
        self.worker.close()


def admit(runtime: Runtime, state: RequestState, features: Features) -> None:
    """Check that a request is possible, and let the features prepare it. Raises UsageError."""
    state.max_new_tokens = runtime.max_new_tokens(state.request.sampling)
    runtime.check_length(state.request.plan.num_tokens, state.max_new_tokens)
    for feature in features.hooks:
        state.request, hook = feature(runtime, state.request)
        if hook is not None:
            state.hooks.append(hook)
    state.sequences = [Sequence(state, 0)]
