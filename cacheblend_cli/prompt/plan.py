"""The prompt plan: which tokens stand where, and for which of them the store has KV that is exact or needs repair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

SegmentKind = Literal["prefix", "chunk", "suffix"]
SegmentStatus = Literal["exact", "blended", "computed", "hot"]


@dataclass(frozen=True)
class ChunkInput:
    """A chunk as the prompt gets it. `left_context_ids`: what stood between the prefix and it when it was collected.

    cached: the store has its KV. same_regime: it was collected under the RoPE frequencies this prompt uses. codec: of the
    stored KV, "" for the prompt's own. computed_in: the dtype that KV was computed in, "" for the model's.
    """

    key: bytes
    source: str
    token_ids: tuple[int, ...]
    left_context_ids: tuple[int, ...] = ()
    cached: bool = True
    same_regime: bool = True
    codec: str = ""
    computed_in: str = ""


@dataclass(frozen=True)
class Segment:
    """A run of the prompt, positions start:end.

    status: "exact" (cached, its KV is right here), "blended" (cached, its KV needs repair), "computed" (fresh), "hot" (in
    the pool already). codec: as in ChunkInput.
    """

    kind: SegmentKind
    start: int
    token_ids: tuple[int, ...]
    status: SegmentStatus
    key: bytes | None = None
    source: str = ""
    codec: str = ""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def cached(self) -> bool:
        """Whether its KV comes from the store."""
        return self.status in ("exact", "blended")


@dataclass(frozen=True)
class PromptPlan:
    """Segments in order; together they are the prompt."""

    segments: tuple[Segment, ...]

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
    def cached_tokens(self) -> int:
        """Chunk tokens whose KV comes from the store: the reusable ones."""
        return sum(len(s.token_ids) for s in self.chunks if s.cached)

    @property
    def exact_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.chunks if s.status == "exact")

    @property
    def inexact_tokens(self) -> int:
        return self.cached_tokens - self.exact_tokens

    @property
    def fresh_tokens(self) -> int:
        """Tokens that are computed whatever the ratio: suffix, holes, an uncached prefix."""
        return sum(len(s.token_ids) for s in self.segments if s.status == "computed")

    @property
    def exact_until(self) -> int:
        """The positions before it hold the KV a full prefill would give them, once the prompt is filled."""
        return next((s.start for s in self.segments if s.status == "blended"), self.num_tokens)

    def with_exact(self, num_tokens: int) -> PromptPlan:
        """The plan where the first tokens hold the KV of a full prefill."""
        parts = (
            replace(s, status="exact") if s.status == "blended" and s.end <= num_tokens else s for s in self.segments
        )
        return PromptPlan(tuple(parts))

    def filled_until(self, position: int) -> PromptPlan:
        """The plan where what was to be computed before the position is in the pool."""
        parts = (replace(s, status="hot") if s.status == "computed" and s.end <= position else s for s in self.segments)
        return PromptPlan(tuple(parts))

    def cut_for(self, num_tokens: int) -> int:
        """The most of the first num_tokens that can be hot: stored KV is loaded a segment at a time, and the last token is
        computed, since what comes behind it is wanted."""
        num_tokens = min(num_tokens, self.num_tokens - 1)
        at = next((s for s in self.segments if s.start < num_tokens < s.end), None)
        return at.start if at is not None and at.cached else num_tokens

    def with_hot(self, num_tokens: int) -> PromptPlan:
        """The plan with its first tokens, as many as `cut_for` allows, in the pool already."""
        parts: list[Segment] = []
        for s in self.segments:
            own = min(max(num_tokens - s.start, 0), len(s.token_ids))
            if own:
                parts.append(replace(s, token_ids=s.token_ids[:own], status="hot"))
            if own < len(s.token_ids) or not s.token_ids:
                parts.append(replace(s, start=s.start + own, token_ids=s.token_ids[own:]))
        return PromptPlan(tuple(parts))


def plan_prompt(
    prefix_ids: Sequence[int],
    chunks: Sequence[ChunkInput],
    suffix_ids: Sequence[int],
    *,
    prefix_key: bytes | None = None,
    reuse: bool = True,
) -> PromptPlan:
    """Lay prefix, chunks and suffix out and say of each whether its KV is exact.

    A cached chunk is exact when everything before it is right and is what it was collected behind: the prefix,
    then its left context. A hole keeps what follows exact, since its own KV is computed in the true context.
    prefix_key: the store has the prefix's KV under this key. reuse False: nothing is taken from the store.
    """
    prefix_cached = reuse and prefix_key is not None
    segments: list[Segment] = []
    if prefix_ids:
        head: SegmentStatus = "exact" if prefix_cached else "computed"
        segments.append(Segment("prefix", 0, tuple(prefix_ids), head, prefix_key if prefix_cached else None))
    position = len(prefix_ids)
    right = True  # every position so far holds the KV a full prefill would give it
    behind: list[int] = []  # chunk ids so far
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
    return PromptPlan(tuple(segments))
