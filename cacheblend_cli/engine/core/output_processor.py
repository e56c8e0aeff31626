"""Processing of a step's results: draws tokens, and ends prompts, answers and requests.

With async scheduling, tokens drawn in a decode step are pending until the next step is queued. Only then the host waits
for them, appends them, and ends answers; what the next step has computed for an answer that ended is dropped.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from cacheblend_kernels import KernelError
from cacheblend_store import StoreError

from cacheblend_cli.engine.core.controller import learn_from
from cacheblend_cli.engine.core.executor import Decoded, StepOutput
from cacheblend_cli.engine.core.full_check import FullCheck, check_of
from cacheblend_cli.engine.core.missing_chunks import store_missing
from cacheblend_cli.engine.core.report import PrefillReport, PromptLogprobs, answer_of
from cacheblend_cli.engine.core.scheduler import Scheduler, Step
from cacheblend_cli.engine.core.sequence import RequestState, Sequence, SequenceStatus
from cacheblend_cli.engine.core.sequence_output import SequenceOutput, draw_next
from cacheblend_cli.engine.events import (
    Done,
    Early,
    EngineStats,
    Event,
    Failed,
    HandedOver,
    Reasoning,
    Started,
    Text,
    Token,
    ignore,
)
from cacheblend_cli.engine.request.tiered import remember_speed
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.attention import AttentionShares
from cacheblend_cli.engine.worker.memory import out_of_memory
from cacheblend_cli.engine.worker.prefill import PrefillOutput
from cacheblend_cli.engine.worker.sampling import Draw
from cacheblend_cli.engine.worker.worker import TableInput
from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.kv.export import Connector
from cacheblend_cli.kv.pool import upload
from cacheblend_cli.kv.source import BadChunk
from cacheblend_cli.types import Answer

Events = list[tuple[RequestState, Event]]
logger = logging.getLogger("cacheblend")


class OutputProcessor:
    """Takes the results of each step, and emits the requests' events."""

    def __init__(self, runtime: Runtime, scheduler: Scheduler, counts: EngineStats) -> None:
        self._runtime, self._scheduler, self._blocks = runtime, scheduler, scheduler.blocks
        self._counts, self._events = counts, list[tuple[RequestState, Event]]()
        self._storing = deque[tuple[RequestState, list[Answer], Iterator[None]]]()
        self.pending: dict[Sequence, Draw] = {}  # tokens that are drawn, and not appended yet

    @property
    def storing(self) -> bool:
        """Return whether missing chunks of finished requests are still to be stored."""
        return bool(self._storing)

    def process(self, step: Step, output: StepOutput) -> Events:
        """Process a step's results. Returns the events of its requests, in order."""
        if self._storing:
            self._store_piece()
        for state in step.end:
            self._end(state, state.ended)
        for sequence in step.begin:
            if not sequence.state.begun:
                sequence.state.begun = True
                self._emit(sequence.state, Started())
        pending, self.pending = self.pending, {}
        drawn = [self._draw(decoded, output) for decoded in output.decoded]
        self.sampled(pending)  # the host waits for the last step here, and the device computes this one
        for decoded, draws in zip(output.decoded, drawn, strict=True):
            self._decoded(decoded, draws)
        for sequence, error in output.failed:
            if isinstance(error, BadChunk):
                self._restart(sequence, error)
            else:
                self._fail(sequence.state, error)
        for sequence, out in output.prefilled:
            self._filled(sequence, out)
        self._counts.joined += output.joined
        self._counts.split += output.split
        return self.take_events()

    def flush(self) -> None:
        """Append the pending tokens."""
        pending, self.pending = self.pending, {}
        self.sampled(pending)

    def take_events(self) -> Events:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def remove(self, state: RequestState) -> None:
        """Remove the request and give back its blocks."""
        if state in self._scheduler.states:
            self._scheduler.states.remove(state)
        for sequence in list(state.unfinished):
            sequence.release(SequenceStatus.FINISHED)

    def _emit(self, state: RequestState, event: Event) -> None:
        self._events.append((state, event))

    # prompts

    def _restart(self, sequence: Sequence, bad: BadChunk) -> None:
        """Queue the prompt again, to compute the chunk whose stored KV is unusable."""
        sequence.state.request = sequence.state.request.without(bad.key, bad.reason)
        self._scheduler.restart(sequence)

    def _filled(self, sequence: Sequence, out: PrefillOutput) -> None:
        """Handle a computed slice of a prompt. After the last one its answers begin."""
        state, prefill = sequence.state, sequence.prefill
        if sequence.paged is None or prefill is None:  # its request failed
            return
        assert state.provenance is not None
        self._blocks.keep(sequence.paged, state.request.plan.token_ids[: out.num_filled], state.provenance)
        if isinstance(state, FullCheck) and out.num_filled >= state.num_prompt_tokens and not state.prompt_time.pieces:
            state.prompt_time = out.time
        if out.result is None:
            return
        logprobs = tuple(prefill.sink.found) if isinstance(prefill.sink, PromptLogprobs) else ()
        done = PrefillReport(state.request, out.result, out.loader, out.time, prefill.hit_tokens, logprobs)
        sequence.stop_prefill()
        try:
            if isinstance(state, FullCheck):
                self._checked(sequence, state)
            elif sequence.output is not None:
                # its KV was dropped: compute its tokens again, one per step as before, to get the same bits
                sequence.kv_len, sequence.replay = state.num_tokens, len(sequence.output.out.token_ids) - 1
            else:
                self._begin_answers(sequence, done)
        except Exception as error:
            self._fail(state, error)

    def _begin_answers(self, first: Sequence, done: PrefillReport) -> None:
        """Begin the answers, which share the prompt's blocks."""
        state, counts = first.state, self._counts
        plan = state.request.plan.with_prefix_cache(done.prefix_cache_tokens)
        state.done = done
        counts.computed += plan.fresh_tokens
        counts.reused += plan.exact_tokens + plan.inexact_tokens
        counts.repaired += len(done.result.chosen)
        counts.prefix_cached += done.prefix_cache_tokens
        if state.request.connector is not None:
            self._hand_over(first, state.request.connector)
        else:
            self._draw_first(first, done)
        counts.stall_s += done.loader.stall_s  # waits for the load, so not before the first token is on the host

    def _draw_first(self, first: Sequence, done: PrefillReport) -> None:
        """Draw and append the first token of each answer that starts now."""
        state = first.state
        assert first.paged is not None
        begun = state.num_started
        end = begun + self._scheduler.wave(state.num_answers - begun)
        wave = [
            first,
            *(Sequence(state, index, SequenceStatus.RUNNING, first.paged.fork()) for index in range(begun + 1, end)),
        ]
        state.sequences += wave[1:]
        outputs = [self._begin_output(sequence) for sequence in wave]
        for sequence in wave:
            sequence.kv_len = state.num_tokens
        self.sampled(dict(zip(wave, draw_next(outputs, done.logits.expand(len(outputs), -1)), strict=True)))

    def _begin_output(self, sequence: Sequence) -> SequenceOutput:
        """Create the output of its answer."""
        state, sampling = sequence.state, sequence.state.request.sampling
        params = replace(sampling, seed=None if sampling.seed is None else sampling.seed + sequence.index)
        on_event = partial(self._emit, state) if state.streams else ignore
        if state.num_answers > sampling.n:
            params = replace(params, logprobs=sampling.logprobs or 0)
        see = state.checks.see if state.checks is not None and sequence.index == 0 else None
        output = SequenceOutput(self._runtime, params, state.request.plan.token_ids, on_event, sequence.index, see)
        output.watch = AttentionShares(state.request.plan)
        sequence.output = output
        return output

    def _hand_over(self, sequence: Sequence, connector: Connector) -> None:
        """Give the prompt's KV to the connector, and end the request with an empty answer."""
        state = sequence.state
        assert sequence.paged is not None
        kv = self._scheduler.worker.export_kv(TableInput.of(sequence.paged), state.num_tokens)
        connector.hand_over(state.request.plan.token_ids, kv)
        generation = self._begin_output(sequence).out
        generation.finish_reason, generation.first_token_at = "handed_over", time.perf_counter()
        sequence.release(SequenceStatus.FINISHED)
        self._end(state)

    def _checked(self, sequence: Sequence, check: FullCheck) -> None:
        """Handle a check's finished prefill: decode the rest of the answer, or end the check."""
        if (output := check.continues) is None:
            self._end_check(sequence, check)
        else:
            sequence.output, sequence.kv_len = output, check.num_prompt_tokens + len(output.out.token_ids) - 1

    # tokens

    def _draw(self, decoded: Decoded, output: StepOutput) -> dict[Sequence, Draw]:
        """Draw the next tokens, except in a replay. Does not wait for the device. Failures are added to `output`."""
        going = list[int]()
        for index, sequence in enumerate(decoded.sequences):
            sequence.kv_len += 1
            if sequence.replay:
                sequence.replay -= 1
            else:
                going.append(index)
        if not going:
            return {}
        sequences, logits = [decoded.sequences[index] for index in going], decoded.logits
        outputs = [s.output for s in sequences if s.output is not None]
        every = len(going) == len(logits)
        try:
            drawn = draw_next(outputs, logits if every else logits[upload(going, logits.device)])
        except Exception as error:  # of the operation that all share
            drawn = [error] * len(sequences)
        draws = dict[Sequence, Draw]()
        for sequence, draw in zip(sequences, drawn, strict=True):
            if isinstance(draw, Exception):
                output.failed.append((sequence, draw))
            else:
                draws[sequence] = draw
        return draws

    def _decoded(self, decoded: Decoded, draws: dict[Sequence, Draw]) -> None:
        """Handle a decode step, except for answers that ended with the token whose KV it computed."""
        for sequence, attention in zip(decoded.sequences, decoded.attention, strict=True):
            if sequence.status is SequenceStatus.FINISHED:
                continue
            assert sequence.output is not None
            if attention is not None and sequence.output.watch is not None:
                sequence.output.watch.add(attention)
        going = {s: draw for s, draw in draws.items() if s.status is not SequenceStatus.FINISHED}
        if self._runtime.async_scheduling and not self._storing:  # no token waits for a launch of missing chunks
            self.pending |= going
        else:
            self.sampled(going)
        for sequence in decoded.sequences:
            unseen = self._blocks.num_unseen(sequence.kv_len)  # blocks that have left the window of every layer
            if sequence.handed is None and sequence.paged is not None and unseen > sequence.paged.gone:
                sequence.paged.give_back(unseen)

    def sampled(self, draws: Mapping[Sequence, Draw | Exception]) -> None:
        """Append tokens to their sequences, and finish complete answers. Waits for the draws."""
        for sequence, draw in draws.items():
            assert sequence.output is not None
            if sequence.status is SequenceStatus.FINISHED:  # its request failed
                continue
            try:
                if isinstance(draw, Exception):
                    raise draw
                if not sequence.output.append(draw):
                    self._finish(sequence)
            except Exception as error:  # the others go on
                self._fail(sequence.state, error)

    # ends

    def _finish(self, sequence: Sequence, early: Early | None = None) -> None:
        """End a complete answer. With the last one the request is checked or done."""
        state, output = sequence.state, sequence.output
        assert output is not None
        if isinstance(state, FullCheck):
            self._end_check(sequence, state)
            return
        generation = output.end()
        generation.finish_reason = early or generation.finish_reason
        self._counts.generated += len(generation.token_ids)
        sequence.release(SequenceStatus.FINISHED)
        if early is not None or any(state.unfinished):
            return
        if state.num_started < state.num_answers:  # the next wave: its prompt is prefilled again
            state.sequences.append(Sequence(state, state.num_started))
            return
        check = check_of(self._runtime, state)
        if check is None:
            self._end(state)
        else:
            self._scheduler.add(check)

    def _end_check(self, sequence: Sequence, check: FullCheck) -> None:
        """End a check and its parent request."""
        sequence.release(SequenceStatus.FINISHED)
        self._scheduler.states.remove(check)
        check.conclude()
        assert check.parent is not None
        self._end(check.parent)

    def _end(self, state: RequestState, early: Early | None = None) -> None:
        """Emit the answers. early: why the request ends before it is finished, with what was generated so far."""
        if isinstance(state, FullCheck):
            self.remove(state)
            return
        try:
            for sequence in list(state.unfinished):
                if sequence.output is not None:
                    self._finish(sequence, early)
            answers = self._answers(state)
            if state.done is not None and early is None:
                _conclude(self._runtime, state.done, answers[0])
        except Exception as error:
            self._fail(state, error)
            return
        self.remove(state)
        if early is None and state.request.connector is not None:
            self._emit(state, HandedOver(answers[0]))
        if early is None and state.request.options.save and state.done is not None and state.done.has_missing:
            self._storing.append((state, answers, store_missing(state.done)))
        else:
            self._over(state, answers, early)

    def _store_piece(self) -> None:
        """Store missing chunks, at most one launch. After the last one its request is done."""
        state, answers, pieces = self._storing[0]
        try:
            if not state.cancelled:
                next(pieces)
                return
        except StopIteration:
            pass
        except Exception as error:
            self._storing.popleft()
            self._failed(state, error)
            return
        self._storing.popleft()
        self._over(state, answers, None)

    def _over(self, state: RequestState, answers: list[Answer], early: Early | None) -> None:
        if early is None:
            self._counts.finished += 1
        else:
            self._counts.cancelled += 1
        self._emit(state, Done(answers, early))

    def _answers(self, state: RequestState) -> list[Answer]:
        """Return the answers, the likeliest of them if more than n were generated; none before the prompt is done.
        Emits what was not streamed."""
        if state.done is None:
            return []
        made = [s.output.out for s in state.sequences if s.output is not None]
        if len(made) > state.request.sampling.n:
            made = sorted(made, key=lambda g: g.mean_logprob, reverse=True)[: state.request.sampling.n]
        if not state.streams:
            for index, generation in enumerate(made):
                if state.request.sampling.logprobs is None:
                    generation.logprobs = []
                for logprob in generation.logprobs:
                    self._emit(state, Token(logprob, index))
                for event in (Reasoning(generation.reasoning, index), Text(generation.text, index)):
                    if event.text:
                        self._emit(state, event)
        answers = [answer_of(self._runtime, state.done, generation, state.report) for generation in made]
        if state.checks is not None:
            for answer in answers:
                answer.verify, answer.confirmation = state.checks.verification, state.checks.confirmation
                answer.risk = state.checks.risk
        return answers

    def _fail(self, state: RequestState, error: Exception) -> None:
        """End the request, or a check's parent, with an error."""
        if state.parent is not None:
            self.remove(state)
            state = state.parent
        if state not in self._scheduler.states:
            return
        self.remove(state)
        if isinstance(error, torch.OutOfMemoryError):
            known = out_of_memory(error, self._runtime.decoder.device, state.num_tokens, self._runtime.memory())
            known.__cause__, error = error, known
        self._failed(state, error)

    def _failed(self, state: RequestState, error: Exception) -> None:
        self._counts.failed += 1
        self._emit(state, Failed(error))


def as_public_error(error: Exception) -> Exception:
    """Return the error that users see. Unknown ones are logged and wrapped."""
    if isinstance(error, CacheBlendError | StoreError | KernelError):
        return error
    logger.error("a request failed", exc_info=error)
    wrapped = CacheBlendError(f"the engine failed: {type(error).__name__}: {error}", "this is a bug in cacheblend")
    wrapped.__cause__ = error
    return wrapped


def _conclude(runtime: Runtime, done: PrefillReport, answer: Answer) -> None:
    """Update the loading controller, and mark the chunks as used in the store."""
    if answer.auto is not None and not done.prefix_cache_tokens:
        learn_from(runtime, answer.auto, done)
    request, store = done.request, done.request.store
    if store is not None and request.blend.mode != "full":  # before missing chunks are stored, which may need room
        used = [s.key for s in done.plan.chunks if s.cached and s.key]
        if request.tiered is not None and store.tier is not None:
            remember_speed(store.tier)
        store.touch([*used, request.collection.prefix_key] if request.prefix_cached else used)
