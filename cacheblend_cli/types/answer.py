"""Answer: what was generated, how its prompt got its KV, and how long that took."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

from cacheblend_cli.types.sampling import TokenLogprob

FinishReason = Literal["stop", "length", "repetition", "cancelled", "deadline", "handed_over"]


class LayerStatus(IntEnum):
    DECODE = -1
    PREFILL = 0
    CHECK = 1
    AFTER_CHECK = 2


@dataclass(frozen=True)
class LayerReport:
    """One layer of a blended prefill. fresh: reusable tokens whose KV or hidden state was computed at this layer."""

    layer: int
    status: LayerStatus
    rows: int
    fresh: int


@dataclass(frozen=True)
class ChunkUse:
    """Use of one chunk of the prompt. recomputed: its tokens whose KV was computed in the last layers. start: its first
    position. place, headings: where in the source a reader finds it, see the store's Locator. rank: its place among the
    chunks that were searched, from 1, None if it was named. attention: its share of the answer's attention to all
    chunks, None if that was not watched (see engine/worker/attention.py)."""

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
    """Blended KV compared with a full prefill, which is fed the answer's tokens (teacher-forced), up to the first
    difference: so far both have the same context."""

    kl: float  # KL(full || blended) at the first token, nats
    top1_agree: bool  # both have the same most likely first token
    full_ttft_s: float
    answer_kl: float  # mean KL over the tokens up to the first difference
    answer_top1: float  # share of these tokens at which both have the same most likely one
    answer_tokens: int  # tokens of the answer
    same_answer: bool
    first_difference: int | None  # index of the first token at which the most likely ones differ


@dataclass(frozen=True)
class Confirmation:
    """The answer from blended KV beside the one a full prefill gives, drawn with the same seed. first_difference: the
    number of its first token that is another, None where there is none. blended_answer: the text that was streamed.
    full_ttft_s: of the full prefill; seconds: of all that confirming took."""

    confirmed: bool
    first_difference: int | None
    blended_answer: str
    full_ttft_s: float
    seconds: float


@dataclass(frozen=True)
class Risk:
    """Estimated probability that one of the answer's tokens differs from a full prefill's. Where it exceeded the limit,
    the answer is a full prefill's."""

    estimate: float  # 0 for a full prefill's answer
    limit: float
    tokens: int = 0  # tokens that were judged
    full_prefill_at: int | None = None  # 0 where the answer is a full prefill's
    seconds: float = 0.0  # time that it took


@dataclass
class Answer:
    """text: what was streamed of the answer; reasoning: what stood between think tags before it. notes: messages for
    people. weak_match: whether even the best chunk that was found matches the question weakly. hits_cut: number of hits
    left out because they match far less well than the best one. layers: the per-layer report. auto: what the loading
    controller decided, with --ratio auto. prefix_cache_tokens: those at the beginning of the prompt whose KV the engine
    still held from another one. prompt_logprobs: of the prompt's tokens from the second on, where they were asked for.
    tier: what a shared tier did for the prompt, if it was asked. chosen: positions of the prompt whose stored KV was
    computed again. ratio_from: "given", "auto", or "model" or "default" with the reason, see engine/profile.py."""

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
    prefix_cache_tokens: int = 0
    chosen: list[int] = field(default_factory=list)
    tier: Any = None
    weak_match: bool = False
    hits_cut: int = 0
    ratio_from: str = "given"

    def kinds(self, chunk: ChunkUse) -> list[str]:
        """Return the kind of each token of a chunk, see TokenUse."""
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
            "ratio_from": self.ratio_from,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "exact_tokens": self.exact_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "recompute_fraction": round(self.recompute_fraction, 6),
            "generated_tokens": len(self.generated_ids),
            "chunks": [vars(c) for c in self.chunks],
            "timing": {name: round(value, 6) for name, value in vars(self.timing).items()},
            "kv_bytes_loaded": self.kv_bytes_loaded,
            "weak_match": self.weak_match,
            "hits_cut": self.hits_cut,
            "notes": self.notes,
        }
        if self.prefix_cache_tokens:
            out["prefix_cache_tokens"] = self.prefix_cache_tokens
        if self.reasoning:
            out |= {"reasoning": self.reasoning, "reasoning_tokens": self.reasoning_tokens}
        if self.tier:
            out["tier"] = self.tier._asdict()
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


@dataclass(frozen=True)
class AskPlan:
    """Prediction of running a request: tokens by kind, bytes of KV to load, the decision of --ratio auto (see
    blend/cost.py: AutoReport), and messages for users."""

    prompt_tokens: int
    cached_tokens: int
    exact_tokens: int
    fresh_tokens: int
    kv_bytes: int
    chunks: list[dict[str, Any]]
    auto: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
