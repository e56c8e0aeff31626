"""Processing of a step's results: begins the answers of computed prompts, and draws tokens.

With async scheduling, tokens drawn in a decode step are pending until the next step is queued. Only then does the host
wait for them, append them, and end answers; results of the next step for an ended answer are dropped. An error in one
answer ends only its request.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from cacheblend_cli.blend.prefill import PrefillResult
from cacheblend_cli.engine.core.executor import Decoded, StepOutput
from cacheblend_cli.engine.core.finisher import Finisher
from cacheblend_cli.engine.core.report import PrefillReport
from cacheblend_cli.engine.core.scheduler import Scheduler, Step
from cacheblend_cli.engine.core.sequence import RequestState, Sequence, SequenceStatus
from cacheblend_cli.engine.core.sequence_output import SequenceOutput, draw_next
from cacheblend_cli.engine.events import EngineStats, ignore
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.sampling import Draw
from cacheblend_cli.engine.worker.worker import TableInput
from cacheblend_cli.kv.pool import upload
from cacheblend_cli.kv.source import BadChunk


class OutputProcessor:
    """Takes the results of each step: computed layers of prompts, and tokens. is_async: with async scheduling."""

    def __init__(
        self, runtime: Runtime, scheduler: Scheduler, finisher: Finisher, counts: EngineStats, is_async: bool
    ) -> None:
        self._runtime, self._scheduler, self._blocks = runtime, scheduler, scheduler.blocks
        self._finisher, self._counts, self._is_async = finisher, counts, is_async
        self.pending: dict[Sequence, Draw] = {}  # tokens that are drawn, and not appended yet

    def process(self, step: Step, output: StepOutput) -> None:
        """Process a step's results."""
        self._finisher.conclude_next()
        self._finisher.end_reviews()
        for state in step.end:
            self._finisher.end_early(state)
        for sequence in step.begin:
            if not sequence.state.begun:
                sequence.state.begun = True
                self._finisher.emit_progress(sequence.state, 0)
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
                self._finisher.fail(sequence.state, error)
        for sequence, result in output.prefilled:
            self._take_slice(sequence, result)
        self._counts.joined += output.joined
        self._counts.split += output.split

    def flush(self) -> None:
        """Append the tokens that are drawn already."""
        pending, self.pending = self.pending, {}
        self.append(pending)

    # prompts

    def _take_slice(self, sequence: Sequence, result: PrefillResult) -> None:
        """Handle computed layers of a prompt. After the last ones its answers begin."""
        state, prefill = sequence.state, sequence.prefill
        if sequence.paged is None or prefill is None:  # its request failed
            return
        assert state.provenance is not None
        try:
            self._blocks.keep(sequence.paged, state.request.plan.token_ids[: result.num_filled], state.provenance)
            for hook in state.hooks:
                hook.on_slice(result)
            self._finisher.emit_progress(state, result.num_filled)
            if result.is_done:
                done = PrefillReport(state.request, result, prefill.hit_tokens)
                sequence.stop_prefill()
                self._begin_or_resume(sequence, done)
        except Exception as error:
            self._finisher.fail(state, error)

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
            self._finisher.finish(sequence)
        elif begun is not None or state.done is not done:
            assert sequence.output is not None
            # tokens whose KV is not the prompt's are computed again, one per step as before, to get the same bits
            num_tokens = state.num_prompt_tokens + len(sequence.output.out.token_ids) - 1
            sequence.kv_len = min(state.num_tokens, num_tokens)
            sequence.replay = num_tokens - sequence.kv_len
        if state.done is done:
            # waits for the load, so not before the first token is known
            self._counts.stall_s += done.result.loader.stall_s

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
        on_event = partial(self._finisher.emit, state) if state.streams else ignore
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
        if self._is_async and not self._finisher.concluding:  # no token waits for a launch of a hook
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
            self._finisher.fail(sequence.state, error)

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
                    self._finisher.finish(sequence)
            except Exception as error:
                self._finisher.fail(sequence.state, error)


def _has_drawn(sequence: Sequence, token_id: int) -> bool:
    """Return whether the answer continues with this token."""
    assert sequence.output is not None
    return sequence.status is not SequenceStatus.FINISHED and sequence.output.out.token_ids[-1] == token_id
