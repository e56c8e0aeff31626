"""Request: a question whose chunks are resolved and whose prompt is laid out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from cacheblend_store import ChunkManifest, ChunkStore

from cacheblend_cli.corpus.citations import Citation
from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.source import KVSource
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.plan import ChunkInput, PromptPlan, plan_prompt
from cacheblend_cli.types import AskOptions, BlendParams, Progress, SamplingParams

if TYPE_CHECKING:
    from cacheblend_cli.collect.collector import PlannedChunk
    from cacheblend_cli.kv.export import Connector
    from cacheblend_cli.kv.tiered_source import TieredSource


@dataclass(frozen=True)
class RequestChunk:
    """A chunk of a request."""

    named: bytes  # key in the request, possibly another model's
    input: ChunkInput  # as this model sees it
    citation: Citation  # its document
    manifest: ChunkManifest | None = None  # its record, None if the store has none
    planned: PlannedChunk | None = None  # if it is part of a document sent along
    rank: int | None = None  # in the search results, from 1; None for a named chunk

    @property
    def text(self) -> str:
        if self.manifest is not None:
            return self.manifest.text
        return self.planned.chunk.text if self.planned is not None else ""


@dataclass(frozen=True)
class Request:
    """An AskRequest with its chunks resolved. It can be run under several settings (`replace(request, blend=...)`)."""

    question: str
    collection: Collection
    store: ChunkStore | None  # source of the chunks' KV, None to compute everything
    suffix_ids: tuple[int, ...]
    chunks: tuple[RequestChunk, ...]
    weak_match: bool = False  # even the best chunk of the search matches the question weakly
    hits_cut: int = 0  # see `Answer`
    hits_repeated: int = 0
    blend: BlendParams = field(default_factory=BlendParams)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    options: AskOptions = field(default_factory=AskOptions)
    prefix_cached: bool = True  # the store has the prefix's KV
    lossless: bool = True  # stored KV is what this run would compute
    notes: list[str] = field(default_factory=list)  # messages for users, shared by every copy of this request
    started: float = field(default_factory=time.perf_counter)  # when the question was known
    connector: Connector | None = None  # takes the prompt's KV; the answer ends before its first token
    tiered: TieredSource | None = None  # the store and its tier, if the tier was asked for chunks
    ratio_from: str = "given"  # see `Answer`
    may_be_full: bool = False  # a GPU may compute it in full if that is faster
    full_for_speed: bool = False  # in mode full because that is estimated to be faster than blending

    @property
    def named(self) -> tuple[bytes, ...]:
        return tuple(chunk.named for chunk in self.chunks)

    @property
    def inputs(self) -> tuple[ChunkInput, ...]:
        """Inputs of the chunks for this model."""
        return tuple(chunk.input for chunk in self.chunks)

    @property
    def source(self) -> KVSource | None:
        return self.tiered or self.store

    @cached_property
    def plan(self) -> PromptPlan:
        """The prompt's plan. Stored KV is not exact if RoPE has other frequencies at this length than at collecting,
        nor is KV in few bits at ratio 1."""
        prefix_ids = self.collection.prefix_ids
        total = len(prefix_ids) + sum(len(c.token_ids) for c in self.inputs) + len(self.suffix_ids)
        short = self.collection.decoder.rope.regime(total) == 0
        again = not self.lossless and self.blend.mode == "blend" and self.blend.ratio == 1
        return plan_prompt(
            prefix_ids,
            [replace(c, same_regime=c.same_regime and short and not again) for c in self.inputs],
            self.suffix_ids,
            prefix_key=self.collection.prefix_key if self.prefix_cached and short else None,
            reuse=self.blend.mode != "full",
            in_order=bool(self.collection.model.spec.recurrent),
        )

    def progress(self, num_filled: int = 0, *, is_check: bool = False) -> Progress:
        return Progress(num_filled, self.plan.num_tokens, len(self.chunks), is_check)

    def without(self, key: bytes, reason: str) -> Request:
        """Return the request without the stored KV under the key and without KV that the tier lost, with a note."""
        gone = {key} | (self.tiered.lost if self.tiered else set())
        self.notes.append(not_used(key, reason))
        return replace(
            self,
            prefix_cached=self.prefix_cached and self.collection.prefix_key not in gone,
            chunks=tuple(
                replace(c, input=to_compute(c.input, self.collection)) if c.input.key in gone else c
                for c in self.chunks
            ),
        )

    def in_full(self) -> Request:
        """Return the same prompt to be computed without the store, with its own notes."""
        return replace(self, store=None, tiered=None, blend=BlendParams(mode="full"), notes=[], connector=None)

    def handed_to(self, connector: Connector) -> Request:
        """Return the request with decoding left to another engine. Raises UsageError if it compares this engine's
        answer."""
        if self.options.verify or self.options.confirm or self.options.on_unsupported != "answer":
            raise UsageError(
                "verify, confirm and on_unsupported need an answer decoded here, and another engine decodes this one",
                "omit them, or let this engine decode",
            )
        return replace(self, connector=connector, sampling=replace(self.sampling, n=1, best_of=0))


def not_used(key: bytes, reason: str) -> str:
    return f"stored KV {key.hex()[:12]} is not used, it is computed: {reason}"


def to_compute(chunk: ChunkInput, collection: Collection) -> ChunkInput:
    """Return the chunk as a missing one. Its computed KV is never stored under another dtype's key."""
    if not chunk.computed_in:
        return replace(chunk, cached=False)
    return ChunkInput(collection.key(chunk.token_ids), chunk.source, chunk.token_ids, cached=False)
