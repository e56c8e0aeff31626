"""Features of a request, each by a hook of `engine/core/hooks.py`, and proposals of tokens. The core knows none of
them."""

from cacheblend_cli.engine.core.core import Features
from cacheblend_cli.engine.features import (
    attention_shares,
    auto_ratio,
    claims,
    full_check,
    hand_over,
    missing_chunks,
    prompt_logprobs,
)
from cacheblend_cli.engine.features.speculation import Speculation

FEATURES = Features(
    (
        auto_ratio.admit,
        full_check.admit,
        prompt_logprobs.admit,
        attention_shares.admit,
        claims.admit,
        missing_chunks.admit,
        hand_over.admit,
    ),
    Speculation.of,
)
