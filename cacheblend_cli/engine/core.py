"""EngineCore: the one loop that generates answers. A step schedules, then prefills one slice or decodes one batch."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby

from torch import Tensor

from cacheblend_cli.engine.admission import admitting
from cacheblend_cli.engine.attention import AttentionShares
from cacheblend_cli.engine.block_manager import BlockManager
from cacheblend_cli.engine.checks import Check
from cacheblend_cli.engine.connectors.connector import Connector
from cacheblend_cli.engine.events import EngineStats, Limits, OnEvent, Started, ignore
from cacheblend_cli.engine.memory import DeviceMemory
from cacheblend_cli.engine.output_processor import Emit, OutputProcessor
from cacheblend_cli.engine.pools import lasting_pool
from cacheblend_cli.engine.prefill import PrefillOutput, PrefillReport
from cacheblend_cli.engine.rank_worker import worker_of
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.scheduler import Scheduler
from cacheblend_cli.engine.sequence import RequestState, Sequence, Status, provenance_of
from cacheblend_cli.engine.sequence_output import Generation, SequenceOutput, draw_next
from cacheblend_cli.engine.speeds import Pieces
from cacheblend_cli.engine.worker import DecodeInput, TableInput
from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.block_allocator import Allocation
from cacheblend_cli.kv.pool import bytes_per_token, upload
from cacheblend_cli.kv.prefix_cache import Hit
from cacheblend_cli.kv.source import BadChunk


class EngineCore:
    """Runs requests, a step at a time, in the thread that calls it. emit: is given their events. memory: the pool of a single
    request, None for the lasting one."""

    def __init__(self, runtime: Runtime, limits: Limits, emit: Emit, memory: DeviceMemory | None = None) -> None:
        self._runtime, self._emit = runtime, emit
        watermark = 0.02 if memory is None else 0.0
        memory, decoder = memory or lasting_pool(runtime, limits), runtime.decoder
        self.worker = worker_of(runtime, memory)
        caches = limits.enable_prefix_caching and decoder.rope.switches_at is None  # else KV is that of a length
        windows = [layer.attention.sliding_window for layer in decoder.layers]
        window = None if None in windows else max(w for w in windows if w is not None)
        self.blocks = BlockManager(self.worker, watermark, caches, window)
        size = self.worker.block_size
        self._slice_rows = -(-(limits.max_rows or runtime.slice_rows) // size) * size
        self._measuring = deque[tuple[RequestState, Pieces[None]]]()  # not admitted yet
        self.counts = EngineStats()
        ahead = 1 if decoder.device.type == "cpu" else 0  # on a GPU prompts load one after another
        # Short prompts share a launch where a row does not depend on those beside it.
        joins = decoder.steady and decoder.rope.switches_at is None and runtime.driver is None
        rows, self.block_bytes = self._slice_rows if joins else 0, int(bytes_per_token(decoder) * size)
        swap_blocks = int(runtime.config.swap_space * 2**30 / self.block_bytes)
        self.scheduler = Scheduler(
            self.blocks,
            self.worker,
            limits.max_sequences,
            ahead,
            rows,
            swap_blocks,
            self._begin,
            self._restart,
            self.counts,
        )
        self._states = self.scheduler.states
        self._outputs = OutputProcessor(runtime, self._states, self._queue, self.counts, emit)

    @property
    def busy(self) -> bool:
        return self._outputs.storing or bool(self._measuring) or bool(self._states)

    def arrive(self, state: RequestState) -> None:
        """Queue a request, or fail it at once where it is impossible."""
        admission = admitting(self._runtime, state)
        if state.request.options.auto:  # in a step: this machine may have to be measured first
            self._measuring.append((state, admission))
        else:
            self._admit(state, admission)

    def _admit(self, state: RequestState, admission: Pieces[None]) -> bool:
        """Go on admitting a request. False: it takes another step."""
        try:
            if state.ended is not None:
                self._outputs.end(state, state.ended)
            elif next(admission, state) is None:
                return False
            else:
                self.add(state)
        except Exception as error:
            self._outputs.failed(state, error)
        return True

    def add(self, state: RequestState) -> None:
        """Queue an admitted request. Raises UsageError where it can never fit the pool."""
        self._set_provenance(state)
        headroom = state.max_new_tokens
        if self.blocks.can_allocate(state.num_tokens, headroom, Hit()) is Allocation.NEVER:
            raise UsageError(
                f"the prompt has {state.num_tokens} tokens and the answer up to {headroom}, and the engine holds KV of "
                f"{self.blocks.most_tokens} at most",
                "ask with fewer chunks or a smaller --max-tokens",
            )
        self.scheduler.add(state)

    def _queue(self, state: RequestState) -> None:
        self._set_provenance(state)
        self.scheduler.add(state)

    def step(self) -> None:
        """End requests that were cancelled or are overdue, then do one thing: compute a slice of a prompt, or a token of every
        answer. Missing chunks that are to be stored, and what --ratio auto measures, are computed one launch a step."""
        if self._measuring and self._admit(*self._measuring[0]):
            self._measuring.popleft()
        if self._outputs.storing:
            self._outputs.store_piece()
        started = time.perf_counter()
        for state in [s for s in self._states if s.ended]:
            self._outputs.end(state, state.ended)
        going = self.scheduler.schedule()
        self.counts.scheduling_s += time.perf_counter() - started
        if going and going[0].prefilling:
            self._prefill(going)
        elif going:
            self._decode(going)
        self.counts.step_s += time.perf_counter() - started
        if not self._states:
            self.blocks.check_idle()

    def close(self) -> None:
        """Give all blocks back; no request is answered any more."""
        for state in list(self._states):
            self._outputs.remove(state)
        self.worker.close()

    def _set_provenance(self, state: RequestState) -> None:
        state.provenance = provenance_of(state, self._slice_rows)

    # prefill

    def _begin(self, sequence: Sequence) -> None:
        """Allocate blocks, and begin to load stored KV."""
        state = sequence.state
        self._set_provenance(state)
        hit = state.find(self.blocks)
        sequence.status = Status.RUNNING
        if not state.begun:
            state.begun = True
            self._emit(state, Started())
        try:
            sequence.paged = self.blocks.allocate(state.num_tokens, state.max_new_tokens, hit)
            sequence.load(self.worker, hit.num_tokens, self._slice_rows)
        except BadChunk as bad:
            self._restart(sequence, bad)
        except Exception as error:
            self._outputs.fail(state, error)

    def _restart(self, sequence: Sequence, bad: BadChunk | None = None) -> None:
        sequence.restart(bad)
        self._set_provenance(sequence.state)

    def _prefill(self, sequences: list[Sequence]) -> None:
        """Compute a slice of a prompt, or several short prompts."""
        outputs: list[PrefillOutput | None] = [None] * len(sequences)
        if len(sequences) > 1:
            # After a bad chunk, or with too little memory, each is computed alone, and meets its own error.
            with suppress(Exception):
                outputs = [*self.worker.prefill_together([s.prefill.number for s in sequences if s.prefill])]
                self.counts.joined += len(outputs)
        for sequence, out in zip(sequences, outputs, strict=True):
            if sequence.prefilling:
                self._advance(sequence, out)

    def _advance(self, sequence: Sequence, out: PrefillOutput | None) -> None:
        """Take a step of a prompt, which is computed now unless `out` has it; after the last one, its answers begin."""
        state, prefill, paged = sequence.state, sequence.prefill, sequence.paged
        assert prefill is not None
        assert paged is not None
        try:
            out = out or self.worker.prefill(prefill.number)
            self.blocks.keep(paged, state.request.plan.token_ids[: out.num_filled], state.provenance)
            if isinstance(state, Check) and out.num_filled >= state.num_prompt_tokens and not state.full_ttft_s:
                state.full_ttft_s = out.prefill_s
            if out.result is None:
                return
            logprobs = tuple(state.prompt_logprobs.found) if state.prompt_logprobs else ()
            hit = prefill.hit_tokens
            done = PrefillReport(state.request, out.result, out.loader, out.prefill_s, hit, logprobs)
            sequence.stop_prefill()
            if isinstance(state, Check):
                self._checked(sequence, state)
            elif sequence.output is not None:
                sequence.prefilled_again()
            else:
                self._answers_begin(sequence, done)
        except BadChunk as bad:
            self._restart(sequence, bad)
        except Exception as error:
            self._outputs.fail(state, error)

    def _answers_begin(self, first: Sequence, done: PrefillReport) -> None:
        """Draw the first token of each answer; they share the prompt's blocks."""
        state = first.state
        plan = state.request.plan.with_prefix_cache(done.prefix_cache_tokens)
        assert first.paged is not None
        state.done = done
        self.counts.computed += plan.fresh_tokens
        self.counts.reused += plan.exact_tokens + plan.inexact_tokens
        self.counts.repaired += len(done.result.chosen)
        self.counts.prefix_cached += done.prefix_cache_tokens
        self.counts.stall_s += done.loader.stall_s
        if state.request.connector is not None:
            self._hand_over(first, state.request.connector)
            return
        begun = state.num_started
        state.num_started += self.scheduler.wave(state.num_answers - begun)
        wave = [
            first,
            *(Sequence(state, i, Status.RUNNING, first.paged.fork()) for i in range(begun + 1, state.num_started)),
        ]
        state.sequences += wave[1:]
        for sequence in wave:
            self._begin_output(sequence)
            sequence.kv_len = state.num_tokens
        outputs = [s.output for s in wave if s.output is not None]
        draws = draw_next(outputs, done.logits.expand(len(outputs), -1))
        self._outputs.sampled(list(zip(wave, draws, strict=True)))

    def _begin_output(self, sequence: Sequence) -> None:
        """Begin its answer."""
        state, sampling = sequence.state, sequence.state.request.sampling
        params = replace(sampling, seed=None if sampling.seed is None else sampling.seed + sequence.index)
        on_event: OnEvent = partial(self._emit, state) if state.streams else ignore
        if state.num_answers > sampling.n:
            params = replace(params, logprobs=sampling.logprobs or 0)
        see = state.checks.see if state.checks is not None and sequence.index == 0 else None
        sequence.output = SequenceOutput(
            self._runtime, params, state.request.plan.token_ids, on_event, sequence.index, see
        )
        sequence.watch = AttentionShares(state.request.plan)

    def _checked(self, sequence: Sequence, check: Check) -> None:
        """A check's full prefill is done: decode what is left of the answer, or end the check."""
        if (output := check.continues) is None:
            sequence.finish()
            self._outputs.check_ended(check)
        else:
            sequence.output, sequence.kv_len = output, check.num_prompt_tokens + len(output.out.token_ids) - 1

    def _hand_over(self, sequence: Sequence, connector: Connector) -> None:
        """Give the prompt's KV to the connector, and end the request with an answer of no tokens."""
        state = sequence.state
        assert sequence.paged is not None
        kv = self.worker.export_kv(TableInput.of(sequence.paged), state.num_tokens)
        connector.hand_over(state.request.plan.token_ids, kv)
        sequence.generation = Generation(finish_reason="handed_over", first_token_at=time.perf_counter())
        sequence.finish()
        self._outputs.end(state)

    # decode

    def _decode(self, sequences: list[Sequence]) -> None:
        """A token for each: those whose RoPE has the same frequencies go together, unless rows are not steady. Those that another
        engine decodes go together there."""
        decoder = self._runtime.decoder
        try:
            elsewhere = [s for s in sequences if self._decodes_elsewhere(s)]
            own = [s for s in sequences if s.handed is None]
            self._decode_elsewhere(elsewhere)
            for _, group in groupby(own, key=lambda s: decoder.rope.regime(s.kv_len + 1) if decoder.steady else s):
                self._decode_together(list(group))
        except Exception as error:
            for state in {s.state for s in sequences if s.status is not Status.FINISHED}:
                self._outputs.fail(state, error)

    def _decode_together(self, sequences: list[Sequence]) -> None:
        parts = [(s, s.paged, s.output) for s in sequences if s.paged is not None and s.output is not None]
        for sequence, paged, _ in parts:
            paged.ensure(sequence.kv_len + 1)
            paged.make_writable(sequence.kv_len, sequence.kv_len + 1)
        given = DecodeInput(
            tuple(s.next_token for s, _, _ in parts),
            tuple(s.kv_len for s, _, _ in parts),
            tuple(TableInput.of(paged) for _, paged, _ in parts),
            tuple(s.watch is not None and not s.replay and s.watch.is_due() for s, _, _ in parts),
        )
        out = self.worker.decode(given)
        for (sequence, _, _), attention in zip(parts, out.attention, strict=True):
            if attention is not None and sequence.watch is not None:
                sequence.watch.add(attention)
        self._draw([(s, output) for s, _, output in parts], out.logits)
        for sequence in sequences:
            self._give_back(sequence)

    def _decodes_elsewhere(self, sequence: Sequence) -> bool:
        """Return whether another engine decodes the sequence, which is given its KV before the first token there."""
        if self._runtime.decode_with.file is None:
            return False
        from cacheblend_cli.engine.connectors.llama_choice import hand_over

        return hand_over(self._runtime, self.worker, sequence)

    def _decode_elsewhere(self, sequences: list[Sequence]) -> None:
        parts = [(s, s.handed, s.output) for s in sequences if s.handed is not None and s.output is not None]
        if parts:
            logits = parts[0][1].engine.decode([handed for _, handed, _ in parts], [s.next_token for s, _, _ in parts])
            self._draw([(s, output) for s, _, output in parts], logits.to(self._runtime.decoder.device))

    def _draw(self, parts: list[tuple[Sequence, SequenceOutput]], logits: Tensor) -> None:
        """Draw the next tokens from logits, fp32 [num_seqs, vocab_size], except where tokens are computed again."""
        going = [index for index, (sequence, _) in enumerate(parts) if not sequence.replay]
        for sequence, _ in parts:
            sequence.kv_len += 1
            sequence.replay = max(0, sequence.replay - 1)
        if len(going) < len(parts):
            parts, logits = [parts[i] for i in going], logits[upload(going, logits.device)]
        if going:
            draws = draw_next([output for _, output in parts], logits)
            self._outputs.sampled([(s, draw) for (s, _), draw in zip(parts, draws, strict=True)])

    def _give_back(self, sequence: Sequence) -> None:
        """Free blocks that have left the window of every layer."""
        paged, unseen = sequence.paged, self.blocks.num_unseen(sequence.kv_len)
        if paged is not None and unseen > paged.gone:
            paged.give_back(unseen)
