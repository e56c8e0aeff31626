"""Report of a prefilled prompt, and the log-probabilities of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cacheblend_cli.blend.prefill import PrefillResult
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.worker.sampling import logprobs_of
from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.prompt.plan import PromptPlan
from cacheblend_cli.types import TokenLogprob


@dataclass(frozen=True)
class PrefillReport:
    """A prompt whose KV is in the pool."""

    request: Request  # as it was finally run
    result: PrefillResult
    loader: KVLoader  # figures of loading
    prefill_s: float
    prefix_cache_tokens: int = 0  # leading tokens whose KV came from the prefix cache
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of every token but the first, where requested

    @property
    def plan(self) -> PromptPlan:
        return self.request.plan

    @property
    def logits(self) -> Tensor:
        """fp32 [vocab_size], after the prompt's last token."""
        return self.result.logits[-1]

    @property
    def recompute_fraction(self) -> float:
        """Fresh token-layers over layers x reusable tokens; 1 for a full prefill, which reuses nothing."""
        reusable = self.plan.cached_tokens
        return self.result.fresh_token_layers / (len(self.result.layers) * reusable) if reusable else 1.0


class PromptLogprobs:
    """Sink that computes the log-probabilities of a prompt's tokens from its rows' logits, from position 0 on."""

    def __init__(self, token_ids: list[int], top: int) -> None:
        self._token_ids, self._top, self.found = token_ids, top, list[TokenLogprob]()

    def __call__(self, logits: Tensor) -> None:
        """Add the log-probabilities of the tokens after these rows; there is none after the last row."""
        begin = len(self.found) + 1
        ids = torch.tensor(self._token_ids[begin : begin + len(logits)], device=logits.device)
        if len(ids):
            self.found += logprobs_of(logits[: len(ids)], ids, self._top)
