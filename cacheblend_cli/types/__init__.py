"""The types of a request and its answer: the same in the command line, over HTTP and in Python. Imports neither torch
nor numpy."""

from cacheblend_cli.types.answer import (
    Answer,
    AskPlan,
    ChunkUse,
    Confirmation,
    FinishReason,
    LayerReport,
    LayerStatus,
    Risk,
    Timing,
    TokenUse,
    Verification,
)  # fmt: skip
from cacheblend_cli.types.blend import BlendParams, parse_checks, parse_layers
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
    "EVERYTHING", "MAX_STOPS", "MAX_STOP_CHARS", "MODEL_SAMPLED", "MOST", "NUM_HITS", "PLAIN", "Answer", "AskOptions", "AskPlan", "AskRequest", "BlendParams",
    "ChunkUse", "Confirmation", "FinishReason", "LayerReport", "Risk", "SamplingParams", "Scope", "SearchParams", "LayerStatus", "TextDocument",
    "Timing", "TokenLogprob", "TokenUse", "Verification", "ask_request", "model_sampled", "overridden", "parse_checks",
    "parse_layers", "sampling_of",
]  # fmt: skip
