"""Features of a request, each by a hook of `engine/core/hooks.py`; the core knows none of them."""

from cacheblend_cli.engine.features import (
    attention_shares,
    auto_ratio,
    claims,
    full_check,
    hand_over,
    missing_chunks,
    prompt_logprobs,
)

FEATURES = (
    auto_ratio.admit,
    full_check.admit,
    prompt_logprobs.admit,
    attention_shares.admit,
    claims.admit,
    missing_chunks.admit,
    hand_over.admit,
)
