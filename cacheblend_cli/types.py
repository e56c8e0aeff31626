"""The types of a request and its answer: the same in the command line, over HTTP and in Python. Imports neither torch nor numpy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

from msgspec import convert, to_builtins

from cacheblend_cli.corpus.scopes import EVERYTHING, Scope
from cacheblend_cli.errors import UsageError
from cacheblend_cli.settings import Resolved, Settings, of_settings

PLAIN = "{chunks}{question}"
"""A prompt that does not mention documents."""
MODES = ("blend", "full", "reuse")
DEVIATIONS = ("v", "k", "kv")
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
class BlendParams:
    """How stored KV is used. mode: blend, full or reuse. ratio: share of the reusable, inexact tokens to recompute; (layer, ratio)
    pairs in `checks` replace ratio and check_layer (gradual filtering). nucleus > 0: fewer tokens, when that share of the total
    score is covered. probe_layers: first and last layer whose attention `query` and `draft` observe, None for the middle half.
    draft_tokens: length of the answer that `draft` drafts. correction: of KV that is not recomputed, see blend/corrections.py, or
    "none". max_risk: limit of the estimated risk of another answer than a full prefill's, see engine/gate.py; None for no limit.

    Names of selectors and corrections, and layers, are checked against the model, see blend/policy.py: policy_of.
    """

    mode: str = "blend"
    ratio: float = 0.15
    selector: str = "query"
    deviation: str = "k"
    check_layer: int = 1
    block: int = 1
    seed: int = 0
    checks: tuple[tuple[int, float], ...] = ()
    nucleus: float = 0.0
    probe_layers: tuple[int, int] | None = None
    draft_tokens: int = 8
    correction: str = "regression"
    max_risk: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"unknown mode {self.mode!r}", f"known: {', '.join(MODES)}")
        if self.deviation not in DEVIATIONS:
            raise UsageError(f"unknown deviation {self.deviation!r}", f"known: {', '.join(DEVIATIONS)}")
        for _, ratio in self.checks or ((self.check_layer, self.ratio),):
            if not 0 <= ratio <= 1:
                raise UsageError(f"--ratio {ratio} is not between 0 and 1", "0.15 recomputes 15 % of the tokens")
        if not 0 <= self.nucleus <= 1:
            raise UsageError(f"--nucleus {self.nucleus} is not between 0 and 1", "0 is off")
        if self.max_risk is not None and not 0 <= self.max_risk <= 1:
            raise UsageError(
                f"--max-risk {self.max_risk:g} is not between 0 and 1", "0.1: one answer in ten may differ"
            )
        for name, count in (("block", self.block), ("draft-tokens", self.draft_tokens)):
            if not 1 <= count < 2**63:
                raise UsageError(f"--{name} {count} is not 1 or more, or too large", "see: cacheblend ask --help")
        layers, ratios = [c[0] for c in self.checks], [c[1] for c in self.checks]
        if layers != sorted(set(layers)) or ratios != sorted(ratios, reverse=True):
            raise UsageError("check layers must rise and their ratios fall", "for example 1:0.3,4:0.15")

    @classmethod
    def of(cls, settings: Settings) -> BlendParams:
        """Return the settings' blending; with --ratio auto, at the lower bound of the ratio. Raises UsageError."""
        if settings.max_risk is not None and isinstance(settings.ratio, str):
            raise UsageError("--max-risk is fitted for one ratio, and --ratio is auto", "give a number to --ratio")
        return of_settings(
            cls,
            settings,
            ratio=settings.ratio_floor if isinstance(settings.ratio, str) else settings.ratio,
            seed=settings.seed or 0,
            checks=parse_checks(settings.gradual),
            probe_layers=parse_layers(settings.probe_layers),
        )

    @property
    def drafts(self) -> bool:
        """Whether the selector drafts some of the answer behind the prompt."""
        return any(part.partition(":")[0] == "draft" for part in self.selector.split("+"))

    def effective_ratio(self) -> float:
        """Ratio of the last check, which holds in most layers."""
        if self.mode == "full" or self.selector == "all":
            return 1.0
        if self.mode == "reuse" or self.selector == "none":
            return 0.0
        return self.checks[-1][1] if self.checks else self.ratio


def parse_checks(text: str) -> tuple[tuple[int, float], ...]:
    """Parse "1:0.3,4:0.15" into (layer, ratio) pairs; "" is none. Raises UsageError."""
    try:
        pairs = [part.split(":") for part in text.split(",") if text]
        return tuple((int(layer), float(ratio)) for layer, ratio in pairs)
    except ValueError:
        raise UsageError(f"--gradual {text!r} is not LAYER:RATIO,...", "for example 1:0.3,4:0.15") from None


def parse_layers(text: str) -> tuple[int, int] | None:
    """Parse "2-4" into a first and a last layer, "3" into one; "" is None. Raises UsageError."""
    try:
        first, _, last = text.partition("-")
        return (int(first), int(last or first)) if text else None
    except ValueError:
        raise UsageError(f"--probe-layers {text!r} is not FIRST-LAST", "for example 2-4") from None


@dataclass(frozen=True)
class SearchParams:
    """How to search for chunks. k: number of chunks. scope: documents to search. by: "words", "meaning", "both", or "auto": both if
    there are embedding weights. embeddings: these weights, "" for the installed ones. min_score, expand, context, order: see
    corpus/search.py: Lookup. query: text to search for, "" for the question. optional: answer without chunks if nothing is found.
    """

    k: int = 5
    scope: Scope = EVERYTHING
    by: str = "auto"
    embeddings: str = ""
    min_score: float = 0.0
    expand: int = 0
    context: str = "document"
    order: str = "exact"
    query: str = ""
    optional: bool = False

    @classmethod
    def of(cls, settings: Settings, scope: Scope = EVERYTHING) -> SearchParams:
        return of_settings(cls, settings, k=settings.top_k, by=settings.search, scope=scope)


@dataclass(frozen=True)
class TextDocument:
    """A document that comes with a question. id: its name on the wire."""

    text: str
    title: str | None = None
    id: str | None = None


@dataclass(frozen=True)
class AskOptions:
    """How a request is run, and what its answer reports.

    verify: compare with a full prefill. confirm: the answer is a full prefill's, after the blended one was streamed. auto: the
    loading controller chooses the ratio, at least `BlendParams.ratio`, or a full prefill. save: store the KV of chunks that had to
    be computed, if the store is open for writing. priority: lower runs first; among equals, in order of arrival. deadline_s:
    seconds from submission after which the request ends with finish_reason "deadline". ids, explain, tokens: report token ids,
    layers and the prompt's text, and each token of the chunks.
    """

    verify: bool = False
    confirm: bool = False
    auto: bool = False
    save: bool = True
    priority: int = 0
    deadline_s: float | None = None
    ids: bool = False
    explain: bool = False
    tokens: bool = False

    def __post_init__(self) -> None:
        if self.deadline_s is not None and self.deadline_s <= 0:
            raise UsageError(f"a deadline of {self.deadline_s:g} seconds has passed", "give a number above 0")


@dataclass(frozen=True)
class AskRequest:
    """A question, and all that its answer depends on. The prompt has the chunks of its documents first, then those with these keys, then those
    that are found.

    salt: keeps the chunks of a tenant separate. history: earlier messages, of user and model in turn. documents: cut and collected
    when they are first seen. tenant: owner of these documents. search: None to search for nothing. system: system prompt, None for
    the engine's. prompt: the user's message with {chunks} and {question}, None for the engine's; PLAIN does not mention documents. raw: no chat template. day: date that the template prints, None
    for the store's (see `Runtime.day`). model_sampling: fields of `sampling` that the model's generation_config.json decides.
    """

    question: str
    keys: Sequence[bytes] = ()
    blend: BlendParams = BlendParams()
    sampling: SamplingParams = SamplingParams()
    salt: str = ""
    history: tuple[str, ...] = ()
    documents: tuple[TextDocument, ...] = ()
    tenant: str = ""
    search: SearchParams | None = None
    system: str | None = None
    prompt: str | None = None
    raw: bool = False
    day: date | None = None
    model_sampling: tuple[str, ...] = ()
    options: AskOptions = AskOptions()

    def __post_init__(self) -> None:
        if self.options.confirm and max(self.sampling.n, self.sampling.best_of) > 1:
            raise UsageError("only one answer can be confirmed", "ask for one answer, or without --confirm")

    @classmethod
    def of(cls, resolved: Resolved, question: str, sampling: SamplingParams | None = None, **others: Any) -> AskRequest:
        """Return a request by the settings. sampling: None for the settings'. others: further fields. Raises UsageError."""
        settings = resolved.settings
        options = replace(others.pop("options", AskOptions()), auto=settings.ratio == "auto")
        return cls(
            question,
            blend=BlendParams.of(settings),
            sampling=sampling_of(settings) if sampling is None else sampling,
            options=options,
            **{"salt": settings.salt, "model_sampling": model_sampled(resolved)} | others,
        )

    @property
    def wire(self) -> dict[str, Any]:
        """JSON form. A directory of embedding weights becomes an absolute path, since the engine may run in another directory."""
        told: dict[str, Any] = to_builtins(self)
        weights = self.search.embeddings if self.search else ""
        if weights and Path(weights).expanduser().is_dir():
            told["search"]["embeddings"] = os.path.abspath(Path(weights).expanduser())
        return told

    @classmethod
    def from_wire(cls, told: dict[str, Any]) -> AskRequest:
        return convert(told, cls)


MODEL_SAMPLED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "sample_top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
"""Field of SamplingParams that generation_config.json may decide -> its setting."""


def ask_request(
    resolved: Resolved,
    question: str,
    keys: Sequence[bytes] = (),
    *,
    documents: Sequence[str] = (),
    search: int = 0,
    history: Sequence[str] = (),
    verify: bool = False,
    **settings: Any,
) -> AskRequest:
    """Return a program's request. documents: texts to answer from. search: how many chunks to search for. history: earlier messages, of
    user and model in turn. settings: override `resolved`. Raises UsageError."""
    resolved = overridden(resolved, settings)
    return AskRequest.of(
        resolved,
        question,
        keys=keys,
        history=tuple(history),
        documents=tuple(TextDocument(text) for text in documents),
        search=SearchParams.of(replace(resolved.settings, top_k=search)) if search else None,
        prompt=None if documents or keys or search else PLAIN,
        options=AskOptions(verify=verify),
    )


def overridden(resolved: Resolved, given: dict[str, Any]) -> Resolved:
    """Return the settings with other values. Raises UsageError for an unknown setting."""
    if unknown := given.keys() - resolved.origin.keys():
        raise UsageError(f"unknown setting {min(unknown)!r}", f"known: {', '.join(resolved.origin)}")
    return Resolved(replace(resolved.settings, **given), {**resolved.origin, **dict.fromkeys(given, "given")})


def model_sampled(resolved: Resolved) -> tuple[str, ...]:
    """Return the fields that --model-sampling leaves to the model: those that no flag, variable or file sets."""
    if not resolved.settings.model_sampling:
        return ()
    return tuple(name for name, setting in MODEL_SAMPLED.items() if resolved.origin[setting] == "default")


def sampling_of(settings: Settings, **others: Any) -> SamplingParams:
    """Return the settings' sampling. others: further fields. Raises UsageError."""
    return of_settings(SamplingParams, settings, top_k=settings.sample_top_k, **others)


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


@dataclass(frozen=True)
class AskPlan:
    """What running a request would do. Tokens by kind, bytes of KV to load, the decision of --ratio auto (see blend/cost.py: AutoReport),
    and messages for users."""

    prompt_tokens: int
    cached_tokens: int
    exact_tokens: int
    fresh_tokens: int
    kv_bytes: int
    chunks: list[dict[str, Any]]
    auto: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
