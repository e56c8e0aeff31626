"""Full prefill for `--verify` (compares an answer), `--confirm` (replaces it) and `--max-risk` (replaces it if it is
too risky).

Once the answer is complete, one full prefill of the prompt and the answer's tokens gives the distribution at each of
them. That prefill is a further request, scheduled in slices like any other.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor

from cacheblend_cli.blend.fidelity import Divergence, divergence, log_distribution
from cacheblend_cli.blend.risk import RiskFile, RiskFit, signals_of
from cacheblend_cli.engine.core.hooks import Begun, Further, Hook
from cacheblend_cli.engine.core.report import PrefillReport
from cacheblend_cli.engine.core.sequence_output import SequenceOutput
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.device_time import DeviceTime
from cacheblend_cli.engine.worker.prefill import PrefillOutput
from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.export import KVReader
from cacheblend_cli.types import Answer, Confirmation, Risk, Verification

COMPARED_BYTES = 256 * 2**20
"""Maximum logits of an answer that --verify keeps in host memory: 450 tokens with a vocabulary of 150,000."""


def admit(runtime: Runtime, request: Request) -> tuple[Request, Hook | None]:
    """Return the request with its checks, and with a seed if it samples at random, so that its tokens can be drawn
    again. Raises UsageError if the risk was never fitted."""
    sampling = request.sampling
    draws_again = request.options.confirm or request.blend.max_risk is not None
    if draws_again and sampling.temperature != 0 and sampling.seed is None:
        request = replace(request, sampling=replace(sampling, seed=secrets.randbits(32)))
    fit = _fit_of(request)
    checked = fit is not None or request.options.verify or request.options.confirm
    return request, Checks(runtime, request, fit) if checked else None


def _fit_of(request: Request) -> RiskFit | None:
    """Return the risk fit for the request, None without a limit or inexact KV. Raises UsageError."""
    if request.blend.max_risk is None or not request.plan.inexact_tokens:
        return None
    if max(request.sampling.n, request.sampling.best_of) > 1:
        raise UsageError("max_risk applies to one answer", "ask for one answer, or omit max_risk")
    pairs = zip(request.plan.chunks, request.chunks, strict=True)
    contexts = {c.manifest.context for segment, c in pairs if segment.status == "blended" and c.manifest is not None}
    fit = RiskFile.of(request.collection, list(contexts), request.blend).read()
    if fit is None:
        raise UsageError(
            "--max-risk needs a fit for this model, the context of these chunks and these blend settings",
            "fit it on questions with contexts: cacheblend eval QUESTIONS.jsonl --fit-risk, with the same settings",
        )
    return fit


class Checks(Hook):
    """Checks of an answer: records data while it is generated, runs the full prefill, and reports the results."""

    def __init__(self, runtime: Runtime, request: Request, fit: RiskFit | None) -> None:
        self._runtime, self._fit, self.limit = runtime, fit, request.blend.max_risk or 0.0
        self.verify, self.confirm = request.options.verify, request.options.confirm
        self.may_replace, self.decodes_here = fit is not None, self.verify
        self._report: PrefillReport | None = None
        self.top1 = list[Tensor]()  # most likely token at each position of the answer, [] int64
        self.logits = list[Tensor]()  # at the first positions, fp32 [vocab_size] on the host
        self._signals = list[Tensor]()  # of each token, see blend/risk.py
        self.verification: Verification | None = None
        self.confirmation: Confirmation | None = None
        self.risk: Risk | None = None

    def on_prefill(self, report: PrefillReport, export: Callable[[], KVReader]) -> None:
        self._report = report

    def on_logits(self, index: int) -> Callable[[Tensor], None] | None:
        return self._see if index == 0 else None

    def _see(self, logits: Tensor) -> None:
        if self._fit is not None:
            self._signals.append(signals_of(logits[None]))
        if self.verify:
            self.top1.append(logits.argmax(-1))
            if (len(self.logits) + 1) * logits.nbytes <= COMPARED_BYTES:
                self.logits.append(logits.to("cpu", copy=True))

    def on_complete(self, outputs: Sequence[SequenceOutput]) -> Further | None:
        assert self._report is not None
        draft, plan = outputs[0], self._report.plan
        is_risky, reuses = self._is_risky(), bool(plan.cached_tokens or self._report.prefix_cache_tokens)
        if self.confirm and not reuses:  # it is a full prefill's
            self.confirmation = Confirmation(True, None, draft.out.text, 0.0, 0.0)
        replaces = is_risky or (self.confirm and reuses)
        if not (self.verify or replaces):
            return None
        return FullCheck(self._runtime, self, self._report.request, draft, replaces=replaces).further()

    def _is_risky(self) -> bool:
        if self._fit is None or self._report is None:
            return False
        self.risk = Risk(0.0, self.limit)
        if self._report.plan.inexact_tokens:
            of_tokens = self._fit.of_tokens(torch.cat(self._signals))
            self.risk = Risk(float(1 - (1 - of_tokens).prod()), self.limit, len(of_tokens))
        return self.risk.estimate > self.limit

    def on_answer(self, report: PrefillReport, index: int, answer: Answer) -> None:
        answer.verify, answer.confirmation, answer.risk = self.verification, self.confirmation, self.risk


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
        return Further(self._request.extended(fed), self, len(fed), left)

    def on_begin(self) -> None:
        self._output = SequenceOutput(self._runtime, self._request.sampling, self._request.plan.token_ids)
        self._top1, self._pairs, self._draws = list[int](), list[Divergence](), self._replaces

    def on_prompt_logits(self, logits: Tensor) -> None:
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

    def on_slice(self, output: PrefillOutput) -> None:
        if output.num_filled >= self._num_prompt and not self._prompt_time.pieces:
            self._prompt_time = output.time

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
        if checks.confirm:
            checks.confirmation = Confirmation(same, first_difference, draft.text, self._prompt_time.seconds, seconds)
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
            full_ttft_s=self._prompt_time.seconds,
            answer_kl=sum(kl) / len(kl),
            answer_top1=1.0 if first is None else first / (first + 1),
            answer_tokens=len(self._draft.token_ids),
            same_answer=first is None,
            first_difference=first,
        )
