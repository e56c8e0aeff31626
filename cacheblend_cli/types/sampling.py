"""Sampling: how tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.settings import Resolved, Settings, of_settings

MAX_STOPS, MAX_STOP_CHARS = 16, 1024
MOST = 1_000_000  # limit of addends and divisors of logits: far larger ones turn 0 into NaN in fp32


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch the filters off, and so do
    penalties of 1, 0 and 0 (see `Penalties`), which also apply to greedy choices."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # alternatives to report per token (0: only the chosen one), None for no report
    ignore_eos: bool = False
    reasoning_tokens: int | None = None  # limit between think tags, besides max_tokens; None: counted in max_tokens
    n: int = 1  # number of answers, with the seeds seed, seed + 1, ...
    best_of: int = 0  # answers to generate, of which the n likeliest per token are returned; 0: n
    stop_ids: tuple[int, ...] = ()  # tokens that end the answer
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, addend to its logit)
    json_schema: str | None = None  # form of the answer, which then has no reasoning before it
    regex: str | None = None  # as json_schema
    prompt_logprobs: int | None = None  # logprobs of the prompt's tokens; the prompt is then computed in full
    stop_repetition: bool = True  # end an answer that repeats itself (see `engine.repetition`), unless ignore_eos

    def __post_init__(self) -> None:
        added = self.temperature, self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        for ok, what in (
            (self.max_tokens >= 1, "--max-tokens is at least 1"),
            (self.temperature >= 0, "--temperature is 0 or more"),
            (0 < self.top_p <= 1, "--top-p is above 0 and at most 1"),
            (self.top_k >= 0, "top_k is 0 (off) or more"),
            (0 <= self.min_p < 1, "min_p is at least 0 and below 1"),
            (self.repetition_penalty > 0, "--repetition-penalty is above 0; 1 is off"),
            (self.reasoning_tokens is None or self.reasoning_tokens >= 0, "--reasoning-tokens is 0 or more"),
            (self.logprobs is None or 0 <= self.logprobs <= 20, "--logprobs is from 0 to 20"),
            (self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "prompt_logprobs is from 0 to 20"),
            (all(self.stop), "a stop string is not empty"),
            (len(self.stop) <= MAX_STOPS, f"at most {MAX_STOPS} stop strings"),
            (
                all(len(s) <= MAX_STOP_CHARS for s in self.stop),
                f"a stop string has at most {MAX_STOP_CHARS:,} characters",
            ),
            (self.json_schema is None or self.regex is None, "an answer has one form: --json-schema or --regex"),
            (1 <= self.n <= 64, "n is from 1 to 64"),
            (all(abs(x) < MOST for x in added), f"temperature and penalties are numbers below {MOST:,}"),
            (all(bias < MOST for _, bias in self.logit_bias), f"a logit_bias is a number below {MOST:,}"),
            (self.best_of == 0 or self.n <= self.best_of <= 64, "best_of is at least n and at most 64"),
        ):
            if not ok:
                raise UsageError(what, "correct the value, or leave it out")

    @property
    def has_form(self) -> bool:
        return self.json_schema is not None or self.regex is not None

    @property
    def penalises(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability, before penalties and temperature."""

    id: int  # token id
    logprob: float  # natural logarithm of its probability
    top: tuple[tuple[int, float], ...] = ()  # likeliest tokens: [id, logprob]


MODEL_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of SamplingParams that generation_config.json may decide."""
_NO_SETTINGS = ("top_k", "min_p")  # the setting top_k is a number of chunks


def model_sampled(resolved: Resolved) -> tuple[str, ...]:
    """Return the fields that --model-sampling leaves to the model: fields not set by a flag, variable or file."""
    if not resolved.settings.model_sampling:
        return ()
    return tuple(name for name in MODEL_SAMPLED if name in _NO_SETTINGS or resolved.origin[name] == "default")


def sampling_of(settings: Settings, **others: Any) -> SamplingParams:
    """Return the settings' sampling. others: further fields. Raises UsageError."""
    return of_settings(SamplingParams, settings, top_k=SamplingParams.top_k, **others)
