"""One step of an engine that answers many questions at once: schedule, load, prefill or decode, sample, emit."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch
from cacheblend_kernels import KernelError
from cacheblend_store import ChunkStore, StoreError
from torch import Tensor

from cacheblend_cli.errors import CacheBlendError, UsageError
from cacheblend_cli.kv.block_allocator import Allocation
from cacheblend_cli.kv.hot_blocks import Hit, Origin
from cacheblend_cli.kv.pool import upload
from cacheblend_cli.kv.source import BadChunk
from cacheblend_cli.kv.swap import copy_of
from cacheblend_cli.runtime.answer import Answer
from cacheblend_cli.runtime.ask import Asking
from cacheblend_cli.runtime.attention import AttentionShares, Watch
from cacheblend_cli.runtime.block_manager import BlockManager, Found
from cacheblend_cli.runtime.confirm import confirm, seeded
from cacheblend_cli.runtime.decode import EagerRunner
from cacheblend_cli.runtime.gate import Gate, in_full
from cacheblend_cli.runtime.generate import NOBODY, FinishReason, Listener, Utterance
from cacheblend_cli.runtime.jobs import (
    Done,
    Event,
    Failed,
    Limits,
    Reasoning,
    ServiceStats,
    Started,
    Text,
    Ticket,
    Token,
)
from cacheblend_cli.runtime.memory import DeviceMemory, lasting_pool, out_of_memory
from cacheblend_cli.runtime.prefill import Prefilled, Prefilling
from cacheblend_cli.runtime.refine import Refiner
from cacheblend_cli.runtime.request import Request, resolve
from cacheblend_cli.runtime.runtime import Runtime
from cacheblend_cli.runtime.scheduler import Scheduler
from cacheblend_cli.runtime.sequence import Run, Sequence, Status
from cacheblend_cli.runtime.verify import verify

logger = logging.getLogger("cacheblend")

SWAP_BYTES_PER_S = 3e9
"""What a copy to the host and back is taken to reach, until one was measured."""


class Stepper:
    """Runs jobs, a step at a time, in the thread that calls it. tell: given the events of a job."""

    def __init__(
        self, runtime: Runtime, store: ChunkStore | None, limits: Limits, tell: Callable[[Ticket, Event], None]
    ) -> None:
        self._runtime, self._store, self._limits, self._tell = runtime, store, limits, tell
        memory: DeviceMemory = lasting_pool(runtime, limits)
        self._runner, decoder = memory.runner, runtime.decoder
        hot = limits.hot and decoder.rope.switches_at is None  # else KV is that of a length
        windows = [layer.attention.sliding_window for layer in decoder.layers]
        window = None if None in windows else max(w for w in windows if w is not None)
        self.blocks = BlockManager(memory.pool, decoder.kernels, limits.watermark, hot, limits.hot_blended, window)
        self.scheduler = Scheduler(
            self.blocks,
            limits.max_sequences,
            ahead=1 if decoder.device.type == "cpu" else 0,  # on a GPU prompts load through one staging ring
            begin=self._begin,
            come_back=self._come_back,
            give_up=self._give_up,
        )
        self.refiner = Refiner(runtime, self.blocks, limits.max_rows) if limits.refine and hot else None
        if limits.refine and not hot:
            runtime.say("--refine does nothing here: KV stays in the pool for nobody")
        self._runs: list[Run] = []
        self.counts = ServiceStats()
        self._swap_bytes_per_s, self._decode_s = SWAP_BYTES_PER_S, 0.0

    @property
    def busy(self) -> bool:
        return bool(self._runs)

    @property
    def may_refine(self) -> bool:
        """Whether there is something to do though nobody asks."""
        return not self._runs and bool(self.refiner)

    def arrive(self, ticket: Ticket) -> None:
        """A job joins those that wait, or fails at once: when it makes no sense, or can never fit."""
        runtime, question = self._runtime, ticket.job.question
        try:
            request = resolve(runtime, self._store, question)
            room = runtime.room(request.sampling)
            runtime.check_length(request.plan.num_tokens, room)
            asking = Asking.of(runtime, seeded(request) if ticket.job.confirm else request, ticket.job.auto)
            asking.request.blend.policy(runtime.model.spec.num_layers, asking.request.lossless)
            self._check_size(asking.request, room)
            run = Run(ticket, asking, asking.request, room, origin_of(asking.request), gate=Gate.of(asking.request))
            if run.gate is not None and run.num_answers > 1:
                raise UsageError("the risk is of one answer", "ask for one answer, or without max_risk")
        except Exception as error:
            self._failed(ticket, error)
            return
        self._runs.append(run)
        self.scheduler.add(run.sequences[0])

    def step(self) -> None:
        """Do the next thing. Jobs that were cancelled, or whose deadline has passed, end first. Without any, refine a piece."""
        if self.refiner and not self._runs:
            self.counts.refined += self.refiner.piece()
            self.blocks.check_idle()
            return
        started = time.perf_counter()
        for run in [r for r in self._runs if r.ticket.ended]:
            self._end_early(run)
        step = self.scheduler.schedule()
        self.counts.scheduling_s += time.perf_counter() - started
        if step.prefill is not None:
            self._prefill(step.prefill)
        elif step.decode:
            self._decode(step.decode)
        self.counts.step_s += time.perf_counter() - started
        if not self._runs:
            self.blocks.check_idle()

    # what the scheduler has done

    def _begin(self, sequence: Sequence) -> None:
        """Blocks, and its KV begins to load."""
        run = sequence.run
        found = run.find(self.blocks)
        sequence.status = Status.RUNNING
        run.origin = found.origin
        if not run.begun:
            run.begun = True
            self._tell(run.ticket, Started())
        try:
            sequence.paged = self.blocks.allocate(run.num_tokens, run.room, found.hit)
            run.prefilling = Prefilling(
                self._runtime, run.request, sequence.paged, found.hit.num_tokens, found.origin.is_exact
            )
            run.prefilling.__enter__()
        except BadChunk as bad:
            self._without(run, bad)
        except Exception as error:
            self._fail(run, error)

    def _give_up(self, sequence: Sequence) -> None:
        """Its blocks, which are swapped out, or dropped where computing again is estimated to take less."""
        self.counts.preempted += 1
        if sequence.prefilling:
            self._start_again(sequence.run)
            return
        assert sequence.paged is not None
        sequence.status = Status.SWAPPED
        if self._cheaper_to_compute(sequence):
            sequence.release()
            return
        num_bytes, started = len(sequence.paged.owned) * self._block_bytes, time.perf_counter()
        sequence.swapped, sequence.paged = self.blocks.swap_out(sequence.paged), None
        self._swap_bytes_per_s += 0.2 * (num_bytes / (time.perf_counter() - started) - self._swap_bytes_per_s)

    def _come_back(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        if sequence.swapped is not None:
            sequence.paged, sequence.swapped = self.blocks.swap_in(sequence.swapped, sequence.run.room), None
            return
        try:
            self._compute_again(sequence)
        except Exception as error:
            self._fail(sequence.run, error)

    def _cheaper_to_compute(self, sequence: Sequence) -> bool:
        """Whether the same KV can be had by doing again what was done, in less time than it takes to swap it out and in."""
        done = sequence.run.done
        assert done is not None
        if sequence.paged is None or done.hot_tokens or len(sequence.run.sequences) > 1:
            return False
        again_s = done.prefill_s + self._decode_s * (sequence.kv_len - sequence.run.num_tokens)
        return again_s < 2 * len(sequence.paged.owned) * self._block_bytes / self._swap_bytes_per_s

    def _compute_again(self, sequence: Sequence) -> None:
        """The prompt as it was prefilled, and the answer token by token: the KV is the same to the bit."""
        run, end = sequence.run, sequence.kv_len
        sequence.paged = self.blocks.allocate(run.num_tokens, run.room, Hit())
        while True:
            try:
                with Prefilling(self._runtime, run.request, sequence.paged) as prefilling:
                    while prefilling.advance(self._limits.max_rows) is None:
                        pass
                break
            except BadChunk as bad:  # it went meanwhile: the answer goes on over KV that is computed
                run.request = run.request.without(bad.key, bad.reason)
        ids = sequence.token_ids
        for position in range(run.num_tokens, end):
            self._runner.begin([sequence.paged], [position], 1)
            self._runner.step(upload([ids[position]], self._runtime.decoder.device))

    @property
    def _block_bytes(self) -> float:
        pool = self.blocks.pool
        return pool.num_bytes / pool.allocator.num_blocks

    # prefill

    def _prefill(self, sequence: Sequence) -> None:
        """A piece of a prompt; after the last one, its answers begin."""
        run = sequence.run
        assert run.prefilling is not None
        try:
            done = run.prefilling.advance(self._limits.max_rows)
            if done is not None:
                run.stop_prefilling()
                self._answers_begin(run, done)
        except BadChunk as bad:
            self._without(run, bad)
        except Exception as error:
            self._fail(run, error)

    def _answers_begin(self, run: Run, done: Prefilled) -> None:
        """The first token of each; they share the prompt's blocks."""
        first, plan = run.sequences[0], run.request.plan.with_hot(done.hot_tokens)
        assert first.paged is not None
        run.done = done
        self.counts.computed += plan.fresh_tokens
        self.counts.reused += plan.exact_tokens + plan.inexact_tokens
        self.counts.repaired += len(done.result.chosen)
        self.counts.hot += done.hot_tokens
        self.counts.stall_s += done.loader.stall_s
        self.blocks.keep(first.paged, plan.token_ids, run.origin)
        if run.ticket.job.verify:
            run.first_logits = done.logits.clone()
        sampling = run.request.sampling
        for index in range(run.num_answers):
            sequence = first
            if index:
                sequence = Sequence(run, index, Status.RUNNING, first.paged.fork())
                run.sequences.append(sequence)
                self.scheduler.add(sequence)
            params = replace(sampling, seed=None if sampling.seed is None else sampling.seed + index)
            listener = self._listener(run.ticket, index)
            if run.num_answers > sampling.n:  # nobody hears them before the best are chosen, by their log-probabilities
                params, listener = replace(params, logprobs=sampling.logprobs or 0), NOBODY
            sequence.utterance = Utterance(self._runtime, params, plan.token_ids, listener)
            sequence.kv_len = run.num_tokens
            sequence.watch = AttentionShares(self._runtime.decoder, run.request.plan)
        logits = done.logits if run.gate is None else self._gated(first, done.logits)
        drawn = [(s, s.utterance.draw(logits)) for s in run.sequences if s.utterance is not None]
        for sequence, draw in drawn:
            assert sequence.utterance is not None
            if not sequence.utterance.hear(draw):
                self._finish(sequence)

    def _listener(self, ticket: Ticket, index: int) -> Listener:
        """Hears one of the answers."""
        return Listener(
            lambda piece: self._tell(ticket, Text(piece, index)),
            lambda piece: self._tell(ticket, Reasoning(piece, index)),
            lambda logprob: self._tell(ticket, Token(logprob, index)),
        )

    def _without(self, run: Run, bad: BadChunk) -> None:
        """Begin again, and compute the chunk."""
        run.request = run.request.without(bad.key, bad.reason)
        sequence = run.sequences[0]
        self.scheduler.remove(sequence)
        self._start_again(run)
        self.scheduler.add(sequence)

    def _start_again(self, run: Run) -> None:
        run.stop_prefilling()
        run.origin = origin_of(run.request)
        run.sequences[0].release()
        run.sequences[0].status = Status.WAITING

    # decode

    def _decode(self, sequences: list[Sequence]) -> None:
        """A token for each: those whose RoPE has the same frequencies go together, unless rows are not steady."""
        decoder, started = self._runtime.decoder, time.perf_counter()
        try:
            for _, group in groupby(
                sequences, key=lambda s: decoder.rope.regime(s.kv_len + 1) if decoder.steady else s
            ):
                self._decode_together(list(group))
        except Exception as error:
            for run in {id(s.run): s.run for s in sequences if s.status is not Status.FINISHED}.values():
                self._fail(run, error)
        self._decode_s = time.perf_counter() - started

    def _decode_together(self, sequences: list[Sequence]) -> None:
        parts = [(s, s.paged, s.utterance) for s in sequences if s.paged is not None and s.utterance is not None]
        tokens = upload([u.out.token_ids[-1] for _, _, u in parts], self._runtime.decoder.device)
        self._runner.begin([p for _, p, _ in parts], [s.kv_len for s, _, _ in parts], 1)
        if isinstance(self._runner, EagerRunner):
            self._runner.observer = Watch([(s.watch, p) for s, p, _ in parts])
        logits = self._runner.step(tokens)
        if isinstance(self._runner, EagerRunner):
            self._runner.observer = None
        drawn = []
        for (sequence, _, utterance), row in zip(parts, logits, strict=True):
            try:
                drawn.append((sequence, utterance, utterance.draw(self._gated(sequence, row))))
            except Exception as error:  # in its full prefill: the others go on
                self._fail(sequence.run, error)
        for sequence, utterance, draw in drawn:
            sequence.kv_len += 1
            if utterance.hear(draw):
                self._give_back(sequence)
                continue
            try:
                self._finish(sequence)
            except Exception as error:  # in what is done once it is complete: the others go on
                self._fail(sequence.run, error)

    def _gated(self, sequence: Sequence, logits: Tensor) -> Tensor:
        """What the next token is drawn from. Where that is a full prefill's logits, its KV comes back as what was swapped out
        does, into blocks of its own: others may share those of before."""
        run, utterance = sequence.run, sequence.utterance
        gate, start = run.gate, time.perf_counter()
        exact = run.origin.exact_until >= run.num_tokens  # a full prefill has gone on here, or was found hot
        if gate is None or exact or not gate.too_risky(logits):
            return logits
        assert run.done is not None
        assert utterance is not None
        full, logits = in_full(self._runtime, run.done, utterance.out.token_ids)
        self.scheduler.remove(sequence)
        sequence.release()
        sequence.swapped, sequence.status = self.blocks.swap_out(full), Status.SWAPPED
        self.scheduler.add(sequence)
        run.request = replace(run.request.in_full(), notes=run.request.notes)  # should it have to be computed again
        run.origin = origin_of(run.request)
        gate.found = replace(gate.found, seconds=time.perf_counter() - start)
        return logits

    def _give_back(self, sequence: Sequence) -> None:
        """Blocks that have left the window of every layer, unless the prompt's are looked at again to verify it."""
        run, paged, unseen = sequence.run, sequence.paged, self.blocks.num_unseen(sequence.kv_len)
        if paged is not None and unseen > paged.gone and run.first_logits is None:
            self.blocks.keep(paged, sequence.token_ids[: sequence.kv_len], run.origin)
            paged.give_back(unseen)

    # the end of an answer, and of a job

    def _finish(self, sequence: Sequence, reason: FinishReason | None = None) -> None:
        """The answer is complete: its KV stays hot, its blocks are others'. With the last one the job is done."""
        run, utterance = sequence.run, sequence.utterance
        assert utterance is not None
        generation = utterance.end()
        if reason is not None:
            generation.finish_reason = reason
        generation.attention = sequence.watch.of_chunks() if sequence.watch is not None else None
        sequence.generation = generation
        self.counts.generated += len(generation.token_ids)
        if sequence.paged is not None:
            self._verify(run, sequence)
            self.blocks.keep(sequence.paged, sequence.token_ids[: sequence.kv_len], run.origin)
        if run.ticket.job.confirm and run.done is not None and not run.ticket.ended:
            leave = None if self.refiner is None else partial(self.blocks.keep_copy, origin=run.origin.in_full)
            sequence.generation, confirmation = confirm(self._runtime, run.done, generation, leave)
            run.checks = replace(run.checks, confirmation=confirmation)
        self._leave(sequence)
        if reason is None and not any(run.unfinished):
            self._done(run)

    def _verify(self, run: Run, sequence: Sequence) -> None:
        """Compare the prompt's KV with a full prefill's, once; in a copy, since answering again writes to it."""
        if run.first_logits is None or run.checks.verification is not None or run.done is None or run.ticket.ended:
            return
        assert sequence.paged is not None
        copied = self._runtime.new_sequence(run.num_tokens + run.room)
        try:
            copy_of(sequence.paged, copied, run.num_tokens)
            verification = verify(self._runtime, replace(run.done, sequence=copied), run.first_logits)
            run.checks = replace(run.checks, verification=verification)
        finally:
            copied.release()

    def _done(self, run: Run) -> None:
        """Tell the answers, the best of them where more were made than wanted."""
        self._runs.remove(run)
        try:
            answers = self._answers(run)
            assert run.done is not None
            if self.refiner is not None and run.origin.exact_until < run.num_tokens:
                self.refiner.note(run.request, run.origin)
            run.asking.end(run.done, answers[0], save_holes=run.ticket.job.save_holes)
        except Exception as error:
            self._failed(run.ticket, error)
            return
        self.counts.finished += 1
        self._tell(run.ticket, Done(answers))

    def _end_early(self, run: Run) -> None:
        reason = run.ticket.ended
        assert reason is not None
        self._runs.remove(run)
        run.stop_prefilling()
        try:
            for sequence in list(run.unfinished):
                if sequence.utterance is None:
                    self._leave(sequence)
                else:
                    self._finish(sequence, reason)
            answers = self._answers(run) if run.done is not None else []
        except Exception as error:
            for sequence in list(run.unfinished):
                self._leave(sequence)
            self._failed(run.ticket, error)
            return
        self.counts.cancelled += 1
        self._tell(run.ticket, Done(answers, reason))

    def _answers(self, run: Run) -> list[Answer]:
        assert run.done is not None
        made = [s.generation for s in run.sequences if s.generation is not None]
        if len(made) > run.request.sampling.n:
            made = sorted(made, key=lambda g: g.mean_logprob, reverse=True)[: run.request.sampling.n]
            for index, generation in enumerate(made):
                if run.request.sampling.logprobs is None:
                    generation.logprobs = []
                for logprob in generation.logprobs:
                    self._tell(run.ticket, Token(logprob, index))
                self._listener(run.ticket, index).tell(generation.reasoning, generation.text)
        checks = run.checks if run.gate is None else replace(run.checks, risk=run.gate.found)
        return [run.asking.answer(run.done, generation, checks) for generation in made]

    def _fail(self, run: Run, error: Exception) -> None:
        """The job ends with an error, and nothing of it stays."""
        if run not in self._runs:
            return
        self._runs.remove(run)
        run.stop_prefilling()
        for sequence in list(run.unfinished):
            self._leave(sequence)
        if isinstance(error, torch.OutOfMemoryError):
            error = out_of_memory(error, self._runtime.decoder.device, run.num_tokens, self._runtime.memory())
        self._failed(run.ticket, error)

    def _leave(self, sequence: Sequence) -> None:
        sequence.status = Status.FINISHED
        sequence.release()
        self.scheduler.remove(sequence)

    def _failed(self, ticket: Ticket, error: Exception) -> None:
        if not isinstance(error, CacheBlendError | StoreError | KernelError):
            logger.error("a job failed", exc_info=error)
            told = CacheBlendError(
                f"the engine failed: {type(error).__name__}: {error}", "this is a fault of cacheblend's"
            )
            told.__cause__, error = error, told
        self.counts.failed += 1
        self._tell(ticket, Failed(error))

    def _check_size(self, request: Request, room: int) -> None:
        found = Found(Hit(), origin_of(request))
        if self.blocks.can_allocate(request.plan.num_tokens, room, found) is Allocation.NEVER:
            raise UsageError(
                f"the prompt has {request.plan.num_tokens} tokens and the answer up to {room}, and the engine holds KV of "
                f"{self.blocks.most_tokens} at most",
                "ask with fewer chunks or a smaller --max-tokens, or serve with a larger --pool-tokens",
            )


def origin_of(request: Request) -> Origin:
    """How the KV of a request's prompt comes to be. Exact KV of one tenant is the same whatever prompt it was computed for;
    where the store has it in a codec that loses something, it is of that codec."""
    plan = request.plan
    codecs = (
        () if request.lossless else sorted({s.codec or request.collection.codec for s in plan.segments if s.cached})
    )
    root = hashlib.blake2b(repr((request.collection.salt, codecs)).encode(), digest_size=16).digest()
    chunks = [(s.key, s.status, s.codec) for s in plan.chunks]
    return Origin(root, plan.exact_until, repr((request.blend, plan.segments[0].status, chunks)).encode())
