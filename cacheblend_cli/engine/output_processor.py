"""Processing of sampled tokens: streamed text, complete answers, and requests that finish, are checked, or fail."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator

import torch
from cacheblend_kernels import KernelError
from cacheblend_store import StoreError

from cacheblend_cli.engine.build_answer import answer_of
from cacheblend_cli.engine.checks import Check
from cacheblend_cli.engine.controller import learn_from
from cacheblend_cli.engine.events import Done, Early, EngineStats, Event, Failed, HandedOver, Reasoning, Text, Token
from cacheblend_cli.engine.memory import out_of_memory
from cacheblend_cli.engine.missing_chunks import has_missing, store_missing
from cacheblend_cli.engine.prefill import PrefillReport
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.sampling import Draw
from cacheblend_cli.engine.sequence import RequestState, Sequence, Status
from cacheblend_cli.engine.tiered import remember_speed
from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.types import Answer

Emit = Callable[[RequestState, Event], None]
logger = logging.getLogger("cacheblend")


class OutputProcessor:
    """Ends answers and requests. states: those that are not over. queue: takes the full prefills that check answers."""

    def __init__(
        self,
        runtime: Runtime,
        states: list[RequestState],
        queue: Callable[[RequestState], None],
        counts: EngineStats,
        emit: Emit,
    ) -> None:
        self._runtime, self._states, self._queue = runtime, states, queue
        self._counts, self._emit = counts, emit
        self._storing = deque[tuple[RequestState, list[Answer], Iterator[None]]]()

    def sampled(self, draws: list[tuple[Sequence, Draw]]) -> None:
        """Append the tokens to their sequences, and finish those that are complete."""
        for sequence, draw in draws:
            assert sequence.output is not None
            if sequence.status is Status.FINISHED:  # its request failed
                continue
            try:
                if not sequence.output.append(draw):
                    self.finish(sequence)
            except Exception as error:  # the others go on
                self.fail(sequence.state, error)

    def finish(self, sequence: Sequence, early: Early | None = None) -> None:
        """An answer is complete. With the last one the request is checked or done."""
        state, output = sequence.state, sequence.output
        assert output is not None
        if isinstance(state, Check):
            sequence.finish()
            self.check_ended(state)
            return
        generation = output.end()
        generation.finish_reason = early or generation.finish_reason
        generation.attention = sequence.watch.of_chunks() if sequence.watch is not None else None
        self._counts.generated += len(generation.token_ids)
        sequence.generation = generation
        sequence.finish()
        if early is not None or any(state.unfinished):
            return
        if state.num_started < state.num_answers:  # the next wave: its prompt is prefilled again
            state.sequences.append(Sequence(state, state.num_started))
        else:
            self._check(state)

    def check_ended(self, state: Check) -> None:
        """A check may be complete: its parent ends."""
        if any(state.unfinished):
            return
        self._states.remove(state)
        state.conclude()
        assert state.parent is not None
        self.end(state.parent)

    def _check(self, state: RequestState) -> None:
        """Queue the full prefill that the answers are checked by, or end the request."""
        check = None if state.checks is None else state.checks.begin(self._runtime, state)
        if check is None:
            self.end(state)
        else:
            self._queue(check)

    def end(self, state: RequestState, early: Early | None = None) -> None:
        """Emit the answers. early: why the request ends though it is not finished, with what was generated until now."""
        if isinstance(state, Check):
            self.remove(state)
            return
        try:
            for sequence in list(state.unfinished):
                if sequence.output is not None:
                    self.finish(sequence, early)
            answers = self._answers(state)
            if state.done is not None and early is None:
                _conclude(self._runtime, state.done, answers[0])
        except Exception as error:
            self.fail(state, error)
            return
        self.remove(state)
        if early is None and state.request.connector is not None:
            self._emit(state, HandedOver(answers[0]))
        if early is None and state.request.options.save and state.done is not None and has_missing(state.done):
            self._storing.append((state, answers, store_missing(state.done)))
        else:
            self._over(state, answers, early)

    @property
    def storing(self) -> bool:
        """Return whether chunks are left to collect that finished requests had to compute."""
        return bool(self._storing)

    def store_piece(self) -> None:
        """Collect and store some of these chunks, one launch. With the last of a request's it is done."""
        state, answers, pieces = self._storing[0]
        try:
            if not state.cancelled:
                next(pieces)
                return
        except StopIteration:
            pass
        except Exception as error:
            self._storing.popleft()
            self.failed(state, error)
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
        """The best of them where more were made than wanted; none where the prompt was not done. What was not streamed is emitted."""
        if state.done is None:
            return []
        made = [s.generation for s in state.sequences if s.generation is not None]
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

    def fail(self, state: RequestState, error: Exception) -> None:
        """The request ends with an error, and so does the one it was made for."""
        if state.parent is not None:
            self.remove(state)
            state = state.parent
        if state not in self._states:
            return
        self.remove(state)
        if isinstance(error, torch.OutOfMemoryError):
            known = out_of_memory(error, self._runtime.decoder.device, state.num_tokens, self._runtime.memory())
            known.__cause__, error = error, known
        self.failed(state, error)

    def failed(self, state: RequestState, error: Exception) -> None:
        """Emit that the request failed."""
        self._counts.failed += 1
        self._emit(state, Failed(error))

    def remove(self, state: RequestState) -> None:
        """Give back what the request holds."""
        if state in self._states:
            self._states.remove(state)
        for sequence in list(state.unfinished):
            sequence.finish()


def as_public_error(error: Exception) -> Exception:
    """The error as users get it: an unknown one is logged and wrapped."""
    if isinstance(error, CacheBlendError | StoreError | KernelError):
        return error
    logger.error("a request failed", exc_info=error)
    wrapped = CacheBlendError(f"the engine failed: {type(error).__name__}: {error}", "this is a fault of cacheblend's")
    wrapped.__cause__ = error
    return wrapped


def _conclude(runtime: Runtime, done: PrefillReport, answer: Answer) -> None:
    """Let the loading controller learn, and tell the store which chunks were used."""
    if answer.auto is not None and not done.prefix_cache_tokens:
        learn_from(runtime, answer.auto, done)
    request, store = done.request, done.request.store
    if store is not None and request.blend.mode != "full":  # before missing chunks are stored, which may need room
        used = [s.key for s in done.plan.chunks if s.cached and s.key]
        if request.tiered is not None and store.tier is not None:
            remember_speed(store.tier)
        store.touch([*used, request.collection.prefix_key] if request.prefix_cached else used)
