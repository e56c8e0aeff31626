"""Prompt plan: the layout of a prompt, and the status of each token's KV (exact, to repair, to compute)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

SegmentKind = Literal["prefix", "chunk", "suffix"]
SegmentStatus = Literal["exact", "blended", "computed", "prefix_cached"]


@dataclass(frozen=True)
class ChunkInput:
    key: bytes
    source: str
    token_ids: tuple[int, ...]
    left_context_ids: tuple[int, ...] = ()  # tokens between the prefix and the chunk when it was collected
    cached: bool = True  # the store has its KV
    same_regime: bool = True  # it was collected with the RoPE frequencies of this prompt
    codec: str = ""  # of the stored KV; "": the codec of the prompt
    computed_in: str = ""  # dtype in which the KV was computed; "": the dtype of the model
    has_state: bool = False  # its record has the state of recurrent layers after it


@dataclass(frozen=True)
class Segment:
    """A run of the prompt, positions start:end."""

    kind: SegmentKind
    start: int
    token_ids: tuple[int, ...]
    # "exact": stored KV is correct here. "blended": stored KV needs repair. "computed": fresh KV. "prefix_cached":
    # already in the pool.
    status: SegmentStatus
    key: bytes | None = None
    source: str = ""
    codec: str = ""  # as in ChunkInput

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def cached(self) -> bool:
        """Return whether the KV comes from the store."""
        return self.status in ("exact", "blended")


@dataclass(frozen=True)
class PromptPlan:
    """Segments of a prompt, in order."""

    segments: tuple[Segment, ...]
    # Of a hybrid: every token is computed with the state after the one before it, so that stored KV is used only at the
    # beginning, and slices end where segments end, as they do when chunks are collected.
    in_order: bool = False

    @property
    def token_ids(self) -> list[int]:
        return [i for segment in self.segments for i in segment.token_ids]

    @property
    def num_tokens(self) -> int:
        return self.segments[-1].end

    @property
    def chunks(self) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if s.kind == "chunk")

    @property
    def stored(self) -> tuple[Segment, ...]:
        """Segments whose KV comes from the store."""
        return tuple(s for s in self.segments if s.cached and s.token_ids)

    @property
    def cached_tokens(self) -> int:
        """Number of chunk tokens whose KV comes from the store."""
        return sum(s.num_tokens for s in self.chunks if s.cached)

    @property
    def exact_tokens(self) -> int:
        return sum(s.num_tokens for s in self.chunks if s.status == "exact")

    @property
    def inexact_tokens(self) -> int:
        return self.cached_tokens - self.exact_tokens

    @property
    def fresh_tokens(self) -> int:
        """Number of tokens to compute at any ratio: suffix, missing chunks, prefix if it is not cached."""
        return sum(s.num_tokens for s in self.segments if s.status == "computed")

    @property
    def exact_until(self) -> int:
        """Position of the first blended token: KV before it equals that of a full prefill."""
        return next((s.start for s in self.segments if s.status == "blended"), self.num_tokens)

    @property
    def num_prefix_cached(self) -> int:
        """Number of leading tokens that are already in the pool."""
        return next(s.start for s in self.segments if s.status != "prefix_cached")  # the suffix at the latest

    @property
    def stored_until(self) -> int:
        """End of the last segment whose KV comes from the store."""
        return self.stored[-1].end if self.stored else 0

    def filled_until(self, position: int) -> PromptPlan:
        """Return the plan with the computed segments before a position marked as already in the pool."""
        parts = (
            replace(s, status="prefix_cached") if s.status == "computed" and s.end <= position else s
            for s in self.segments
        )
        return replace(self, segments=tuple(parts))

    def can_cut(self, num_tokens: int) -> bool:
        """Return whether the first num_tokens can come from the prefix cache: stored KV is loaded by whole segments,
        and the last token is always computed for its logits."""
        cuts_stored = any(s.start < num_tokens < s.end for s in self.stored)
        return num_tokens < self.num_tokens and not cuts_stored

    def with_prefix_cache(self, num_tokens: int) -> PromptPlan:
        """Return the plan with the first num_tokens marked as already in the pool. See `can_cut`."""
        parts: list[Segment] = []
        for s in self.segments:
            own = min(max(num_tokens - s.start, 0), s.num_tokens)
            if own:
                parts.append(replace(s, token_ids=s.token_ids[:own], status="prefix_cached"))
            if own < s.num_tokens or not s.token_ids:
                parts.append(replace(s, start=s.start + own, token_ids=s.token_ids[own:]))
        return replace(self, segments=tuple(parts))

    def from_states(self, with_state: Sequence[bool]) -> PromptPlan:
        """Return the plan of a hybrid: up to the last exact segment with a state, KV is restored, the rest is computed.
        with_state: by segment."""
        last = -1
        for i, (s, has) in enumerate(zip(self.segments, with_state, strict=True)):
            if s.status != "exact":
                break
            last = i if has else last
        parts = (s if i <= last else replace(s, status="computed", codec="") for i, s in enumerate(self.segments))
        return PromptPlan(tuple(parts), in_order=True)


def plan_prompt(
    prefix_ids: Sequence[int],
    chunks: Sequence[ChunkInput],
    suffix_ids: Sequence[int],
    *,
    prefix_key: bytes | None = None,
    reuse: bool = True,
    in_order: bool = False,
) -> PromptPlan:
    """Lay out prefix, chunks and suffix, and determine the status of each.

    A cached chunk is exact if the text before it is the same as at precompute time (prefix, then left context) and has
    correct KV. A missing chunk does not end the exact span, because its KV is computed in its true context.

    prefix_key: key of the prefix's stored KV, None if it is not stored. reuse: False to use nothing from the store.
    in_order: see `PromptPlan`.
    """
    prefix_cached = reuse and prefix_key is not None
    segments: list[Segment] = []
    if prefix_ids:
        head: SegmentStatus = "exact" if prefix_cached else "computed"
        segments.append(Segment("prefix", 0, tuple(prefix_ids), head, prefix_key if prefix_cached else None))
    position = len(prefix_ids)
    right = True  # all positions so far have the KV of a full prefill
    behind: list[int] = []  # token ids of the chunks so far
    status: SegmentStatus
    for chunk in chunks:
        if not (reuse and chunk.cached):
            status = "computed"
        elif right and chunk.same_regime and tuple(behind) == chunk.left_context_ids:
            status = "exact"
        else:
            status, right = "blended", False
        segments.append(Segment("chunk", position, chunk.token_ids, status, chunk.key, chunk.source, chunk.codec))
        position += len(chunk.token_ids)
        behind.extend(chunk.token_ids)
    segments.append(Segment("suffix", position, tuple(suffix_ids), "computed"))
    plan = PromptPlan(tuple(segments))
    if not in_order:
        return plan
    return plan.from_states([*([True] if prefix_ids else []), *(c.has_state for c in chunks), False])
