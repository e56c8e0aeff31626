"""Events of a request, limits of an engine, and its statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cacheblend_cli.errors import UsageError
from cacheblend_cli.types import Answer, TokenLogprob

Early = Literal["cancelled", "deadline"]


@dataclass(frozen=True)
class Started:
    """The request has left the queue."""


@dataclass(frozen=True)
class Text:
    """A piece of an answer, which never breaks a UTF-8 character and never holds a stop string or a part of one. index:
    which of n."""

    text: str
    index: int = 0


@dataclass(frozen=True)
class Reasoning:
    """A piece of what is said between think tags before an answer."""

    text: str
    index: int = 0


@dataclass(frozen=True)
class Token:
    """A token of an answer, before the piece of text that it makes certain: where log-probabilities are asked for."""

    logprob: TokenLogprob
    index: int = 0


@dataclass(frozen=True)
class Done:
    """The end of a request. answers: n of them, in order; those of a request that was cancelled or whose deadline
    passed are what was said until then, and none where it had not begun. ended: why it ended early, None where it did
    not."""

    answers: list[Answer]
    ended: Early | None = None


@dataclass(frozen=True)
class Failed:
    """The end of a request that could not be answered. error: a CacheBlendError or a StoreError: message, hint,
    exit_code."""

    error: Exception


@dataclass(frozen=True)
class HandedOver:
    """The connector has the prompt's KV. report: the answer, of no tokens. Done follows once missing chunks are
    stored."""

    report: Answer


Event = Started | Text | Reasoning | Token | HandedOver | Done | Failed
OnEvent = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Do nothing: nobody listens."""


@dataclass(frozen=True)
class Limits:
    """max_waiting: queued requests before more are refused. max_sequences: answers decoded at once; one request gets at
    most half of them. max_rows: tokens of a full prefill that one step computes. pool_tokens: positions of the KV pool,
    None = what memory allows. enable_prefix_caching: keep exact KV as a prefix cache."""

    max_waiting: int = 256
    max_sequences: int = 16
    max_rows: int | None = None
    pool_tokens: int | None = None
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("max_waiting", "max_sequences", "max_rows", "pool_tokens"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise UsageError(f"{name.replace('_', '-')} {count} is not 1 or more", "see: cacheblend serve --help")


@dataclass
class EngineStats:
    """Requests and sequences by state; the pool's blocks by state; what was done since the service began, which the
    engine counts.

    computed: tokens of prompts whose KV was computed; reused: taken from the store; repaired: of these, computed again;
    prefix_cached: found in the prefix cache. swap_bytes: KV that is swapped out, of swap_space_bytes. pool_bytes: of
    all blocks, used or not. preempted: answers that gave their blocks up; recomputed: those of them whose KV was
    dropped, as the swap space was full. joined: short prompts computed in one launch with others. stall_s: waited for
    KV to load. step_s, scheduling_s: seconds of all steps, and of deciding what they do."""

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
    computed: int = 0
    reused: int = 0
    repaired: int = 0
    prefix_cached: int = 0
    swap_bytes: int = 0
    swap_space_bytes: int = 0
    pool_bytes: int = 0
    preempted: int = 0
    recomputed: int = 0
    joined: int = 0
    stall_s: float = 0.0
    step_s: float = 0.0
    scheduling_s: float = 0.0
