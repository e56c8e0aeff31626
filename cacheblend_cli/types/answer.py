"""Answer: generated text, origin of the prompt's KV, and durations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

from cacheblend_cli.types.auto import AutoReport
from cacheblend_cli.types.sampling import TokenLogprob

FinishReason = Literal["stop", "length", "repetition", "cancelled", "deadline", "handed_over"]


class LayerStatus(IntEnum):
    PREFILL = 0
    CHECK = 1
    AFTER_CHECK = 2


@dataclass(frozen=True)
class LayerReport:
    """One layer of a blended prefill."""

    layer: int  # number of the layer, from 0
    status: LayerStatus  # PREFILL, CHECK or AFTER_CHECK
    rows: int  # tokens that passed through the layer
    fresh: int  # reusable tokens whose KV or hidden state was computed at this layer


@dataclass(frozen=True)
class ChunkUse:
    """Use of one chunk of the prompt."""

    id: str  # content hash, hex
    source: str  # path or id of the document
    tokens: int  # length
    status: str  # "exact": used as stored; "blended": stored, partly recomputed; "computed": not stored
    recomputed: int  # tokens whose KV was computed in the last layers
    start: int = 0  # first position
    place: str = ""  # page, slide or lines in the source; "" if unknown
    headings: tuple[str, ...] = ()  # title and headings above the chunk, outermost first
    rank: int | None = None  # among the chunks that were found, from 1; None for a named chunk
    also_in: tuple[str, ...] = ()  # other documents with the same text
    attention: float | None = None  # share of the answer's attention to all chunks, 0 to 1; None if not measured


@dataclass(frozen=True)
class TokenUse:
    """A token of a chunk: its text, and its KV's kind: "exact", "reused", "recomputed" or "computed"."""

    text: str
    kind: str


_MOST_SHOWN = 8  # claims in a line
ClaimKind = Literal["number", "date", "time", "code", "address", "quote", "name"]


@dataclass(frozen=True)
class Claim:
    """A part of an answer that was looked up in the texts of its prompt."""

    text: str  # part of the answer
    start: int  # its place in the answer's text, in code points
    end: int  # end of it
    kind: ClaimKind  # number (with its unit), date, time, code, address, quote or name
    found: bool  # a text of the prompt has it: a chunk, the question or an earlier turn
    chunk: int | None = None  # index in `chunks`, None if no chunk has it; of several, the one with most claims
    place: str = ""  # page, slide or lines in the chunk's source; "" if unknown


def unsupported_line(claims: Iterable[Claim]) -> str:
    """Return a line with the first claims that are not in the sources, "" if all are."""
    missing = (f'"{c.text}"' if c.kind in ("name", "quote") else c.text for c in claims if not c.found)
    texts = list(dict.fromkeys(missing))
    more = f" and {len(texts) - _MOST_SHOWN} more" if len(texts) > _MOST_SHOWN else ""
    return f"not in the sources: {', '.join(texts[:_MOST_SHOWN])}{more}" if texts else ""


@dataclass(frozen=True)
class Timing:
    """Durations in seconds."""

    process_s: float  # from the start of the process to the first token
    model_load_s: float  # loading the model; 0 in a running engine
    kv_load_s: float  # reading stored KV, mostly while layers are computed
    kv_load_stall_s: float  # part of the prefill in which computing waited for stored KV
    prefill_s: float  # prefill on the device, waits for KV included
    ttft_s: float  # from the loaded model and the known question to the first token
    decode_tokens_per_s: float  # tokens after the first, per second
    full_ttft_s: float | None = None  # a full prefill's, estimated; with --verbose, --explain or --ratio auto


@dataclass(frozen=True)
class Verification:
    """Blended KV compared with a full prefill, which is fed the answer's tokens (teacher-forced), up to the first
    difference, since until then both have the same context."""

    kl: float  # KL(full || blended) at the first token, nats
    top1_agree: bool  # both have the same most likely first token
    full_ttft_s: float  # seconds from the known question to a full prefill's first token
    answer_kl: float  # mean KL over the tokens up to the first difference, nats
    answer_top1: float  # share of these tokens at which both have the same most likely one
    answer_tokens: int  # tokens of the answer
    same_answer: bool  # no token differs
    first_difference: int | None  # index of the first token at which the most likely ones differ


@dataclass(frozen=True)
class Confirmation:
    """The answer from blended KV beside a full prefill's answer, drawn with the same seed."""

    confirmed: bool  # the full prefill's answer is the same
    first_difference: int | None  # index of the first token that differs, None if all are the same
    blended_answer: str  # the text that was streamed
    full_ttft_s: float  # seconds from the known question to the full prefill's first token
    seconds: float  # duration of confirming


@dataclass(frozen=True)
class TierUse:
    """Counts of a tier for one prompt."""

    asked: int  # chunks without KV in the store
    found: int  # asked chunks that the tier has
    taken: int  # chunks loaded whole
    lost: int  # chunks found, but late, unreadable or damaged
    num_bytes: int
    seconds: float  # from the first request to the last answer


NEVER_CHECKED = "models check was not run for this model"
"""Reason in `Answer.ratio_from` for a default ratio."""
NO_RATIO = "none: recurrent layers need every token in order, so nothing is blended"
"""`Answer.ratio_from` of a model with recurrent layers: what its prompt begins with is restored."""
SCHEMA_VERSION = 1
"""Version of the JSON form, raised when a key is removed or changes its meaning. New keys do not raise it."""
_REPORTED = (
    "finish_reason", "model", "mode", "selector", "ratio", "ratio_from", "prompt_tokens", "cached_tokens", "exact_tokens",
    "recomputed_tokens",
)  # fmt: skip


@dataclass
class Answer:
    """An answer. Its JSON form (`to_dict`) is that of `ask --json`."""

    text: str  # the streamed part of the answer
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
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # from the prompt's second token on, if requested
    claims: list[Claim] = field(default_factory=list)  # what could be looked up, in the order of the text
    notes: list[str] = field(default_factory=list)  # messages for people
    layers: list[LayerReport] = field(default_factory=list)
    auto: AutoReport | None = None  # decision of the loading controller, with --ratio auto
    confirmation: Confirmation | None = None
    reasoning: str = ""  # text between think tags before the answer
    reasoning_tokens: int = 0
    prefix_cache_tokens: int = 0  # first tokens of the prompt whose KV the engine still held from another prompt
    chosen: list[int] = field(default_factory=list)  # positions of the prompt whose stored KV was computed again
    tier: TierUse | None = None  # use of a shared tier, if it was asked
    weak_match: bool = False  # even the best chunk found matches the question weakly
    hits_cut: int = 0  # hits left out because they match far less well than the best one
    hits_repeated: int = 0  # hits left out because a better one contains their text
    accepted_tokens: int = 0  # generated tokens that prompt lookup had proposed, so that they took no step of their own
    ratio_from: str = "given"  # "given", "auto", or "model", "default" or "none" with the reason, see engine/profile.py

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens per decode step; the prefill gives the first one. 0 for an answer of one token."""
        decoded = len(self.generated_ids) - 1
        return decoded / (decoded - self.accepted_tokens) if decoded > 0 else 0.0

    def kinds(self, chunk: ChunkUse) -> list[str]:
        """Return the kind of each token of a chunk, see TokenUse."""
        if chunk.status != "blended":
            return [chunk.status] * chunk.tokens
        chosen = set(self.chosen)
        places = range(chunk.start, chunk.start + chunk.tokens)
        return ["recomputed" if place in chosen else "reused" for place in places]

    def to_dict(self, *, ids: bool = False, explain: bool = False) -> dict[str, Any]:
        """Return the JSON object of `ask --json`."""
        out: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "answer": self.text} | {
            name: getattr(self, name) for name in _REPORTED
        }
        out |= {
            "recompute_fraction": round(self.recompute_fraction, 6),
            "generated_tokens": len(self.generated_ids),
            "accepted_tokens": self.accepted_tokens,
            "tokens_per_step": round(self.tokens_per_step, 3),
            "chunks": [vars(c) for c in self.chunks],
            "claims": [vars(c) for c in self.claims],
            "timing": {name: value if value is None else round(value, 6) for name, value in vars(self.timing).items()},
            "kv_bytes_loaded": self.kv_bytes_loaded,
            "weak_match": self.weak_match,
            "hits_cut": self.hits_cut,
            "hits_repeated": self.hits_repeated,
            "notes": self.notes,
        }
        if self.prefix_cache_tokens:
            out["prefix_cache_tokens"] = self.prefix_cache_tokens
        if self.reasoning:
            out |= {"reasoning": self.reasoning, "reasoning_tokens": self.reasoning_tokens}
        if self.auto:
            out["auto"] = self.auto.to_dict()
        reports = ("tier", self.tier), ("verify", self.verify), ("confirm", self.confirmation)
        out |= {name: vars(report) for name, report in reports if report}
        for name, found in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if found:
                out[name] = [{"id": p.token_id, "logprob": p.logprob, "top": list(p.top)} for p in found]
        if ids:
            out |= {"prompt_ids": self.prompt_ids, "generated_ids": self.generated_ids}
        if explain:
            out["layers"] = [{**vars(layer), "status": layer.status.name} for layer in self.layers]
        return out


@dataclass(frozen=True)
class ChunkPlan:
    """A chunk of a planned prompt."""

    id: str
    source: str
    tokens: int
    status: str


@dataclass(frozen=True)
class AskPlan:
    """Prediction of running a request: tokens by kind, bytes of KV to load, the decision of --ratio auto, and messages
    for users. Its JSON form (`to_dict`) is that of `ask --dry-run --json`."""

    prompt_tokens: int
    cached_tokens: int
    exact_tokens: int
    fresh_tokens: int
    kv_bytes: int
    chunks: list[ChunkPlan]
    auto: AutoReport | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        auto = None if self.auto is None else self.auto.to_dict()
        return {**vars(self), "chunks": [vars(chunk) for chunk in self.chunks], "auto": auto}
