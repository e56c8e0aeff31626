"""Answer: generated text, origin of the prompt's KV, and durations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from cacheblend_cli.types.auto import AutoReport
from cacheblend_cli.types.sampling import TokenLogprob

FinishReason = Literal["stop", "length", "repetition", "cancelled", "deadline", "handed_over"]


class LayerStatus(StrEnum):
    PREFILL = "PREFILL"
    CHECK = "CHECK"
    AFTER_CHECK = "AFTER_CHECK"


@dataclass(frozen=True)
class LayerReport:
    """One layer of a blended prefill."""

    layer: int  # number of the layer, from 0
    status: LayerStatus  # work of the layer, see architecture.md
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
    kv_load_s: float  # loading stored KV, mostly while layers are computed
    kv_load_stall_s: float  # part of the prefill in which computing waited for stored KV
    prefill_s: float  # prefill on the device, waits for KV included, and on a GPU looking it up
    ttft_s: float  # from the loaded model and the known question to the first token
    decode_tokens_per_s: float  # tokens after the first, per second
    # a full prefill's, estimated; with --verbose, --explain or --ratio auto, and on a GPU
    full_ttft_s: float | None = None


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
    """Use of a shared tier by one prompt."""

    asked: int  # chunks without KV in the store
    found: int  # chunks that the tier has
    taken: int  # chunks loaded whole
    lost: int  # chunks found, but late, unreadable or damaged
    num_bytes: int  # bytes read
    seconds: float  # time from the first request to the last reply


NEVER_CHECKED = "models check was not run for this model"
"""Reason in `Answer.ratio_from` for a default ratio."""
NO_RATIO = "none: recurrent layers need every token in order, so nothing is blended"
"""`Answer.ratio_from` of a model with recurrent layers: what its prompt begins with is restored."""
FULL_IS_FASTER = "speed: on this GPU a full prefill is estimated to be faster"
"""`Answer.ratio_from` of a full prefill in place of a blended one."""
SCHEMA_VERSION = 1
"""Version of the JSON form, raised when a key is removed or changes its meaning. New keys do not raise it."""
OPTIONAL = (
    "prefix_cache_tokens", "reasoning", "reasoning_tokens", "auto", "tier", "verify", "confirm", "logprobs", "prompt_logprobs", "prompt_ids",
    "generated_ids", "layers",
)  # fmt: skip
"""Keys of the JSON form that are absent unless they apply, or were asked for."""


@dataclass
class Answer:
    """The object of `ask --json`, and each line of `ask --batch`."""

    # tools/answer_json.py makes the documentation of `to_dict` from the fields and their comments
    text: str  # text of the answer
    finish_reason: FinishReason  # why the answer ended
    model: str  # name of the model
    mode: str  # blend, full or reuse
    selector: str  # selector of the recomputed tokens
    ratio: float  # share of the reused, inexact tokens to recompute, as requested
    prompt_tokens: int  # tokens of the prompt
    cached_tokens: int  # prompt tokens with stored KV
    exact_tokens: int  # cached tokens whose KV is right as stored
    recomputed_tokens: int  # cached tokens that were recomputed
    recompute_fraction: float  # work done on the reusable tokens, as a share of computing all of them, 0 to 1
    chunks: list[ChunkUse]  # chunks, in the order of the prompt
    timing: Timing  # durations
    kv_bytes_loaded: int  # bytes of stored KV that were loaded
    prompt_ids: list[int]  # with --ids: token ids of the prompt
    generated_ids: list[int]  # with --ids: token ids of the answer
    verify: Verification | None = None  # with --verify
    logprobs: list[TokenLogprob] = field(default_factory=list)  # with --logprobs: tokens of the answer
    # tokens of the prompt from the second on, if requested
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    # figures, names and quotations of the answer, looked up in the texts of the prompt
    claims: list[Claim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # messages for people; their wording may change
    layers: list[LayerReport] = field(default_factory=list)  # with --explain
    auto: AutoReport | None = None  # with --ratio auto, and if a GPU computes in full because that is faster
    confirmation: Confirmation | None = None  # with --confirm, or --on-unsupported confirm if it was needed
    reasoning: str = ""  # text of the reasoning before the answer
    reasoning_tokens: int = 0  # tokens of the reasoning
    prefix_cache_tokens: int = 0  # leading prompt tokens whose KV the engine still held
    chosen: list[int] = field(default_factory=list)  # positions of the prompt whose stored KV was computed again
    tier: TierUse | None = None  # with --tier, if the store lacked KV
    weak_match: bool = False  # even the best chunk found matches the question weakly
    hits_cut: int = 0  # hits left out because they match far less well than the best one
    hits_repeated: int = 0  # hits left out because a better one contains their text
    # generated tokens that prompt lookup had proposed: they took no decode step of their own
    accepted_tokens: int = 0
    ratio_from: str = "given"  # origin of the ratio: given, auto, or model, default or speed with the reason
    schema_version: int = SCHEMA_VERSION  # 1; raised when a field is removed or changes its meaning

    @property
    def generated_tokens(self) -> int:
        """Tokens of the answer and its reasoning."""
        return len(self.generated_ids)

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens after the first, per decode step; 0 for an answer of one token."""
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
        timing = {name: value if value is None else round(value, 6) for name, value in vars(self.timing).items()}
        reports = {"tier": self.tier, "verify": self.verify, "confirm": self.confirmation}
        lists = {name: getattr(self, name) for name in ("chunks", "claims", "logprobs", "prompt_logprobs")}
        own = {name: value for name, value in vars(self).items() if name not in ("text", "chosen", "confirmation")}
        out = {"schema_version": self.schema_version, "answer": self.text} | own
        out |= {
            "recompute_fraction": round(self.recompute_fraction, 6),
            "generated_tokens": self.generated_tokens,
            "tokens_per_step": round(self.tokens_per_step, 3),
            "timing": timing,
            "auto": self.auto and self.auto.to_dict(),
            "layers": [vars(layer) for layer in self.layers],
            **{name: report and vars(report) for name, report in reports.items()},
            **{name: [vars(part) for part in parts] for name, parts in lists.items()},
        }
        asked = {"prompt_ids": ids, "generated_ids": ids, "layers": explain}
        return {name: value for name, value in out.items() if asked.get(name, value or name not in OPTIONAL)}


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
