"""Execution of a step: gives the worker its input and collects the results, which `output_processor.py` takes. Of a
request it changes only the blocks, which grow by the tokens to decode, and what its hooks take of the prompt."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from math import inf
from time import perf_counter

from torch import Tensor

from cacheblend_cli.blend.prefill import PrefillResult
from cacheblend_cli.engine.core.scheduler import Step
from cacheblend_cli.engine.core.sequence import Drafts, Sequence
from cacheblend_cli.engine.worker.prefill import PrefillInput
from cacheblend_cli.engine.worker.sampling import tokens_of
from cacheblend_cli.engine.worker.worker import DecodeInput, DecodeOutput, TableInput, Worker
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.linear import STEADY_ROWS

logger = logging.getLogger("cacheblend")


@dataclass(frozen=True)
class Decoded:
    """One decoded token for each of several sequences, and their proposals."""

    rows: dict[Sequence, int]  # of each sequence's newest token; its proposals follow
    output: DecodeOutput
    drafts: Drafts


@dataclass
class StepOutput:
    """Results and failures of a step."""

    prefilled: list[tuple[Sequence, PrefillResult]] = field(default_factory=list)
    decoded: list[Decoded] = field(default_factory=list)
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)
    joined: int = 0  # short prompts that shared a launch
    split: int = 0  # launches of several prompts that failed


class Executor:
    """Runs steps on a worker. slice_rows: positions per slice of a prompt."""

    def __init__(self, decoder: Decoder, worker: Worker, slice_rows: int) -> None:
        self._decoder, self._worker, self._slice_rows = decoder, worker, slice_rows

    def run(self, step: Step) -> StepOutput:
        output = StepOutput()
        for swap in step.swaps:
            (self._worker.swap_out if swap.out else self._worker.swap_in)(swap.number, swap.blocks)
        on_gpu = self._decoder.device.type == "cuda"  # it gets its work before prompts are set up that load ahead
        ahead = [s for s in step.begin if on_gpu and s not in step.prefill]
        self._begin_all([s for s in step.begin if s not in ahead], output)
        failed = [sequence for sequence, _ in output.failed]
        self._prefill([s for s in step.prefill if s not in failed], step, output)
        self._decode(step, output)
        self._begin_all(ahead, output)
        return output

    def _begin_all(self, sequences: list[Sequence], output: StepOutput) -> None:
        for sequence in sequences:
            try:
                self._begin(sequence)
            except Exception as error:
                output.failed.append((sequence, error))

    def _begin(self, sequence: Sequence) -> None:
        """Begin to load a prompt's stored KV. Raises BadChunk."""
        state, prefill = sequence.state, sequence.prefill
        assert sequence.paged is not None
        assert prefill is not None
        request, hit, takers = state.request, prefill.hit_tokens, [h for h in state.hooks if h.outputs_from is not None]
        plan = request.plan.with_prefix_cache(hit) if hit else request.plan
        blocks = tuple(sequence.paged.blocks)
        how = request.blend, request.lossless, self._slice_rows, state.outputs_from
        given = PrefillInput(prefill.number, plan, blocks, *how)

        def on_logits(logits: Tensor) -> None:
            for hook in takers:
                hook.on_prompt_logits(logits)

        for hook in state.hooks:
            hook.on_begin()
        self._worker.begin(given, request.source, on_logits)

    def _prefill(self, sequences: list[Sequence], step: Step, output: StepOutput) -> None:
        """Compute layers of a prompt, or of several short prompts."""
        numbers = [(s, s.prefill.number) for s in sequences if s.prefill is not None]
        seconds, waits = step.prefill_s, step.waits or not self._decoder.part.is_whole  # KV arrives at ranks unevenly
        if len(numbers) > 1:
            try:
                results = self._advance([number for _, number in numbers], seconds, waits)
                output.prefilled = list(zip(sequences, results, strict=True))
                output.joined = sum(result.is_done for result in results)
                return
            except Exception as error:  # each is computed alone and at once, so that only the cause fails
                output.split, seconds, waits = 1, inf, True
                logger.warning("%d prompts of one launch are computed alone: %r", len(numbers), error)
        for sequence, number in numbers:
            try:
                output.prefilled += [(sequence, result) for result in self._advance([number], seconds, waits)]
            except Exception as error:
                output.failed.append((sequence, error))

    def _advance(self, numbers: list[int], seconds: float, waits: bool) -> list[PrefillResult]:
        """Compute the layers that cost about one slice; within limited seconds, as many as fit, at least one. waits:
        whether for stored KV, see `Worker.prefill`."""
        if seconds == inf:
            return self._worker.prefill(numbers, self._slice_rows * len(self._decoder.layers), waits)
        now = perf_counter()
        until = now + seconds
        while True:
            results, before = self._worker.prefill(numbers, 1, waits), now
            now = perf_counter()
            if not results or not results[0].is_paused or 2 * now - before > until:  # the next layer takes as long
                return results

    def _decode(self, step: Step, output: StepOutput) -> None:
        """Decode one token of each sequence, and its proposals. A failed batch does not affect others."""
        for batch in self._batches(step.decode):
            try:
                out = self._decode_batch(batch, step)
            except Exception as error:
                output.failed += [(sequence, error) for sequence in batch]
                continue
            if len(batch) < len(step.decode):  # the next batch's step overwrites the logits
                out = replace(out, logits=out.logits.clone())
            ends = accumulate((1 + len(step.drafts.get(s, ())) for s in batch), initial=0)
            output.decoded.append(Decoded(dict(zip(batch, ends, strict=False)), out, step.drafts))

    def _batches(self, sequences: list[Sequence]) -> list[list[Sequence]]:
        """Split at other RoPE frequencies; where torch multiplies on a CPU, into batches of the rows that a single
        sequence is padded to; one by one if rows are not steady."""
        rope, steady = self._decoder.rope, self._decoder.steady
        groups = [list(g) for _, g in groupby(sequences, key=lambda s: rope.regime(s.kv_len + 1) if steady else s)]
        if not self._decoder.multiplies_by_torch:
            return groups
        return [group[i : i + STEADY_ROWS] for group in groups for i in range(0, len(group), STEADY_ROWS)]

    def _decode_batch(self, sequences: list[Sequence], step: Step) -> DecodeOutput:
        """A proposal is a row like that of another sequence, with the same blocks: a layer writes K and V of all rows
        before attention, and a row sees the positions up to its own."""
        token_ids, kv_lens, tables, watched = list[int](), list[int](), list[TableInput](), list[bool]()
        pending = [step.pending[s] for s in sequences] if step.pending else []  # tokens that are only on the device
        for sequence in sequences:
            paged, draft, kv_len = sequence.paged, step.drafts.get(sequence, ()), sequence.kv_len
            assert paged is not None
            num_rows = 1 + len(draft)
            paged.ensure(kv_len + num_rows)
            paged.make_writable(kv_len, kv_len + num_rows)
            token_ids += () if pending else (sequence.next_token, *draft)
            kv_lens += range(kv_len, kv_len + num_rows)
            tables += [TableInput.of(paged)] * num_rows
            watched += [sequence.watches(place) for place in range(kv_len, kv_len + num_rows)]
        given = DecodeInput(tuple(token_ids), tuple(kv_lens), tuple(tables), tuple(watched))
        return self._worker.decode(given, *([tokens_of(pending)] if pending else []))
