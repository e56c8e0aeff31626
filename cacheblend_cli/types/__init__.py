"""The types of a request and its answer: the same in the command line, over HTTP and in Python. Imports neither torch
nor numpy."""

from cacheblend_cli.types.answer import (
    FULL_IS_FASTER,
    NEVER_CHECKED,
    NO_RATIO,
    Answer,
    AskPlan,
    ChunkPlan,
    ChunkUse,
    Claim,
    ClaimKind,
    Confirmation,
    FinishReason,
    LayerReport,
    LayerStatus,
    TierUse,
    Timing,
    TokenUse,
    Verification,
    unsupported_line,
)  # fmt: skip
from cacheblend_cli.types.auto import AutoReport, Decision, Estimate, Speeds, Workload
from cacheblend_cli.types.blend import BlendParams
from cacheblend_cli.types.events import EVENTS, AnswerEvent, CompletedAnswer, Notes, Piece, Progress
from cacheblend_cli.types.request import (
    EVERYTHING,
    NUM_HITS,
    PLAIN,
    AskOptions,
    AskRequest,
    Scope,
    SearchParams,
    TextDocument,
    ask_request,
    overridden,
)
from cacheblend_cli.types.sampling import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    MODEL_SAMPLED,
    MOST,
    SamplingParams,
    TokenLogprob,
    model_sampled,
    sampling_of,
)  # fmt: skip

__all__ = [
    "EVENTS", "EVERYTHING", "FULL_IS_FASTER", "MAX_STOPS", "MAX_STOP_CHARS", "MODEL_SAMPLED", "MOST", "NEVER_CHECKED", "NO_RATIO", "NUM_HITS", "PLAIN", "Answer",
    "AnswerEvent", "AskOptions", "AskPlan", "AskRequest", "AutoReport", "BlendParams", "ChunkPlan", "ChunkUse", "Claim", "ClaimKind",
    "CompletedAnswer", "Confirmation", "Decision", "Estimate", "FinishReason", "LayerReport", "LayerStatus",
    "Notes", "Piece", "Progress", "SamplingParams", "Scope", "SearchParams", "Speeds", "TextDocument",
    "TierUse", "Timing", "TokenLogprob", "TokenUse", "Verification", "Workload", "ask_request", "model_sampled",
    "overridden", "sampling_of", "unsupported_line",
]  # fmt: skip
