"""Execution of a step: gives the worker plain data and collects its results. Changes no request."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from torch import Tensor

from cacheblend_cli.engine.core.scheduler import Step
from cacheblend_cli.engine.core.sequence import Sequence
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.prefill import PrefillInput, PrefillOutput
from cacheblend_cli.engine.worker.sampling import Draw, tokens_of
from cacheblend_cli.engine.worker.worker import DecodeInput, DecodeOutput, TableInput, Worker


logger = logging.getLogger("cacheblend")


@dataclass(frozen=True)
class Decoded:
    """One decoded token for each of several sequences."""

    sequences: list[Sequence]
    logits: Tensor  # fp32 [num_seqs, vocab_size], after the token
    attention: list[Tensor | None]  # one per sequence, as in DecodeOutput


@dataclass
class StepOutput:
    """Results and failures of a step."""

    prefilled: list[tuple[Sequence, PrefillOutput]] = field(default_factory=list)
    decoded: list[Decoded] = field(default_factory=list)
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)
    joined: int = 0  # short prompts that shared a launch
    split: int = 0  # launches of several prompts that failed


class Executor:
    """Runs steps on a worker. slice_rows: positions per slice of a prompt."""

    def __init__(self, runtime: Runtime, worker: Worker, slice_rows: int) -> None:
        self._runtime, self._worker, self._slice_rows = runtime, worker, slice_rows

    def run(self, step: Step) -> StepOutput:
        output = StepOutput()
        for swap in step.swaps:
            (self._worker.swap_out if swap.out else self._worker.swap_in)(swap.number, swap.blocks)
        for sequence in step.begin:
            try:
                self._begin(sequence)
            except Exception as error:
                output.failed.append((sequence, error))
        failed = [sequence for sequence, _ in output.failed]
        self._prefill([s for s in step.prefill if s not in failed], output)
        self._decode(step, output)
        return output

    def _begin(self, sequence: Sequence) -> None:
        """Begin to load a prompt's stored KV. Raises BadChunk."""
        state, prefill = sequence.state, sequence.prefill
        assert sequence.paged is not None
        assert prefill is not None
        request, hit = state.request, prefill.hit_tokens
        plan = request.plan.with_prefix_cache(hit) if hit else request.plan
        outputs_from, prefill.sink = state.outputs() or (None, None)
        blocks = tuple(sequence.paged.blocks)
        given = PrefillInput(
            prefill.number, plan, blocks, request.blend, request.lossless, self._slice_rows, outputs_from
        )
        self._worker.begin(given, request.source, prefill.sink or (lambda logits: None))

    def _prefill(self, sequences: list[Sequence], output: StepOutput) -> None:
        """Compute a slice of a prompt, or several short prompts."""
        numbers = [(s, s.prefill.number) for s in sequences if s.prefill is not None]
        if len(numbers) > 1:
            try:
                outputs = self._worker.prefill([number for _, number in numbers])
                output.prefilled, output.joined = list(zip(sequences, outputs, strict=True)), len(outputs)
                return
            except Exception as error:  # each is computed alone, so that only the cause fails
                output.split = 1
                logger.warning("%d prompts of one launch are computed alone: %r", len(numbers), error)
        for sequence, number in numbers:
            try:
                output.prefilled += [(sequence, out) for out in self._worker.prefill([number])]
            except Exception as error:
                output.failed.append((sequence, error))

    def _decode(self, step: Step, output: StepOutput) -> None:
        """Decode one token of each, in batches with the same RoPE frequencies; one by one if rows are not steady. Those
        that another engine decodes are a batch there."""
        decoder, sequences = self._runtime.decoder, step.decode
        try:
            elsewhere = [s for s in sequences if self._decodes_elsewhere(s)]
            own = [s for s in sequences if s.handed is None]
            groups = groupby(own, key=lambda s: decoder.rope.regime(s.kv_len + 1) if decoder.steady else s)
            for group in [list(group) for _, group in groups]:
                out = self._decode_together(group, step.pending)
                # the next group's step overwrites the logits
                logits = out.logits if len(group) == len(sequences) else out.logits.clone()
                output.decoded.append(Decoded(group, logits, out.attention))
            if elsewhere:
                output.decoded.append(Decoded(elsewhere, self._decode_elsewhere(elsewhere), [None] * len(elsewhere)))
        except Exception as error:
            done = [s for decoded in output.decoded for s in decoded.sequences]
            output.failed += [(s, error) for s in sequences if s not in done]

    def _decode_together(self, sequences: list[Sequence], pending: Mapping[Sequence, Draw]) -> DecodeOutput:
        parts = [(s, s.paged, s.output) for s in sequences if s.paged is not None and s.output is not None]
        for sequence, paged, _ in parts:
            paged.ensure(sequence.kv_len + 1)
            paged.make_writable(sequence.kv_len, sequence.kv_len + 1)
        given = DecodeInput(
            () if pending else tuple(s.next_token for s, _, _ in parts),
            tuple(s.kv_len for s, _, _ in parts),
            tuple(TableInput.of(paged) for _, paged, _ in parts),
            tuple(o.watch is not None and not s.replay and o.watch.is_due() for s, _, o in parts),
        )
        if pending:
            return self._worker.decode(given, tokens_of([pending[s] for s, _, _ in parts]))
        return self._worker.decode(given)

    def _decodes_elsewhere(self, sequence: Sequence) -> bool:
        """Return whether another engine decodes the sequence. Hands its KV over before the first token there."""
        if self._runtime.decode_with.file is None:
            return False
        from cacheblend_cli.engine.connectors.llama_choice import hand_over

        return hand_over(self._runtime, self._worker, sequence)

    def _decode_elsewhere(self, sequences: Iterable[Sequence]) -> Tensor:
        parts = [(s.handed, s.next_token) for s in sequences if s.handed is not None]
        llama = parts[0][0].engine
        logits = llama.decode([handed for handed, _ in parts], [token for _, token in parts])
        return logits.to(self._runtime.decoder.device)
