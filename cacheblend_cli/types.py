"""The types of a request and its answer: the same in the command line, over HTTP and in Python. Imports neither torch nor numpy."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

from msgspec import convert, to_builtins

from cacheblend_cli.corpus.scopes import EVERYTHING, Scope
from cacheblend_cli.errors import UsageError
from cacheblend_cli.settings import Resolved

FinishReason = Literal["stop", "length", "cancelled", "deadline", "handed_over"]
MAX_STOPS, MAX_STOP_CHARS = 16, 1024
MOST = 1_000_000  # of what is added to logits, or divides them: in fp32 what is far above makes NaN of 0


@dataclass(frozen=True)
class SamplingParams:
    """How to generate. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch the filters off, and so do 1 and twice 0
    the penalties (see `Penalties`), which greedy choices heed, too.

    logprobs: how many alternatives to report a token (0: the chosen one only), None: none at all. reasoning_tokens: what
    a model that reasons may say between think tags, beside max_tokens; None: its reasoning is a part of those. n: answers to
    give, each with a seed of its own: seed, seed + 1 and so on. best_of: answers to make, of which the n likeliest by token are
    given; 0: just n. stop_ids: tokens that end the answer as its end does. logit_bias: (token, what is added to its logit).
    json_schema, regex: the form of the answer, which then has no reasoning before it. prompt_logprobs: as logprobs, of the
    prompt's tokens, which is then computed in full, whatever is stored.
    """

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
    logprobs: int | None = None
    ignore_eos: bool = False
    reasoning_tokens: int | None = None
    n: int = 1
    best_of: int = 0
    stop_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    json_schema: str | None = None
    regex: str | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for ok, what in (
            (self.max_tokens >= 1, "--max-tokens is at least 1"),
            (self.temperature >= 0, "--temperature is 0 or more"),
            (0 < self.top_p <= 1, "--top-p is above 0 and at most 1"),
            (self.top_k >= 0, "--sample-top-k is 0 (off) or more"),
            (0 <= self.min_p < 1, "--min-p is at least 0 and below 1"),
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
            (all(abs(x) < MOST for x in self._added), f"temperature and penalties are numbers below {MOST:,}"),
            (all(bias < MOST for _, bias in self.logit_bias), f"a logit_bias is a number below {MOST:,}"),
            (self.best_of == 0 or self.n <= self.best_of <= 64, "best_of is at least n and at most 64"),
        ):
            if not ok:
                raise UsageError(what, "see cacheblend ask --help")

    @property
    def _added(self) -> tuple[float, ...]:
        return self.temperature, self.repetition_penalty, self.presence_penalty, self.frequency_penalty

    @property
    def has_form(self) -> bool:
        return self.json_schema is not None or self.regex is not None

    @property
    def penalises(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of the chosen token and of the likeliest alternatives, before penalties and temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class AskOptions:
    """How questions are answered, beside the settings, and what is told of the answers; see `cacheblend ask --help`.

    json_schema: its text. explain, tokens: tell of layers and of the prompt's text, and of each token of the chunks."""

    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    verify: bool = False
    confirm: bool = False
    save: bool = True
    ids: bool = False
    explain: bool = False
    tokens: bool = False

    @property
    def sampled(self) -> dict[str, Any]:
        """Fields of SamplingParams."""
        return {name: getattr(self, name) for name in ("stop", "logprobs", "json_schema", "regex")}


@dataclass(frozen=True)
class AskRequest:
    """keys: of the chunks, in hex; None to search them in the scope. history: what was said before, by the user and the model
    in turn."""

    question: str
    keys: tuple[str, ...] | None
    resolved: Resolved
    scope: Scope = EVERYTHING
    history: tuple[str, ...] = ()
    options: AskOptions = AskOptions()

    @property
    def wire(self) -> dict[str, Any]:
        """As JSON has it. A directory of weights is named so that an engine, which stands elsewhere, finds it."""
        told: dict[str, Any] = to_builtins(self)
        named = self.resolved.settings.embeddings
        if named and Path(named).expanduser().is_dir():
            told["resolved"]["settings"]["embeddings"] = os.path.abspath(Path(named).expanduser())
        return told

    @classmethod
    def from_wire(cls, told: dict[str, Any]) -> AskRequest:
        return convert(told, cls)


class Status(IntEnum):
    DECODE = -1
    PREFILL = 0
    CHECK = 1
    AFTER_CHECK = 2


@dataclass(frozen=True)
class LayerReport:
    """One layer of a blended prefill. fresh: reusable tokens whose KV or hidden state was computed at this layer."""

    layer: int
    status: Status
    rows: int
    fresh: int


@dataclass(frozen=True)
class ChunkUse:
    """How one chunk of the prompt got its KV. recomputed: its tokens whose KV was computed in the last layers. start: its
    first position. place, headings: where in the source a reader finds it, see the store's Locator. rank: its place
    among the chunks that were searched, from 1, None if it was named. attention: its share of the answer's attention to all
    chunks, None if that was not watched (see engine/attention.py)."""

    id: str
    source: str
    tokens: int
    status: str
    recomputed: int
    start: int = 0
    place: str = ""
    headings: tuple[str, ...] = ()
    rank: int | None = None
    attention: float | None = None


@dataclass(frozen=True)
class TokenUse:
    """A token of a chunk: its text, and its KV's kind: "exact", "reused", "recomputed" or "computed"."""

    text: str
    kind: str


@dataclass(frozen=True)
class Timing:
    """Seconds. process_s: from the start of the process to the first token; ttft_s: to it from the loaded model and the
    known question."""

    process_s: float
    model_load_s: float
    kv_load_s: float
    kv_load_stall_s: float
    prefill_s: float
    ttft_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True)
class Verification:
    """Blended KV compared with a full prefill of the same token ids.

    kl: KL(full || blended) at the first answer token, nats. top1_agree: whether both have the same most likely first token.
    answer_kl, answer_top1: mean KL and share of equal most likely tokens over full prefill's greedy answer (answer_tokens
    tokens), each token fed to both (teacher-forced). first_difference: index of the first token at which the two greedy
    answers differ, None if they are the same (same_answer).
    """

    kl: float
    top1_agree: bool
    full_ttft_s: float
    answer_kl: float
    answer_top1: float
    answer_tokens: int
    same_answer: bool
    first_difference: int | None


@dataclass(frozen=True)
class Confirmation:
    """The answer from blended KV beside the one a full prefill gives, drawn with the same seed. first_difference: the number
    of its first token that is another, None where there is none. blended_answer: the text that was streamed.
    full_ttft_s: of the full prefill; seconds: of all that confirming took."""

    confirmed: bool
    first_difference: int | None
    blended_answer: str
    full_ttft_s: float
    seconds: float


@dataclass(frozen=True)
class Risk:
    """The probability, as estimated, that one of the tokens drawn over blended KV is another than a full prefill's; there are
    `tokens` of them. Where the next would have taken it above the limit, that number is full_prefill_at: a full prefill, which
    took `seconds`, goes on from there."""

    estimate: float
    limit: float
    tokens: int = 0
    full_prefill_at: int | None = None
    seconds: float = 0.0


@dataclass
class Answer:
    """text: what was streamed of the answer; reasoning: what stood between think tags before it. notes: messages for people.
    layers: the per-layer report. auto: what the loading controller decided, with --ratio auto. hot_tokens: those at the beginning
    of the prompt whose KV the engine still held from another one. prompt_logprobs: of the prompt's tokens from the second on,
    where they were asked for. chosen: positions of the prompt whose stored KV was computed again."""

    text: str
    finish_reason: str
    model: str
    mode: str
    selector: str
    ratio: float
    prompt_tokens: int
    cached_tokens: int
    exact_tokens: int
    recomputed_tokens: int
    recompute_fraction: float
    chunks: list[ChunkUse]
    timing: Timing
    kv_bytes_loaded: int
    prompt_ids: list[int]
    generated_ids: list[int]
    verify: Verification | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    layers: list[LayerReport] = field(default_factory=list)
    auto: Any = None
    confirmation: Confirmation | None = None
    risk: Risk | None = None
    reasoning: str = ""
    reasoning_tokens: int = 0
    hot_tokens: int = 0
    chosen: list[int] = field(default_factory=list)

    def kinds(self, chunk: ChunkUse) -> list[str]:
        """Of each token of one of the chunks, see TokenUse."""
        if chunk.status != "blended":
            return [chunk.status] * chunk.tokens
        chosen = set(self.chosen)
        places = range(chunk.start, chunk.start + chunk.tokens)
        return ["recomputed" if place in chosen else "reused" for place in places]

    def to_dict(self, *, ids: bool = False, explain: bool = False) -> dict[str, Any]:
        """The JSON object of `ask --json`."""
        out: dict[str, Any] = {
            "answer": self.text,
            "finish_reason": self.finish_reason,
            "model": self.model,
            "mode": self.mode,
            "selector": self.selector,
            "ratio": self.ratio,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "exact_tokens": self.exact_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "recompute_fraction": round(self.recompute_fraction, 6),
            "generated_tokens": len(self.generated_ids),
            "chunks": [vars(c) for c in self.chunks],
            "timing": {name: round(value, 6) for name, value in vars(self.timing).items()},
            "kv_bytes_loaded": self.kv_bytes_loaded,
            "notes": self.notes,
        }
        if self.hot_tokens:
            out["hot_tokens"] = self.hot_tokens
        if self.reasoning:
            out |= {"reasoning": self.reasoning, "reasoning_tokens": self.reasoning_tokens}
        if self.auto:
            out["auto"] = self.auto.to_dict()
        if self.verify:
            out["verify"] = vars(self.verify)
        if self.confirmation:
            out["confirm"] = vars(self.confirmation)
        if self.risk:
            out["risk"] = vars(self.risk)
        for name, found in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if found:
                out[name] = [{"id": p.token_id, "logprob": p.logprob, "top": list(p.top)} for p in found]
        if ids:
            out |= {"prompt_ids": self.prompt_ids, "generated_ids": self.generated_ids}
        if explain:
            out["layers"] = [{**vars(report), "status": report.status.name} for report in self.layers]
        return out
