"""The full prefill behind `--verify`, which compares an answer, `--confirm`, which replaces it, and `--max-risk`, which
replaces it if it is too risky.

Once the answer is complete, one full prefill of the prompt and the answer's tokens gives the distribution at each of
them. It is an internal request (`FullCheck`), scheduled in slices like any other.
"""

from __future__ import annotations

import time
from itertools import takewhile

import torch
from torch import Tensor

from cacheblend_cli.blend.fidelity import Divergence, divergence, log_distribution
from cacheblend_cli.engine.core.checks import Checks
from cacheblend_cli.engine.core.sequence import RequestState, Sequence, Sink
from cacheblend_cli.engine.core.sequence_output import Generation, SequenceOutput
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.device_time import DeviceTime
from cacheblend_cli.types import Confirmation, Risk, Verification


def check_of(runtime: Runtime, state: RequestState) -> FullCheck | None:
    """Return the check of a complete answer, None if it needs no full prefill."""
    checks, output = state.checks, state.sequences[0].output
    if checks is None:
        return None
    assert state.done is not None
    assert output is not None
    is_risky = checks.judge(state.done.plan)
    reuses = bool(state.done.plan.cached_tokens or state.done.prefix_cache_tokens)
    if checks.confirm and not reuses:  # it is a full prefill's
        checks.confirmation = Confirmation(True, None, output.out.text, 0.0, 0.0)
    replaces = is_risky or (checks.confirm and reuses)
    return FullCheck(runtime, state, checks, output.out, replaces=replaces) if checks.verify or replaces else None


class FullCheck(RequestState):
    """A full prefill of a prompt and of the answer over blended KV (the draft).

    It is fed the draft's tokens (teacher forcing), and its distribution at each is compared with the one that the token
    was drawn from. To replace the draft, tokens are drawn again from the full prefill's logits with the same seed, as
    in speculative decoding (arXiv 2211.17192); from the first difference on, the answer is decoded over the full
    prefill's KV.
    """

    def __init__(
        self, runtime: Runtime, parent: RequestState, checks: Checks, draft: Generation, *, replaces: bool
    ) -> None:
        request = parent.request.in_full()
        self._num_prompt, ids = request.plan.num_tokens, draft.token_ids
        switch = runtime.decoder.rope.switches_at
        if switch is not None and self._num_prompt <= switch:  # beyond it, a full prefill has other frequencies
            ids = ids[: switch - self._num_prompt + 1]
        super().__init__(request.extended(ids[:-1]), parent.number, parent)
        self._runtime, self._checks, self._draft, self._draft_ids, self._replaces = (
            runtime, checks, draft, ids, replaces,
        )  # fmt: skip
        self.max_new_tokens = parent.max_new_tokens - len(ids) + 1 if replaces else 0
        self.begun, self.since = True, time.perf_counter()
        self.prompt_time = DeviceTime()  # of the prompt's prefill
        self.sequences = [Sequence(self, 0)]

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt

    def outputs(self) -> tuple[int, Sink]:
        prompt_ids = self.request.plan.token_ids[: self._num_prompt]
        self._output = SequenceOutput(self._runtime, self.request.sampling, prompt_ids)
        self._top1, self._pairs, self._draws = list[int](), list[Divergence](), self._replaces
        return self._num_prompt - 1, self._take

    def _take(self, logits: Tensor) -> None:
        """Compare and draw. logits: fp32 [n, vocab_size] at the draft's next tokens."""
        at = len(self._top1)
        self._top1 += logits.argmax(-1).tolist()
        if kept := self._checks.logits[at : at + len(logits)]:
            ours = torch.stack(kept)
            self._pairs.append(divergence(log_distribution(logits[: len(kept)].cpu()), log_distribution(ours)))
        for token_id, row in zip(self._draft_ids[at:], logits, strict=False):
            if not self._draws:
                return
            self._goes_on = self._output.append(self._output.draw(row))
            self._draws = self._goes_on and self._output.out.token_ids[-1] == token_id

    @property
    def continues(self) -> SequenceOutput | None:
        """The new answer if tokens are left to decode, else None."""
        return self._output if self._replaces and self._goes_on else None

    def conclude(self) -> None:
        """Give the results to the parent request."""
        assert self.parent is not None
        checks, draft = self._checks, self._draft
        if checks.verify:
            checks.verification = self._verification()
        if not self._replaces:
            return
        answer = self._output.end()
        same = answer.token_ids == draft.token_ids
        pairs = zip(answer.token_ids, draft.token_ids, strict=False)
        first_difference = None if same else sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        answer.first_token_at, answer.decode_s = draft.first_token_at, draft.decode_s  # what the user waited for
        answer.attention = draft.attention
        self.parent.sequences[0].output = self._output
        seconds = time.perf_counter() - self.since
        if checks.confirm:
            checks.confirmation = Confirmation(same, first_difference, draft.text, self.prompt_time.seconds, seconds)
        if checks.risk is not None:
            checks.risk = Risk(0.0, checks.limit, full_prefill_at=0, seconds=seconds)

    def _verification(self) -> Verification:
        ours = [int(token) for token in self._checks.top1[: len(self._top1)]]
        differs = [a != b for a, b in zip(self._top1, ours, strict=True)]
        first = differs.index(True) if True in differs else None
        kl = [value for pair in self._pairs for value in pair.kl][: None if first is None else first + 1]
        return Verification(
            kl=kl[0],
            top1_agree=first != 0,
            full_ttft_s=self.prompt_time.seconds,
            answer_kl=sum(kl) / len(kl),
            answer_top1=1.0 if first is None else first / (first + 1),
            answer_tokens=len(self._draft.token_ids),
            same_answer=first is None,
            first_difference=first,
        )
