"""One step of an engine that answers many questions at once: schedule, load, prefill or decode, sample, emit."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import groupby

from cacheblend_store import ChunkStore
from torch import Tensor

from cacheblend_cli.engine.ask import as_run
from cacheblend_cli.engine.attention import AttentionShares, Watch
from cacheblend_cli.engine.block_manager import BlockManager, Found
from cacheblend_cli.engine.decode import EagerRunner
from cacheblend_cli.engine.gate import Gate, in_full
from cacheblend_cli.engine.generate import NOBODY, SequenceOutput
from cacheblend_cli.engine.jobs import EngineStats, Limits, Started, Ticket
from cacheblend_cli.engine.memory import lasting_pool
from cacheblend_cli.engine.output_processor import OutputProcessor, Tell, listener
from cacheblend_cli.engine.prefill import Prefilled, PrefillState
from cacheblend_cli.engine.refine import Refiner
from cacheblend_cli.engine.request import resolve
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.scheduler import Scheduler
from cacheblend_cli.engine.sequence import Run, Sequence, Status
from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.block_allocator import Allocation
from cacheblend_cli.kv.pool import upload
from cacheblend_cli.kv.prefix_cache import Hit
from cacheblend_cli.kv.source import BadChunk


class EngineCore:
    """Runs jobs, a step at a time, in the thread that calls it. tell: given the events of a job."""

    def __init__(self, runtime: Runtime, store: ChunkStore | None, limits: Limits, tell: Tell) -> None:
        self._runtime, self._store, self._limits, self._tell = runtime, store, limits, tell
        memory, decoder = lasting_pool(runtime, limits), runtime.decoder
        self._runner = memory.runner
        hot = limits.hot and decoder.rope.switches_at is None  # else KV is that of a length
        windows = [layer.attention.sliding_window for layer in decoder.layers]
        window = None if None in windows else max(w for w in windows if w is not None)
        self.blocks = BlockManager(memory.pool, hot=hot, reuse_repaired=limits.reuse_repaired, window=window)
        self.counts = EngineStats()
        ahead = 1 if decoder.device.type == "cpu" else 0  # on a GPU prompts load one after another
        self.scheduler = Scheduler(self.blocks, limits.max_sequences, ahead, self._begin, self.counts)
        self._runs = self.scheduler.runs
        self.refiner = Refiner(runtime, self.blocks, limits.max_rows) if limits.refine and hot else None
        if limits.refine and not hot:
            runtime.say("--refine does nothing here: KV stays in the pool for nobody")
        self._ends = OutputProcessor(runtime, self.blocks, self._runs, self.counts, self.refiner, tell)

    @property
    def busy(self) -> bool:
        return bool(self._runs) or self._ends.storing

    @property
    def may_refine(self) -> bool:
        """Whether there is something to do though nobody asks."""
        return not self.busy and bool(self.refiner)

    def arrive(self, ticket: Ticket) -> None:
        """A job joins those that wait, or fails at once: when it makes no sense, or can never fit."""
        try:
            self.scheduler.add(self._run_of(ticket))
        except Exception as error:
            self._ends.failed(ticket, error)

    def _run_of(self, ticket: Ticket) -> Run:
        runtime, job = self._runtime, ticket.job
        request = job.request or resolve(runtime, self._store, job.question)
        room = runtime.room(request.sampling)
        runtime.check_length(request.plan.num_tokens, room)
        request, report = as_run(runtime, request, job)
        request.blend.policy(runtime.model.spec.num_layers, request.lossless)
        run = Run(ticket, request, report, room, Gate.of(request))
        if self.blocks.can_allocate(run.num_tokens, room, Found(Hit(), run.origin)) is Allocation.NEVER:
            raise UsageError(
                f"the prompt has {run.num_tokens} tokens and the answer up to {room}, and the engine holds KV of "
                f"{self.blocks.most_tokens} at most",
                "ask with fewer chunks or a smaller --max-tokens",
            )
        if run.gate is not None and run.num_answers > 1:
            raise UsageError("the risk is of one answer", "ask for one answer, or without max_risk")
        return run

    def step(self) -> None:
        """Do the next thing. Jobs that were cancelled, or whose deadline has passed, end first. Chunks to store are computed
        one launch a step. Without any of these, refine a piece."""
        if self._ends.storing:
            self._ends.store_piece()
        elif self.refiner and not self._runs:
            self.counts.refined += self.refiner.piece()
            self.blocks.check_idle()
            return
        started = time.perf_counter()
        for run in [r for r in self._runs if r.ticket.ended]:
            self._ends.end(run, run.ticket.ended)
        going = self.scheduler.schedule()
        self.counts.scheduling_s += time.perf_counter() - started
        if going and going[0].prefilling:
            self._prefill(going[0])
        elif going:
            self._decode(going)
        self.counts.step_s += time.perf_counter() - started
        if not self._runs:
            self.blocks.check_idle()

    # prefill

    def _begin(self, sequence: Sequence) -> None:
        """Blocks, and its KV begins to load."""
        run = sequence.run
        found = run.find(self.blocks)
        hot, run.origin = found.hit.num_tokens, found.origin
        sequence.status = Status.RUNNING
        if not run.ticket.begun:
            run.ticket.begun = True
            self._tell(run.ticket, Started())
        try:
            sequence.paged = self.blocks.allocate(run.num_tokens + run.drafted, run.room - run.drafted, found.hit)
            run.prefilling = PrefillState(self._runtime, run.request, sequence.paged, hot, run.origin.is_exact)
            run.prefilling.__enter__()
        except BadChunk as bad:
            run.start_again(bad)
        except Exception as error:
            self._ends.fail(run, error)

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
            run.start_again(bad)
        except Exception as error:
            self._ends.fail(run, error)

    def _answers_begin(self, run: Run, done: Prefilled) -> None:
        """The first token of each; they share the prompt's blocks."""
        first, plan = run.sequences[-1], run.request.plan.with_hot(done.hot_tokens)
        assert first.paged is not None
        run.done = done
        if done.hot_tokens > run.origin.exact_until:
            run.request.notes.append(
                "the chunks' KV is reused as it was repaired for another question (--reuse-repaired)"
            )
        self.counts.computed += plan.fresh_tokens
        self.counts.reused += plan.exact_tokens + plan.inexact_tokens
        self.counts.repaired += len(done.result.chosen)
        self.counts.hot += done.hot_tokens
        self.counts.stall_s += done.loader.stall_s
        self.blocks.keep(first.paged, plan.token_ids, run.origin)
        if run.ticket.job.verify and run.first_logits is None:
            run.first_logits = done.logits.clone()
        begun, run.num_started = (
            run.num_started,
            run.num_started + self.scheduler.wave(run.num_answers - run.num_started),
        )
        wave = [first]
        for index in range(begun + 1, run.num_started):
            wave.append(Sequence(run, index, Status.RUNNING, first.paged.fork()))
        run.sequences += wave[1:]
        sampling = run.request.sampling
        for index, sequence in enumerate(wave, begun):
            params = replace(sampling, seed=None if sampling.seed is None else sampling.seed + index)
            hears = listener(self._tell, run.ticket, index)
            if run.num_answers > sampling.n:  # nobody hears them before the best are chosen, by their log-probabilities
                params, hears = replace(params, logprobs=sampling.logprobs or 0), NOBODY
            sequence.utterance = SequenceOutput(self._runtime, params, plan.token_ids, hears)
            sequence.kv_len = run.num_tokens
            sequence.watch = AttentionShares(self._runtime.decoder, run.request.plan)
        logits = done.logits if run.gate is None else self._gated(first, done.logits)
        drawn = [(s, s.utterance, s.utterance.draw(logits)) for s in wave if s.utterance is not None]
        for sequence, utterance, draw in drawn:
            if not utterance.hear(draw):
                self._ends.finish(sequence)

    # decode

    def _decode(self, sequences: list[Sequence]) -> None:
        """A token for each: those whose RoPE has the same frequencies go together, unless rows are not steady."""
        decoder = self._runtime.decoder
        try:
            for _, group in groupby(
                sequences, key=lambda s: decoder.rope.regime(s.kv_len + 1) if decoder.steady else s
            ):
                self._decode_together(list(group))
        except Exception as error:
            for run in [s.run for s in sequences if s.status is not Status.FINISHED]:
                self._ends.fail(run, error)

    def _decode_together(self, sequences: list[Sequence]) -> None:
        parts = [(s, s.paged, s.utterance) for s in sequences if s.paged is not None and s.utterance is not None]
        tokens = upload([u.out.token_ids[-1] for _, _, u in parts], self._runtime.decoder.device)
        self._runner.begin([p for _, p, _ in parts], [s.kv_len for s, _, _ in parts], 1)
        if isinstance(self._runner, EagerRunner):
            self._runner.observer = Watch([(s.watch, p) for s, p, _ in parts])
        logits = self._runner.step(tokens)
        drawn = []
        for (sequence, _, utterance), row in zip(parts, logits, strict=True):
            try:
                drawn.append((sequence, utterance, utterance.draw(self._gated(sequence, row))))
            except Exception as error:  # in its full prefill: the others go on
                self._ends.fail(sequence.run, error)
        for sequence, utterance, draw in drawn:
            sequence.kv_len += 1
            if utterance.hear(draw):
                self._give_back(sequence)
                continue
            try:
                self._ends.finish(sequence)
            except Exception as error:  # in what is done once it is complete: the others go on
                self._ends.fail(sequence.run, error)

    def _gated(self, sequence: Sequence, logits: Tensor) -> Tensor:
        """What the next token is drawn from. Where that is a full prefill's logits, its KV comes back as what was swapped out
        does, into blocks of its own: others may share those of before."""
        run, gate, utterance = sequence.run, sequence.run.gate, sequence.utterance
        exact = run.origin.exact_until >= run.num_tokens  # a full prefill has gone on here, or was found hot
        if gate is None or exact or not gate.too_risky(logits):
            return logits
        assert run.done is not None
        assert utterance is not None
        start = time.perf_counter()
        full, logits = in_full(self._runtime, run.done, utterance.out.token_ids)
        sequence.release()
        sequence.paged = full
        sequence.swap_out()
        run.origin = run.origin.in_full
        gate.found = replace(gate.found, seconds=time.perf_counter() - start)
        return logits

    def _give_back(self, sequence: Sequence) -> None:
        """Blocks that have left the window of every layer, unless the prompt's are looked at again to verify it."""
        run, paged, unseen = sequence.run, sequence.paged, self.blocks.num_unseen(sequence.kv_len)
        if paged is not None and unseen > paged.gone and run.first_logits is None:
            self.blocks.keep(paged, sequence.token_ids[: sequence.kv_len], run.origin)
            paged.give_back(unseen)
