"""Processing of a step's results: draws tokens, and ends prompts, answers and requests.

With async scheduling, tokens drawn in a decode step are pending until the next step is queued. Only then does the host
wait for them, append them, and end answers; results of the next step for an ended answer are dropped. An error in one
answer ends only its request.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cacheblend_cli.engine.core.executor import Decoded, StepOutput
from cacheblend_cli.engine.core.report import PrefillReport, answer_of
from cacheblend_cli.engine.core.scheduler import Scheduler, Step
from cacheblend_cli.engine.core.sequence import RequestState, Sequence, SequenceStatus
from cacheblend_cli.engine.core.sequence_output import Generation, SequenceOutput, draw_next
from cacheblend_cli.engine.events import (
    Done,
    Early,
    EngineStats,
    Event,
    Failed,
    Reasoning,
    Text,
    Token,
    ignore,
)
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.memory import out_of_memory
from cacheblend_cli.engine.worker.prefill import PrefillOutput
from cacheblend_cli.engine.worker.sampling import Draw
from cacheblend_cli.engine.worker.worker import TableInput
from cacheblend_cli.kv.pool import upload
from cacheblend_cli.kv.source import BadChunk
from cacheblend_cli.types import Answer

Events = list[tuple[RequestState, Event]]
Aside = Callable[[Callable[[], object]], Future[Any]]
"""Runs work in another thread."""


class OutputProcessor:
    """Takes the results of each step, and emits the requests' events. is_async: with async scheduling. aside: runs
    reviews, None to run them in this thread."""

    def __init__(
        self, runtime: Runtime, scheduler: Scheduler, counts: EngineStats, is_async: bool, aside: Aside | None = None
    ) -> None:
        self._runtime, self._scheduler, self._blocks = runtime, scheduler, scheduler.blocks
        self._counts, self._is_async, self._events = counts, is_async, list[tuple[RequestState, Event]]()
        self._concluding = deque[tuple[RequestState, list[Answer], Iterator[None]]]()
        self._aside, self._reviews = aside, dict[RequestState, tuple[Future[Any], Callable[[], None]]]()
        self.pending: dict[Sequence, Draw] = {}  # tokens that are drawn, and not appended yet

    @property
    def concluding(self) -> bool:
        """Return whether hooks still work for requests whose answers are complete."""
        return bool(self._concluding)

    @property
    def waits(self) -> bool:
        """Return whether every request waits for its review."""
        reviews = [future for future, _ in self._reviews.values()]
        return len(reviews) == len(self._scheduler.states) > 0 and not any(future.done() for future in reviews)

    def stop_concluding(self) -> list[RequestState]:
        """Drop what is left of hooks' work. Returns the requests that it was for."""
        states = [state for state, *_ in self._concluding]
        self._concluding.clear()
        return states

    def process(self, step: Step, output: StepOutput) -> Events:
        """Process a step's results. Returns the events of its requests, in order."""
        if self._concluding:
            self._conclude_next()
        self._end_reviews()
        for state in step.end:
            self._end_early(state)
        for sequence in step.begin:
            if not sequence.state.begun:
                sequence.state.begun = True
                self._emit_progress(sequence.state, 0)
        pending, self.pending = self.pending, {}
        drawn = [self._draw(decoded, output) for decoded in output.decoded]
        self.append(pending)  # the host waits for the last step here, and the device computes this one
        for decoded, draws in zip(output.decoded, drawn, strict=True):
            self._take_decoded(decoded, draws, output)
        for sequence, error in output.failed:
            if isinstance(error, BadChunk):
                sequence.state.request = sequence.state.request.without(error.key, error.reason)
                self._scheduler.restart(sequence)  # to compute the chunk whose stored KV is unusable
            else:
                self._fail(sequence.state, error)
        for sequence, out in output.prefilled:
            self._take_slice(sequence, out)
        self._counts.joined += output.joined
        self._counts.split += output.split
        return self.take_events()

    def flush(self) -> None:
        pending, self.pending = self.pending, {}
        self.append(pending)

    def take_events(self) -> Events:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def drop(self, state: RequestState) -> None:
        """Take the request out of the schedule, without an event, and give back its blocks."""
        if state in self._scheduler.states:
            self._scheduler.states.remove(state)
        self._reviews.pop(state, None)
        for sequence in list(state.unfinished):
            sequence.release(SequenceStatus.FINISHED)

    def _emit(self, state: RequestState, event: Event) -> None:
        self._events.append((state, event))

    def _emit_progress(self, state: RequestState, num_filled: int) -> None:
        progress = state.request.progress(num_filled, is_check=state.parent is not None)
        self._emit(state.parent or state, progress)

    # prompts

    def _take_slice(self, sequence: Sequence, out: PrefillOutput) -> None:
        """Handle computed layers of a prompt. After the last ones its answers begin."""
        state, prefill = sequence.state, sequence.prefill
        if sequence.paged is None or prefill is None:  # its request failed
            return
        assert state.provenance is not None
        try:
            self._blocks.keep(sequence.paged, state.request.plan.token_ids[: out.num_filled], state.provenance)
            for hook in state.hooks:
                hook.on_slice(out)
            self._emit_progress(state, out.num_filled)
            if out.result is not None:
                done = PrefillReport(state.request, out.result, out.loader, out.time, prefill.hit_tokens)
                sequence.stop_prefill()
                self._begin_or_resume(sequence, done)
        except Exception as error:
            self._fail(state, error)

    def _begin_or_resume(self, sequence: Sequence, done: PrefillReport) -> None:
        """Begin the answers of a computed prompt, or continue an answer."""
        state, begun = sequence.state, None
        if sequence.output is None:  # else its KV was dropped
            if state.parent is None:
                self._count_prompt(state, done)
            assert sequence.paged is not None
            export = partial(self._scheduler.worker.export_kv, TableInput.of(sequence.paged), state.num_tokens)
            begun = next(filter(None, [hook.on_prefill(done, export) for hook in state.hooks]), None)
            if begun is None:
                self._draw_first(sequence, done)
            else:
                sequence.output = begun.output
        if begun is not None and begun.is_complete:
            self._complete(sequence)
        elif begun is not None or state.done is not done:
            assert sequence.output is not None
            # tokens whose KV is not the prompt's are computed again, one per step as before, to get the same bits
            num_tokens = state.num_prompt_tokens + len(sequence.output.out.token_ids) - 1
            sequence.kv_len = min(state.num_tokens, num_tokens)
            sequence.replay = num_tokens - sequence.kv_len
        if state.done is done:
            self._counts.stall_s += done.loader.stall_s  # waits for the load, so not before the first token is known

    def _count_prompt(self, state: RequestState, done: PrefillReport) -> None:
        state.done, counts = done, self._counts
        plan = state.request.plan.with_prefix_cache(done.prefix_cache_tokens)
        counts.computed += plan.fresh_tokens
        counts.reused += plan.exact_tokens + plan.inexact_tokens
        counts.repaired += len(done.result.chosen)
        counts.prefix_cached += done.prefix_cache_tokens

    def _draw_first(self, first: Sequence, done: PrefillReport) -> None:
        """Draw and append the first token of each answer that starts now. They share the prompt's blocks."""
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
        self.append(dict(zip(wave, draw_next(outputs, done.logits.expand(len(outputs), -1)), strict=True)))

    def _begin_output(self, sequence: Sequence) -> SequenceOutput:
        """Create the output of the sequence's answer."""
        state, sampling, index = sequence.state, sequence.state.request.sampling, sequence.index
        params = replace(sampling, seed=None if sampling.seed is None else sampling.seed + index)
        on_event = partial(self._emit, state) if state.streams else ignore
        if state.num_answers > sampling.n:
            params = replace(params, logprobs=sampling.logprobs or 0)
        on_logits = tuple(filter(None, [hook.on_logits(index) for hook in state.hooks]))
        sequence.output = SequenceOutput(
            self._runtime, params, state.request.plan.token_ids, on_event, index, on_logits
        )
        return sequence.output

    # tokens

    def _draw(self, decoded: Decoded, output: StepOutput) -> dict[Sequence, Draw]:
        """Draw the next tokens, except in a replay. Does not wait for the device. Failures are added to `output`."""
        rows = dict[Sequence, int]()
        for sequence, row in decoded.rows.items():
            sequence.kv_len += 1
            if sequence.replay:
                sequence.replay -= 1
            else:
                rows[sequence] = row
        return self._draw_rows(rows, decoded, output)

    def _draw_rows(self, rows: Mapping[Sequence, int], decoded: Decoded, output: StepOutput) -> dict[Sequence, Draw]:
        """Draw the next token of each sequence from its row of the logits. Does not wait for the device. Failures are
        added to `output`."""
        if not rows:
            return {}
        sequences, logits = list(rows), decoded.output.logits
        outputs = [s.output for s in sequences if s.output is not None]
        every = len(rows) == len(logits)
        try:
            drawn = draw_next(outputs, logits if every else logits[upload(list(rows.values()), logits.device)])
        except Exception as error:  # of the operation that all share
            drawn = [error] * len(sequences)
        draws = dict[Sequence, Draw]()
        for sequence, draw in zip(sequences, drawn, strict=True):
            if isinstance(draw, Exception):
                output.failed.append((sequence, draw))
            else:
                draws[sequence] = draw
        return draws

    def _take_decoded(self, decoded: Decoded, draws: dict[Sequence, Draw], output: StepOutput) -> None:
        """Handle a decode step, except for answers that ended with the token whose KV it computed."""
        for sequence, row in decoded.rows.items():
            self._take_attention(sequence, decoded.output.attention[row])
        going = {s: draw for s, draw in draws.items() if s.status is not SequenceStatus.FINISHED}
        if self._is_async and not self._concluding:  # no token waits for a launch of a hook
            self.pending |= going
        else:
            self.append(going)
            self._take_drafts(decoded, going, output)
        for sequence in decoded.rows:
            unseen = self._blocks.num_unseen(sequence.kv_len)  # blocks that have left the window of every layer
            if sequence.paged is not None and unseen > sequence.paged.num_freed_blocks:
                sequence.paged.give_back(unseen)

    def _take_attention(self, sequence: Sequence, attention: Tensor | None) -> None:
        """Give a token's attention to the hooks."""
        if attention is None or sequence.status is SequenceStatus.FINISHED:
            return
        try:
            for hook in sequence.state.hooks:
                hook.on_attention(sequence.index, attention)
        except Exception as error:
            self._fail(sequence.state, error)

    def _take_drafts(self, decoded: Decoded, going: Collection[Sequence], output: StepOutput) -> None:
        """Continue each answer while the token drawn is the next proposed one, whose row has the logits after it."""
        if not decoded.drafts:
            return
        drafts = {s: decoded.drafts[s] for s in going if s in decoded.drafts}
        self._counts.proposed += sum(map(len, drafts.values()))
        for depth in itertools.count():
            drafts = {s: draft for s, draft in drafts.items() if depth < len(draft) and _has_drawn(s, draft[depth])}
            if not drafts:
                return
            for sequence in drafts:
                sequence.kv_len += 1
                self._take_attention(sequence, decoded.output.attention[decoded.rows[sequence] + depth + 1])
            draws = self._draw_rows({s: decoded.rows[s] + depth + 1 for s in drafts}, decoded, output)
            drafts = {s: drafts[s] for s in draws}
            for sequence in draws:
                assert sequence.output is not None
                sequence.output.out.accepted_tokens += 1
            self._counts.accepted += len(draws)
            self.append(draws)

    def append(self, draws: Mapping[Sequence, Draw | Exception]) -> None:
        """Append tokens to their sequences, and end complete answers. Waits for the draws."""
        for sequence, draw in draws.items():
            assert sequence.output is not None
            if sequence.status is SequenceStatus.FINISHED:  # its request failed
                continue
            try:
                if isinstance(draw, Exception):
                    raise draw
                if not sequence.output.append(draw):
                    self._complete(sequence)
            except Exception as error:
                self._fail(sequence.state, error)

    # ends: an answer is completed; a request is reported, concluded and done, or fails

    def _complete(self, sequence: Sequence) -> None:
        """End a complete answer. With the last one, report the request, or run a further one before."""
        state = sequence.state
        if state.parent is None:
            self._close(sequence)
        sequence.release(SequenceStatus.FINISHED)
        if any(state.unfinished):
            return
        if state.parent is None and state.num_started < state.num_answers:  # the next wave computes its prompt again
            state.sequences.append(Sequence(state, state.num_started))
            return
        if state.parent is None:
            self._review(state, partial(self._conclude, state))
            return
        for hook in state.hooks:
            hook.on_complete(state.outputs)
        self._scheduler.states.remove(state)
        self._review(state.parent, partial(self._report, state.parent))

    def _conclude(self, state: RequestState) -> None:
        """Report a request whose answers are reviewed, or run a further one before."""
        further = next(filter(None, [hook.on_complete(state.outputs) for hook in state.hooks]), None)
        if further is None:
            self._report(state)
        else:
            child = RequestState(further.request, state.number, state, begun=True, hooks=[further.hook])
            child.max_new_tokens, child.num_answer_tokens = further.max_new_tokens, further.num_answer_tokens
            child.sequences = [Sequence(child, 0)]
            self._scheduler.add(child)
            self._emit_progress(child, 0)

    def _close(self, sequence: Sequence, early: Early | None = None) -> None:
        """Flush an answer's text. early: reason for ending it before it is complete."""
        assert sequence.output is not None
        generation = sequence.output.end()
        generation.finish_reason = early or generation.finish_reason
        self._counts.generated += len(generation.token_ids)

    def _end_early(self, state: RequestState) -> None:
        """End a cancelled or overdue request with incomplete answers."""
        early = state.ended
        if state.parent is not None:  # its parent ends, too
            self.drop(state)
            return
        try:
            for sequence in list(state.unfinished):
                if sequence.output is not None:
                    self._close(sequence, early)
                sequence.release(SequenceStatus.FINISHED)
            self._review(state, partial(self._report, state, early))
        except Exception as error:
            self._fail(state, error)

    def _review(self, state: RequestState, then: Callable[[], None]) -> None:
        """Let the hooks review the texts of the answers, and go on with `then`."""
        texts = [generation.text for generation in self._generations(state)]
        work = list(filter(None, [hook.review(texts, lambda: state.cancelled) for hook in state.hooks]))
        if work and self._aside is not None:
            state.in_review = True
            self._reviews[state] = self._aside(lambda: [review() for review in work]), then
            return
        for review in work:
            review()
        then()

    def _end_reviews(self) -> None:
        """Go on with the requests whose review has ended."""
        for state, (future, then) in list(self._reviews.items()):
            if future.done():
                del self._reviews[state]
                state.in_review = False
                try:
                    future.result()
                    then()
                except Exception as error:
                    self._fail(state, error)

    def _report(self, state: RequestState, early: Early | None = None) -> None:
        """Report the answers. early: reason for ending the request with incomplete answers."""
        work = list[Iterator[None]]()
        try:
            answers = self._answers(state)
            if state.done is not None and early is None:
                for hook in state.hooks:
                    work += filter(None, [hook.on_done(state.done, answers, partial(self._emit, state))])
        except Exception as error:
            self._fail(state, error)
            return
        self.drop(state)
        if work:
            self._concluding.append((state, answers, itertools.chain(*work)))
        else:
            self._emit_done(state, answers, early)

    def _conclude_next(self) -> None:
        """Do the next piece of a hook's work for the first complete request; finish the request after the last one."""
        state, answers, pieces = self._concluding.popleft()
        try:
            if not state.cancelled and next(pieces, "end") is None:
                self._concluding.appendleft((state, answers, pieces))
                return
        except Exception as error:
            self._emit_failed(state, error)
        else:
            self._emit_done(state, answers, None)

    def _emit_done(self, state: RequestState, answers: list[Answer], early: Early | None) -> None:
        if early is None:
            self._counts.finished += 1
        else:
            self._counts.cancelled += 1
        self._emit(state, Done(answers, early))

    def _answers(self, state: RequestState) -> list[Answer]:
        """Return the answers, none before the prompt is done. Emits text that was not streamed."""
        if state.done is None:
            return []
        made = self._generations(state)
        if not state.streams and state.request.sampling.logprobs is None:  # they were kept to choose the likeliest
            for generation in made:
                generation.logprobs = []
        answers = [answer_of(self._runtime, state.done, generation) for generation in made]
        for generation, answer in zip(made, answers, strict=True):
            for hook in state.hooks:
                hook.on_answer(state.done, generation.index, answer)
        if not state.streams:
            for index, generation in enumerate(made):
                for logprob in generation.logprobs:
                    self._emit(state, Token(logprob, index))
                for event in (Reasoning(generation.reasoning, index), Text(generation.text, index)):
                    if event.text:
                        self._emit(state, event)
        return answers

    def _generations(self, state: RequestState) -> list[Generation]:
        """Return the answers, the n likeliest if more were generated."""
        made = [output.out for output in state.outputs]
        if len(made) <= state.request.sampling.n:
            return made
        return sorted(made, key=lambda g: g.mean_logprob, reverse=True)[: state.request.sampling.n]

    def _fail(self, state: RequestState, error: Exception) -> None:
        """End the request, or the parent of a further one, with an error."""
        if state.parent is not None:
            self.drop(state)
            state = state.parent
        if state not in self._scheduler.states:
            return
        self.drop(state)
        if isinstance(error, torch.OutOfMemoryError):
            known = out_of_memory(error, self._runtime.decoder.device, state.num_tokens, self._runtime.memory())
            known.__cause__, error = error, known
        self._emit_failed(state, error)

    def _emit_failed(self, state: RequestState, error: Exception) -> None:
        self._counts.failed += 1
        self._emit(state, Failed(error))


def _has_drawn(sequence: Sequence, token_id: int) -> bool:
    """Return whether the answer continues with this token."""
    assert sequence.output is not None
    return sequence.status is not SequenceStatus.FINISHED and sequence.output.out.token_ids[-1] == token_id
