"""Find answers that repeat themselves without an end, as greedy answers of small models do."""

from __future__ import annotations

from collections.abc import Sequence

COPIES = 3
MIN_TOKENS = 32  # of all copies: a ruled line or a row of zeros may be long
MAX_PERIOD = 256  # tokens of what is repeated
EVERY = 4  # tokens between looks


def repeats_itself(ids: Sequence[int]) -> bool:
    """Return whether the tokens end in COPIES or more copies of the same run, MIN_TOKENS of them at least.

    Looks at every fourth length only. llama.cpp has no such rule; Ollama ends an answer after thirty equal tokens.
    """
    if len(ids) % EVERY or len(ids) < MIN_TOKENS:
        return False
    return any(
        _ends_in_copies(ids, period, max(COPIES * period, MIN_TOKENS))
        for period in range(1, min(len(ids) // COPIES, MAX_PERIOD) + 1)
        if ids[-1] == ids[-1 - period]
    )


def _ends_in_copies(ids: Sequence[int], period: int, num_tokens: int) -> bool:
    end = len(ids)
    return num_tokens <= end and all(ids[i] == ids[i - period] for i in range(end - num_tokens + period, end))
