"""Full prefill for `--verify` (compares an answer), `--confirm` (replaces it) and `--on-unsupported confirm` (replaces
it if a claim is not in the sources).

Once the answer is complete, one full prefill of the prompt and the answer's tokens gives the distribution at each of
them. That prefill is a further request, scheduled in slices like any other.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cacheblend_cli.blend.prefill import PrefillResult
from cacheblend_cli.engine.core.hooks import Begun, Further, Hook
from cacheblend_cli.engine.core.report import PrefillReport
from cacheblend_cli.engine.core.sequence_output import SequenceOutput
from cacheblend_cli.engine.features.claims import Claims
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.kv.device_time import DeviceTime
from cacheblend_cli.types import Answer, Confirmation, Verification

if TYPE_CHECKING:
    from cacheblend_cli.blend.fidelity import Divergence
    from cacheblend_cli.kv.export import KVReader

COMPARED_BYTES = 256 * 2**20
"""Maximum logits of an answer that --verify keeps in host memory: 450 tokens with a vocabulary of 150,000."""


def admit(runtime: Runtime, request: Request) -> tuple[Request, Hook | None]:
    """Return the request with its checks. A request to confirm that samples at random gets a seed, so that its tokens
    can be drawn again."""
    options, sampling = request.options, request.sampling
    confirms = options.confirm or options.on_unsupported == "confirm"
    if not (options.verify or confirms):
        return request, None
    if confirms and sampling.temperature != 0 and sampling.seed is None:
        request = replace(request, sampling=replace(sampling, seed=secrets.randbits(32)))
    return request, Checks(runtime, request)


class Checks(Hook):
    """Checks of an answer: records data while it is generated, runs the full prefill, and reports the results."""

    def __init__(self, runtime: Runtime, request: Request) -> None:
        self._runtime = runtime
        self.verify, self.confirm = request.options.verify, request.options.confirm
        marks = request.options.on_unsupported == "confirm"
        self._claims = Claims(runtime, request) if marks and request.chunks else None
        self.holds_back = marks and not request.options.drafts
        self._report: PrefillReport | None = None
        self.top1 = list[Tensor]()  # most likely token at each position of the answer, [] int64
        self.logits = list[Tensor]()  # at the first positions, fp32 [vocab_size] on the host
        self.verification: Verification | None = None
        self.confirmation: Confirmation | None = None

    def on_prefill(self, report: PrefillReport, export: Callable[[], KVReader]) -> None:
        self._report = report

    def on_logits(self, index: int) -> Callable[[Tensor], None] | None:
        return self._see if self.verify and index == 0 else None

    def _see(self, logits: Tensor) -> None:
        self.top1.append(logits.argmax(-1))
        if (len(self.logits) + 1) * logits.nbytes <= COMPARED_BYTES:
            self.logits.append(logits.to("cpu", copy=True))

    def review(self, texts: Sequence[str], is_cancelled: Callable[[], bool]) -> Callable[[], None] | None:
        return None if self._claims is None else self._claims.review(texts, is_cancelled)

    def on_complete(self, outputs: Sequence[SequenceOutput]) -> Further | None:
        assert self._report is not None
        draft, plan, request = outputs[0], self._report.plan, self._report.request
        if self._claims is not None and self._claims.is_marked(draft.out.text):
            self.confirm = True
        reuses = bool(plan.cached_tokens or self._report.prefix_cache_tokens)
        if self.confirm and not reuses:  # it is a full prefill's
            self.confirmation = Confirmation(True, None, draft.out.text, 0.0, 0.0)
        replaces = self.confirm and reuses
        if not (self.verify or replaces):
            return None
        return FullCheck(self._runtime, self, request, draft, replaces=replaces).further()

    def on_answer(self, report: PrefillReport, index: int, answer: Answer) -> None:
        answer.verify, answer.confirmation = self.verification, self.confirmation
        if self._claims is not None:
            self._claims.on_answer(report, index, answer)


class FullCheck(Hook):
    """A full prefill of a prompt and of the answer over blended KV (the draft).

    The prefill is fed the draft's tokens (teacher forcing), and its distribution at each is compared with the one that
    the token was drawn from. To replace the draft, tokens are drawn again from the full prefill's logits with the same
    seed, as in speculative decoding (arXiv 2211.17192); from the first difference on, the answer is decoded over the
    full prefill's KV.
    """

    def __init__(
        self, runtime: Runtime, checks: Checks, request: Request, draft: SequenceOutput, *, replaces: bool
    ) -> None:
        self._runtime, self._checks, self._request, self._replaces = runtime, checks, request.in_full(), replaces
        self._num_prompt, self._answer, self._draft = request.plan.num_tokens, draft, draft.out
        self._draft_ids, switch = self._draft.token_ids, runtime.decoder.rope.switches_at
        if switch is not None and self._num_prompt <= switch:  # beyond it, a full prefill has other frequencies
            self._draft_ids = self._draft_ids[: switch - self._num_prompt + 1]
        self.outputs_from = self._num_prompt - 1
        self._since, self._prompt_time = time.perf_counter(), DeviceTime()

    def further(self) -> Further:
        fed, sampling = self._draft_ids[:-1], self._request.sampling
        left = self._runtime.max_new_tokens(sampling) - len(fed) if self._replaces else 0
        extended = replace(self._request, suffix_ids=(*self._request.suffix_ids, *fed))
        return Further(extended, self, len(fed), left)

    def on_begin(self) -> None:
        self._output = SequenceOutput(self._runtime, self._request.sampling, self._request.plan.token_ids)
        self._top1, self._draws = list[int](), self._replaces
        self._pairs: list[Divergence] = []

    def on_prompt_logits(self, logits: Tensor) -> None:
        """Compare and draw. logits: fp32 [n, vocab_size] at the draft's next tokens."""
        at = len(self._top1)
        self._top1 += logits.argmax(-1).tolist()
        from cacheblend_cli.blend.fidelity import divergence, log_distribution

        if kept := self._checks.logits[at : at + len(logits)]:
            ours = torch.stack(kept)
            self._pairs.append(divergence(log_distribution(logits[: len(kept)].cpu()), log_distribution(ours)))
        for token_id, row in zip(self._draft_ids[at:], logits, strict=False):
            if not self._draws:
                return
            self._goes_on = self._output.append(self._output.draw(row))
            self._draws = self._goes_on and self._output.out.token_ids[-1] == token_id

    def on_slice(self, result: PrefillResult) -> None:
        if result.num_filled >= self._num_prompt and not self._prompt_time.pieces:
            self._prompt_time = result.time

    def on_prefill(self, report: PrefillReport, export: Callable[[], KVReader]) -> Begun:
        return Begun(self._output, is_complete=not (self._replaces and self._goes_on))

    def on_complete(self, outputs: Sequence[SequenceOutput]) -> None:
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
        self._answer.out = answer
        seconds = time.perf_counter() - self._since
        checks.confirmation = Confirmation(same, first_difference, draft.text, self._prompt_time.seconds, seconds)

    def _verification(self) -> Verification:
        ours = [int(token) for token in self._checks.top1[: len(self._top1)]]
        differs = [a != b for a, b in zip(self._top1, ours, strict=True)]
        first = differs.index(True) if True in differs else None
        kl = [value for pair in self._pairs for value in pair.kl][: None if first is None else first + 1]
        return Verification(
            kl=kl[0],
            top1_agree=first != 0,
            full_ttft_s=self._prompt_time.seconds,
            answer_kl=sum(kl) / len(kl),
            answer_top1=1.0 if first is None else first / (first + 1),
            answer_tokens=len(self._draft.token_ids),
            same_answer=first is None,
            first_difference=first,
        )
