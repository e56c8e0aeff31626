"""Execution of a step: gives the worker and the decoders their input and collects the results. Changes only the place
of a request's KV; `output_processor.py` does the rest."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from itertools import accumulate

from torch import Tensor

from cacheblend_cli.engine.core.decoders import DecodeBackend, OwnDecoder
from cacheblend_cli.engine.core.scheduler import Step
from cacheblend_cli.engine.core.sequence import Sequence
from cacheblend_cli.engine.core.speculation import Drafts
from cacheblend_cli.engine.worker.prefill import PrefillInput, PrefillOutput
from cacheblend_cli.engine.worker.worker import DecodeOutput, Worker
from cacheblend_cli.model.decoder import Decoder

logger = logging.getLogger("cacheblend")


@dataclass(frozen=True)
class Decoded:
    """One decoded token for each of several sequences, and their proposals."""

    sequences: list[Sequence]
    output: DecodeOutput
    drafts: Drafts

    @property
    def first_rows(self) -> list[int]:
        """The row of each sequence's newest token; its proposals follow."""
        ends = accumulate(1 + len(self.drafts.get(s, ())) for s in self.sequences)
        return [0, *ends][: len(self.sequences)]


@dataclass
class StepOutput:
    """Results and failures of a step."""

    prefilled: list[tuple[Sequence, PrefillOutput]] = field(default_factory=list)
    decoded: list[Decoded] = field(default_factory=list)
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)
    joined: int = 0  # short prompts that shared a launch
    split: int = 0  # launches of several prompts that failed


class Executor:
    """Runs steps on a worker. slice_rows: positions per slice of a prompt. others: decoders beside the worker."""

    def __init__(self, decoder: Decoder, worker: Worker, slice_rows: int, others: Several[DecodeBackend]) -> None:
        self._worker, self._slice_rows = worker, slice_rows
        self._own, self._others = OwnDecoder(decoder, worker), others

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
        """Decode one token of each sequence, and its proposals, in the batches of its decoder. A failed batch does not
        affect others."""
        decoding: dict[DecodeBackend, list[Sequence]] = {self._own: []}  # the own one first
        for sequence in step.decode:
            try:
                # its KV is handed over to another decoder before the first token there
                others = () if sequence.state.decodes_here else self._others
                backend = next((other for other in others if other.takes(sequence, self._worker)), self._own)
                decoding.setdefault(backend, []).append(sequence)
            except Exception as error:
                output.failed.append((sequence, error))
        for backend, sequences in decoding.items():
            try:
                batches = backend.batches(sequences)
            except Exception as error:
                output.failed += [(sequence, error) for sequence in sequences]
                continue
            for batch in batches:
                try:
                    out = backend.decode(batch, step.pending, step.drafts)
                except Exception as error:
                    output.failed += [(sequence, error) for sequence in batch]
                    continue
                if len(batch) < len(step.decode):  # the next batch's step overwrites the logits
                    out = replace(out, logits=out.logits.clone())
                output.decoded.append(Decoded(batch, out, step.drafts))
