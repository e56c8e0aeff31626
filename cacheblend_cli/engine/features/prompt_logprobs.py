"""Log-probabilities of a prompt's tokens."""

from __future__ import annotations

from torch import Tensor

from cacheblend_cli.engine.core.hooks import Hook
from cacheblend_cli.engine.core.report import PrefillReport
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.sampling import logprobs_of
from cacheblend_cli.kv.pool import upload
from cacheblend_cli.types import Answer, TokenLogprob


def admit(runtime: Runtime, request: Request) -> tuple[Request, Hook | None]:
    top = request.sampling.prompt_logprobs
    return request, None if top is None else PromptLogprobs(request.plan.token_ids, top)


class PromptLogprobs(Hook):
    """Computes the log-probabilities of a prompt's tokens from its rows' logits, from position 0 on."""

    outputs_from, is_alone = 0, True

    def __init__(self, token_ids: list[int], top: int) -> None:
        self._token_ids, self._top, self._found = token_ids, top, list[TokenLogprob]()

    def on_begin(self) -> None:
        self._found = []

    def on_prompt_logits(self, logits: Tensor) -> None:
        """Add the log-probabilities of the tokens after these rows; there is none after the last row."""
        begin = len(self._found) + 1
        ids = upload(self._token_ids[begin : begin + len(logits)], logits.device)
        if len(ids):
            self._found += logprobs_of(logits[: len(ids)], ids, self._top)

    def on_answer(self, report: PrefillReport, index: int, answer: Answer) -> None:
        answer.prompt_logprobs = list(self._found)
