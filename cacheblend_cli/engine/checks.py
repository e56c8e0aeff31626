"""Requests that the engine makes itself: full prefills that verify or confirm an answer.

They are scheduled like any other, in slices and batches, and end with the request they belong to.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import replace

from torch import Tensor

from cacheblend_cli.engine.fidelity import Divergence, divergence, log_distribution
from cacheblend_cli.engine.prefill import PrefillReport
from cacheblend_cli.engine.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.sampling import Draw
from cacheblend_cli.engine.sequence import Outputs, RequestState, Sequence, Snapshot, Status
from cacheblend_cli.engine.sequence_output import Generation, SequenceOutput
from cacheblend_cli.types import Confirmation, SamplingParams, Verification


def seeded(request: Request) -> Request:
    """The request with a seed where tokens are drawn at random, so that they can be drawn again."""
    sampling = request.sampling
    if sampling.temperature == 0 or sampling.seed is not None:
        return request
    return replace(request, sampling=replace(sampling, seed=secrets.randbits(32)))


class InternalRequest(RequestState, ABC):
    """A full prefill of a parent's prompt, and what follows it."""

    def __init__(self, runtime: Runtime, parent: RequestState, request: Request, max_new_tokens: int) -> None:
        super().__init__(request, lambda event: None, parent.number, parent)
        self.runtime, self.max_new_tokens, self.begun = runtime, max_new_tokens, True
        self.sequences = [Sequence(self, 0)]
        self.since = time.perf_counter()

    @abstractmethod
    def prefilled(self, sequence: Sequence, done: PrefillReport) -> None:
        """The prompt is prefilled: begin what follows. Completed sequences have the status FINISHED afterwards."""

    def conclude(self) -> None:
        """All sequences are complete: hand the result to the parent."""


class Confirm(InternalRequest):
    """`--confirm`: the answer that a full prefill gives, at the price of little more than that prefill where it is the same.

    What was streamed from blended KV is a draft. The full prefill computes the logits of all of its tokens with the prompt, as in
    speculative decoding (arXiv 2211.17192), and the sampler draws from them with the draft's own seed. From the first token that
    is another, the answer is decoded behind the full prefill's KV.
    """

    def __init__(self, runtime: Runtime, parent: RequestState, draft: Generation) -> None:
        request, self._draft = parent.request.in_full(), draft
        self._num_prompt = request.plan.num_tokens
        request = request.extended(draft.token_ids[:-1])
        super().__init__(runtime, parent, request, parent.max_new_tokens - len(draft.token_ids) + 1)
        self._full_ttft_s = 0.0

    def outputs(self) -> Outputs:
        prompt_ids = self.request.plan.token_ids[: self._num_prompt]
        self._output, self._goes_on, self._same = (
            SequenceOutput(self.runtime, self.request.sampling, prompt_ids), True, True,
        )  # fmt: skip
        return self._num_prompt - 1, self._take

    def _take(self, logits: Tensor) -> None:
        """logits: fp32 [n, vocab_size], of the draft's next tokens."""
        generated = self._output.out.token_ids
        for row in logits:
            if not (self._goes_on and self._same):
                return
            at = len(generated)
            self._goes_on = self._output.append(self._output.draw(row))
            self._same = generated[at] == self._draft.token_ids[at]

    def prefilled(self, sequence: Sequence, done: PrefillReport) -> None:
        self._full_ttft_s = done.prefill_s
        sequence.output, sequence.kv_len = self._output, self._num_prompt + len(self._output.out.token_ids) - 1
        if not self._goes_on:
            sequence.finish()

    def conclude(self) -> None:
        answer, draft = self._output.end(), self._draft
        pairs = zip(answer.token_ids, draft.token_ids, strict=False)
        common = min(len(answer.token_ids), len(draft.token_ids))
        first_difference = next((n for n, (a, b) in enumerate(pairs) if a != b), common)
        same = answer.token_ids == draft.token_ids
        answer.first_token_at, answer.decode_s = draft.first_token_at, draft.decode_s  # what the user waited for
        answer.attention = draft.attention
        assert self.parent is not None
        self.parent.sequences[0].generation = answer
        self.parent.confirmation = Confirmation(
            same, None if same else first_difference, draft.text, self._full_ttft_s, time.perf_counter() - self.since
        )


class Verify(InternalRequest):
    """`--verify`: how far the prompt's KV, as it was before the answer, is from a full prefill of the same ids.

    The full prefill answers greedily; beside it the prompt's own KV is fed the same tokens (teacher forcing), a token a step in
    the same batch, and the two distributions are compared.
    """

    def __init__(self, runtime: Runtime, parent: RequestState, blended: Snapshot) -> None:
        sampling = parent.request.sampling
        greedy = SamplingParams(
            max_tokens=sampling.max_tokens, stop=sampling.stop, stop_repetition=sampling.stop_repetition
        )
        request = replace(parent.request.in_full(), sampling=greedy)
        super().__init__(runtime, parent, request, runtime.max_new_tokens(greedy))
        self._blended, self._full_ttft_s = blended, 0.0

    def prefilled(self, sequence: Sequence, done: PrefillReport) -> None:
        start = time.perf_counter()
        done.logits.argmax().item()  # the first token is there, on a GPU too
        self._full_ttft_s = done.prefill_s + time.perf_counter() - start
        lead = _Leading(self.runtime, self.request.sampling)
        sequence.output, sequence.kv_len = lead, self.num_tokens
        other = Sequence(self, 1, Status.SWAPPED, kv_len=self.num_tokens, swapped=self._blended.kv, leader=sequence)
        self._compared = other.output = Following(lead, self.runtime)
        self.sequences.append(other)
        outputs: tuple[tuple[Sequence, SequenceOutput, Tensor], ...] = (
            (sequence, lead, done.logits),
            (other, self._compared, self._blended.logits),
        )
        for one, output, logits in outputs:
            if not output.append(output.draw(logits)):
                one.finish()

    def conclude(self) -> None:
        found = self._compared.found
        assert self.parent is not None
        self.parent.verification = Verification(
            kl=found.kl[0],
            top1_agree=found.top1[0],
            full_ttft_s=self._full_ttft_s,
            answer_kl=found.mean_kl,
            answer_top1=found.top1_rate,
            answer_tokens=len(found.kl),
            same_answer=found.first_difference is None,
            first_difference=found.first_difference,
        )


class _Leading(SequenceOutput):
    """Keeps the logits of its tokens until they are compared. ended: it has its last token."""

    def __init__(self, runtime: Runtime, params: SamplingParams) -> None:
        super().__init__(runtime, params)
        self.logits: dict[int, Tensor] = {}
        self.ended = False

    def see(self, logits: Tensor) -> None:
        self.logits[len(self.out.token_ids)] = logits.clone()

    def append(self, draw: Draw) -> bool:
        self.ended = not super().append(draw)
        return not self.ended


class Following(SequenceOutput):
    """Sequence that is fed another one's tokens and compares the logits."""

    def __init__(self, lead: _Leading, runtime: Runtime) -> None:
        super().__init__(runtime, SamplingParams())
        self._lead, self._pairs = lead, list[Divergence]()

    @property
    def found(self) -> Divergence:
        return Divergence(tuple(d.kl[0] for d in self._pairs), tuple(d.top1[0] for d in self._pairs))

    def see(self, logits: Tensor) -> None:
        reference = self._lead.logits.pop(len(self.out.token_ids))
        self._pairs.append(divergence(log_distribution(reference[None]), log_distribution(logits[None])))

    def append(self, draw: Draw) -> bool:
        theirs, own = self._lead.out.token_ids, self.out.token_ids
        own.append(theirs[len(own)])
        return not (self._lead.ended and len(own) == len(theirs))
