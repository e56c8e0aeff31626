"""The full prefill behind `--verify`, which compares an answer, `--confirm`, which replaces it, and `--max-risk`, which
replaces it if it is too risky.

Once the answer is complete, one full prefill of the prompt and the answer's tokens gives the distribution at each of
them. It is an internal request (`FullCheck`), scheduled in slices like any other.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch
from torch import Tensor

from cacheblend_cli.blend.fidelity import Divergence, divergence, log_distribution
from cacheblend_cli.blend.risk import RiskFile, RiskFit, signals_of
from cacheblend_cli.engine.core.sequence import RequestState, Sequence, Sink
from cacheblend_cli.engine.core.sequence_output import Generation, SequenceOutput
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.plan import PromptPlan
from cacheblend_cli.types import Confirmation, Risk, Verification

COMPARED_BYTES = 256 * 2**20
"""Maximum logits of an answer that --verify keeps in host memory: 450 tokens with a vocabulary of 150,000."""


@dataclass(eq=False)
class Checks:
    """Checks requested for an answer, the data collected for them while it is generated, and their results."""

    verify: bool
    confirm: bool
    fit: RiskFit | None = None
    limit: float = 0.0  # maximum risk
    top1: list[Tensor] = field(default_factory=list)  # most likely token at each position of the answer, [] int64
    logits: list[Tensor] = field(default_factory=list)  # at the first positions, fp32 [vocab_size] on the host
    signals: list[Tensor] = field(default_factory=list)  # of each token, see risk.py
    verification: Verification | None = None
    confirmation: Confirmation | None = None
    risk: Risk | None = None

    @classmethod
    def of(cls, request: Request) -> Checks | None:
        """Return the request's checks, None without any. Raises UsageError if the risk was never fitted."""
        fit, options = _fit_of(request), request.options
        if fit is None and not (options.verify or options.confirm):
            return None
        return cls(options.verify, options.confirm, fit, request.blend.max_risk or 0.0)

    def see(self, logits: Tensor) -> None:
        """Keep the checks' data from the logits, fp32 [vocab_size], that the next token is drawn from."""
        if self.fit is not None:
            self.signals.append(signals_of(logits[None]))
        if self.verify:
            self.top1.append(logits.argmax(-1))
            if (len(self.logits) + 1) * logits.nbytes <= COMPARED_BYTES:
                self.logits.append(logits.to("cpu", copy=True))

    def judge(self, plan: PromptPlan) -> bool:
        """Return whether the complete answer's risk exceeds the limit. plan: the prompt as it was run."""
        if self.fit is None:
            return False
        self.risk = Risk(0.0, self.limit)
        if plan.inexact_tokens:
            of_tokens = self.fit.of_tokens(torch.cat(self.signals))
            self.risk = Risk(float(1 - (1 - of_tokens).prod()), self.limit, len(of_tokens))
        return self.risk.estimate > self.limit


def _fit_of(request: Request) -> RiskFit | None:
    """Return the fit of the request's risk, None without a limit or inexact KV. Raises UsageError."""
    if request.blend.max_risk is None or not request.plan.inexact_tokens:
        return None
    if max(request.sampling.n, request.sampling.best_of) > 1:
        raise UsageError("max_risk applies to one answer", "ask for one, or without max_risk")
    pairs = zip(request.plan.chunks, request.chunks, strict=True)
    contexts = {c.manifest.context for segment, c in pairs if segment.status == "blended" and c.manifest is not None}
    fit = RiskFile.of(request.collection, list(contexts), request.blend).read()
    if fit is None:
        raise UsageError(
            "--max-risk needs a fit for this model, the context of these chunks and these blend settings",
            "fit it on questions with contexts: cacheblend eval QUESTIONS.jsonl --fit-risk, with the same settings",
        )
    return fit


def seeded(request: Request) -> Request:
    """Return the request with a seed if it samples at random, so that its tokens can be drawn again."""
    sampling = request.sampling
    if sampling.temperature == 0 or sampling.seed is not None:
        return request
    return replace(request, sampling=replace(sampling, seed=secrets.randbits(32)))


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
        self.begun, self.since, self.full_ttft_s = True, time.perf_counter(), 0.0
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
            checks.confirmation = Confirmation(same, first_difference, draft.text, self.full_ttft_s, seconds)
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
            full_ttft_s=self.full_ttft_s,
            answer_kl=sum(kl) / len(kl),
            answer_top1=1.0 if first is None else first / (first + 1),
            answer_tokens=len(self._draft.token_ids),
            same_answer=first is None,
            first_difference=first,
        )
