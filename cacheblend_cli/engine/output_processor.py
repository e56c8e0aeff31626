"""How an answer ends, and a job: with all its answers, early, or with an error."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from cacheblend_kernels import KernelError
from cacheblend_store import StoreError

from cacheblend_cli.engine.answer import Answer
from cacheblend_cli.engine.ask import answer_of, conclude
from cacheblend_cli.engine.block_manager import BlockManager
from cacheblend_cli.engine.confirm import confirm
from cacheblend_cli.engine.generate import Listener
from cacheblend_cli.engine.holes import has_holes, store_holes
from cacheblend_cli.engine.jobs import Done, Early, EngineStats, Event, Failed, Reasoning, Text, Ticket, Token
from cacheblend_cli.engine.memory import out_of_memory
from cacheblend_cli.engine.refine import Refiner
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.sequence import Run, Sequence
from cacheblend_cli.engine.verify import verify
from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.kv.swap import copy_of

Tell = Callable[[Ticket, Event], None]
logger = logging.getLogger("cacheblend")


def listener(tell: Tell, ticket: Ticket, index: int) -> Listener:
    """Hears one of a job's answers."""
    return Listener(
        lambda piece: tell(ticket, Text(piece, index)),
        lambda piece: tell(ticket, Reasoning(piece, index)),
        lambda logprob: tell(ticket, Token(logprob, index)),
    )


class OutputProcessor:
    """runs: the jobs that are not over, of which those that end are taken out. refiner: told what was blended, None for nobody."""

    def __init__(
        self,
        runtime: Runtime,
        blocks: BlockManager,
        runs: list[Run],
        counts: EngineStats,
        refiner: Refiner | None,
        tell: Tell,
    ) -> None:
        self._runtime, self._blocks, self._runs = runtime, blocks, runs
        self._counts, self._refiner, self._tell = counts, refiner, tell
        self._storing = deque[tuple[Ticket, list[Answer], Iterator[None]]]()

    def finish(self, sequence: Sequence, early: Early | None = None) -> None:
        """The answer is complete: its KV stays hot, its blocks are others'. With the last one the job is done."""
        run, utterance = sequence.run, sequence.utterance
        assert utterance is not None
        generation = utterance.end()
        generation.finish_reason = early or generation.finish_reason
        generation.attention = sequence.watch.of_chunks() if sequence.watch is not None else None
        self._counts.generated += len(generation.token_ids)
        if sequence.paged is not None:
            self._verify(run, sequence)
            self._blocks.keep(sequence.paged, sequence.token_ids[: sequence.kv_len], run.origin)
        if run.ticket.job.confirm and run.done is not None and not run.ticket.ended:
            leave = None if self._refiner is None else partial(self._blocks.keep_copy, origin=run.origin.in_full)
            generation, run.confirmation = confirm(self._runtime, run.done, generation, leave)
        sequence.generation = generation
        sequence.finish()
        if early is not None or any(run.unfinished):
            return
        if run.num_started < run.num_answers:  # the next wave: its prompt is prefilled again
            run.sequences.append(Sequence(run, run.num_started))
        else:
            self.end(run)

    def _verify(self, run: Run, sequence: Sequence) -> None:
        """Compare the prompt's KV with a full prefill's, once; in a copy, since answering again writes to it."""
        if run.first_logits is None or run.verification is not None or run.done is None or run.ticket.ended:
            return
        assert sequence.paged is not None
        copied = self._runtime.new_sequence(run.num_tokens + run.room)
        try:
            copy_of(sequence.paged, copied, run.num_tokens)
            run.verification = verify(self._runtime, replace(run.done, sequence=copied), run.first_logits)
        finally:
            copied.release()

    def end(self, run: Run, early: Early | None = None) -> None:
        """Tell the answers. early: why the job ends though it is not finished, with what was said until now."""
        try:
            for sequence in list(run.unfinished):
                if sequence.utterance is not None:
                    self.finish(sequence, early)
            answers = self._answers(run)
            if run.done is not None and early is None:
                if self._refiner is not None and run.origin.exact_until < run.num_tokens:
                    self._refiner.note(run.request, run.origin)
                conclude(self._runtime, run.done, answers[0])
        except Exception as error:
            self.fail(run, error)
            return
        self._remove(run)
        if early is None and run.ticket.job.save_holes and run.done is not None and has_holes(run.done):
            self._storing.append((run.ticket, answers, store_holes(run.done)))
        else:
            self._over(run.ticket, answers, early)

    @property
    def storing(self) -> bool:
        """Whether chunks are left to collect that finished jobs had to compute."""
        return bool(self._storing)

    def store_piece(self) -> None:
        """Collect and store some of these chunks, one launch. With the last of a job's it is done."""
        ticket, answers, pieces = self._storing[0]
        try:
            if not ticket.cancelled:
                next(pieces)
                return
        except StopIteration:
            pass
        except Exception as error:
            self._storing.popleft()
            self.failed(ticket, error)
            return
        self._storing.popleft()
        self._over(ticket, answers, None)

    def _over(self, ticket: Ticket, answers: list[Answer], early: Early | None) -> None:
        if early is None:
            self._counts.finished += 1
        else:
            self._counts.cancelled += 1
        self._tell(ticket, Done(answers, early))

    def _answers(self, run: Run) -> list[Answer]:
        """The best of them where more were made than wanted; none where the prompt was not done."""
        if run.done is None:
            return []
        made = [s.generation for s in run.sequences if s.generation is not None]
        if len(made) > run.request.sampling.n:
            made = sorted(made, key=lambda g: g.mean_logprob, reverse=True)[: run.request.sampling.n]
            for index, generation in enumerate(made):
                if run.request.sampling.logprobs is None:
                    generation.logprobs = []
                for logprob in generation.logprobs:
                    self._tell(run.ticket, Token(logprob, index))
                listener(self._tell, run.ticket, index).tell(generation.reasoning, generation.text)
        answers = [answer_of(self._runtime, run.done, generation, run.report) for generation in made]
        for answer in answers:
            answer.verify, answer.confirmation = run.verification, run.confirmation
            answer.risk = None if run.gate is None else run.gate.found
        return answers

    def fail(self, run: Run, error: Exception) -> None:
        """The job ends with an error, and nothing of it stays."""
        if run not in self._runs:
            return
        self._remove(run)
        if isinstance(error, torch.OutOfMemoryError):
            error = out_of_memory(error, self._runtime.decoder.device, run.num_tokens, self._runtime.memory())
        self.failed(run.ticket, error)

    def failed(self, ticket: Ticket, error: Exception) -> None:
        """Tell that the job failed."""
        if not isinstance(error, CacheBlendError | StoreError | KernelError):
            logger.error("a job failed", exc_info=error)
            told = CacheBlendError(
                f"the engine failed: {type(error).__name__}: {error}", "this is a fault of cacheblend's"
            )
            told.__cause__, error = error, told
        self._counts.failed += 1
        self._tell(ticket, Failed(error))

    def _remove(self, run: Run) -> None:
        self._runs.remove(run)
        run.stop_prefilling()
        for sequence in list(run.unfinished):
            sequence.finish()
