"""Output of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from cacheblend_cli.types import FinishReason, TokenLogprob


@dataclass
class Generation:
    """Tokens and text of one answer."""

    token_ids: list[int] = field(default_factory=list)  # with the reasoning and the EOS that ended it
    text: str = ""  # without them
    reasoning: str = ""
    reasoning_tokens: int = 0
    reasoning_cut: bool = False  # the reasoning budget was used up
    finish_reason: FinishReason = "length"
    logprobs: list[TokenLogprob] = field(default_factory=list)
    first_token_at: float = 0.0  # perf_counter
    decode_s: float = 0.0
    attention: list[float] | None = None  # share of each chunk, see engine/worker/attention.py

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the sampled tokens in nats, if log-probabilities were requested."""
        return sum(p.logprob for p in self.logprobs) / max(1, len(self.logprobs))

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, over the time after the first."""
        return (len(self.token_ids) - 1) / self.decode_s if self.decode_s > 0 and len(self.token_ids) > 1 else 0.0
