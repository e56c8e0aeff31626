"""Events of a request, limits of an engine, and its statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cacheblend_cli.errors import UsageError
from cacheblend_cli.types import Answer, Piece, Progress, TokenLogprob

Early = Literal["cancelled", "deadline"]


@dataclass(frozen=True)
class Token:
    """A token of an answer, if log-probabilities were requested. It comes before the piece that it completes."""

    logprob: TokenLogprob
    index: int = 0


@dataclass(frozen=True)
class Done:
    """The end of a request."""

    answers: list[Answer]  # in order; partial if it ended early, none if it had not begun
    ended: Early | None = None  # why it ended early


@dataclass(frozen=True)
class Failed:
    """The end of a failed request."""

    error: Exception  # CacheBlendError or StoreError, with message, hint and exit_code


@dataclass(frozen=True)
class HandedOver:
    """The connector has the prompt's KV. Done follows once missing chunks are stored."""

    report: Answer  # without tokens


Event = Progress | Piece | Token | HandedOver | Done | Failed
OnEvent = Callable[[Event], None]
Say = Callable[[str], None]  # takes a message for users


def ignore(event: Event) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Limits:
    """Limits of an engine that batches requests."""

    max_waiting: int = 256  # queued requests before more are refused
    max_sequences: int = 16  # answers decoded at once; one request gets at most half of them
    max_rows: int | None = None  # tokens of a full prefill that one step computes
    pool_tokens: int | None = None  # positions of the KV pool, None = what memory allows
    enable_prefix_caching: bool = True  # keep exact KV as a prefix cache
    speculates: bool = True  # compute proposed tokens, if the engine's settings say so

    def __post_init__(self) -> None:
        for name in ("max_waiting", "max_sequences", "max_rows", "pool_tokens"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise UsageError(f"{name.replace('_', '-')} {count} is not 1 or more", "see: cacheblend serve --help")


@dataclass
class EngineStats:
    """Requests, sequences and blocks by state, and counts since the engine began."""

    waiting: int = 0
    running: int = 0
    swapped: int = 0
    blocks_free: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    generated: int = 0
    proposed: int = 0  # tokens computed as proposals of prompt lookup
    accepted: int = 0  # of these, tokens that were drawn
    computed: int = 0  # prompt tokens whose KV was computed
    reused: int = 0  # prompt tokens whose KV came from the store
    repaired: int = 0  # of these, computed again
    prefix_cached: int = 0  # prompt tokens whose KV came from the prefix cache
    swap_bytes: int = 0  # swapped out
    swap_space_bytes: int = 0
    pool_bytes: int = 0  # all blocks, used or free
    host_cache_bytes: int = 0  # pinned memory that keeps KV sent to a GPU
    host_cache_hits: int = 0  # chunks sent from there
    host_cache_misses: int = 0  # chunks read from the store
    preempted: int = 0  # answers that gave up their blocks
    recomputed: int = 0  # of these, those whose KV was dropped because the swap space was full
    joined: int = 0  # short prompts that shared a launch
    split: int = 0  # launches of several prompts that failed, after which each was computed alone
    stall_s: float = 0.0  # waited for KV to load
    step_s: float = 0.0  # all steps
    scheduling_s: float = 0.0  # of these, scheduling
