"""The end of answers and requests: an answer that is complete is closed, and with the last one its request is reviewed,
reported and, after what hooks still do for it, done; or it fails. An error in one answer ends only its request."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from cacheblend_cli.engine.core.report import answer_of
from cacheblend_cli.engine.core.scheduler import Scheduler
from cacheblend_cli.engine.core.sequence import RequestState, Sequence, SequenceStatus
from cacheblend_cli.engine.core.sequence_output import Generation
from cacheblend_cli.engine.events import Done, Early, EngineStats, Event, Failed, Token
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.memory import out_of_memory
from cacheblend_cli.types import Answer, Piece

Events = list[tuple[RequestState, Event]]
Aside = Callable[[Callable[[], object]], Future[Any]]
"""Runs work in another thread."""


class Finisher:
    """Ends answers and requests, and emits their events. aside: runs reviews, None to run them in this thread."""

    def __init__(self, runtime: Runtime, scheduler: Scheduler, counts: EngineStats, aside: Aside | None = None) -> None:
        self._runtime, self._scheduler, self._counts, self._events = runtime, scheduler, counts, Events()
        self._concluding = deque[tuple[RequestState, list[Answer], Iterator[None]]]()
        self._aside, self._reviews = aside, dict[RequestState, tuple[Future[Any], Callable[[], None]]]()

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

    def emit(self, state: RequestState, event: Event) -> None:
        self._events.append((state, event))

    def emit_progress(self, state: RequestState, num_filled: int) -> None:
        progress = state.request.progress(num_filled, is_check=state.parent is not None)
        self.emit(state.parent or state, progress)

    def finish(self, sequence: Sequence) -> None:
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
            self.emit_progress(child, 0)

    def _close(self, sequence: Sequence, early: Early | None = None) -> None:
        """Flush an answer's text. early: reason for ending it before it is complete."""
        assert sequence.output is not None
        generation = sequence.output.end()
        generation.finish_reason = early or generation.finish_reason
        self._counts.generated += len(generation.token_ids)

    def end_early(self, state: RequestState) -> None:
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
            self.fail(state, error)

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

    def end_reviews(self) -> None:
        """Go on with the requests whose review has ended."""
        for state, (future, then) in list(self._reviews.items()):
            if future.done():
                del self._reviews[state]
                state.in_review = False
                try:
                    future.result()
                    then()
                except Exception as error:
                    self.fail(state, error)

    def _report(self, state: RequestState, early: Early | None = None) -> None:
        """Report the answers. early: reason for ending the request with incomplete answers."""
        work = list[Iterator[None]]()
        try:
            answers = self._answers(state)
            if state.done is not None and early is None:
                for hook in state.hooks:
                    work += filter(None, [hook.on_done(state.done, answers, partial(self.emit, state))])
        except Exception as error:
            self.fail(state, error)
            return
        self.drop(state)
        if work:
            self._concluding.append((state, answers, itertools.chain(*work)))
        else:
            self._emit_done(state, answers, early)

    def conclude_next(self) -> None:
        """Do the next piece of a hook's work for the first complete request; finish the request after the last one."""
        if not self._concluding:
            return
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
        self.emit(state, Done(answers, early))

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
                    self.emit(state, Token(logprob, index))
                for text, is_reasoning in ((generation.reasoning, True), (generation.text, False)):
                    if text:
                        self.emit(state, Piece(text, is_reasoning, index))
        return answers

    def _generations(self, state: RequestState) -> list[Generation]:
        """Return the answers, the n likeliest if more were generated."""
        made = [output.out for output in state.outputs]
        if len(made) <= state.request.sampling.n:
            return made
        return sorted(made, key=lambda g: g.mean_logprob, reverse=True)[: state.request.sampling.n]

    def fail(self, state: RequestState, error: Exception) -> None:
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
        self.emit(state, Failed(error))
