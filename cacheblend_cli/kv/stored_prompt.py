"""The stored part of a prompt: its chunks, their slots in the pool, and where their tensors are on the way to a
device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Protocol

import torch
from cacheblend_kernels import Slots, StagedTensor, StoredKV
from cacheblend_store import ChunkManifest, LayerReads, StoreError, Version
from cacheblend_store.format.blobs import blob_spec
from cacheblend_store.format.codecs import DTYPES, level_table
from cacheblend_store.format.levels import BITS, bits_of
from torch import Tensor

from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.kv.source import BadChunk, ChunkReader, KVSource
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.rope import rows_of_tables
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.prompt.plan import PromptPlan, Segment

ALIGNMENT = 512  # bytes, of each tensor in memory
Heads = tuple[int, ...]
"""Shape of a layer's K and V: KV heads, head_dim, and V's head_dim if it differs."""


@dataclass(frozen=True)
class LayerLayout:
    """Tensors of a chunk's layer in memory, one after another. num_bytes: of the layer, to the next one."""

    tensors: Mapping[str, StagedTensor]
    num_bytes: int

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the tensors as views of memory [num_bytes] uint8, in the shapes of `StoredKV`."""
        found = {name: tensor.at(memory) for name, tensor in self.tensors.items()}
        return {name: t if t.dim() > 1 else t[None] for name, t in found.items()}  # a scale per head


@lru_cache(maxsize=1024)
def layer_layout(codec: str, num_tokens: int, *heads: int) -> LayerLayout:
    tensors, at = {}, 0
    for name, spec in blob_spec(codec, num_tokens, *heads).items():
        tensors[name] = StagedTensor(at, DTYPES[spec.dtype], spec.shape)
        at += spec.num_bytes + -spec.num_bytes % ALIGNMENT
    return LayerLayout(tensors, at)


@dataclass(frozen=True)
class LayerGroup:
    """Adjacent layers of one shape and RoPE, which are loaded together."""

    layers: range
    heads: Heads
    rope: int
    number: int  # among the groups of the same shape


def layer_groups(decoder: Decoder, most: int) -> list[LayerGroup]:
    """Return the groups of all layers, each of at most `most` layers."""
    kinds = list(zip(decoder.spec.kv_shapes, decoder.rope.of_layer, strict=False))
    groups, seen, first = list[LayerGroup](), Counter[Heads](), 0
    for (heads, rope), run in groupby(kinds):
        end = first + len(list(run))
        for at in range(first, end, most):
            groups.append(LayerGroup(range(at, min(at + most, end)), heads, rope, seen[heads]))
            seen[heads] += 1
        first = end
    return groups


@dataclass(eq=False)
class StoredChunk:
    """A chunk in a source. Kept in a `HostCache`, also for later prompts."""

    manifest: ChunkManifest
    version: Version | None = None  # of the source in which the manifest was seen last
    reads: dict[tuple[Heads, int], LayerReads] = field(default_factory=dict)  # by shape, and layers of a group

    def reads_of(self, groups: Sequence[LayerGroup], heads: Heads, most: int) -> LayerReads:
        """Return the reads of the layers of one shape: `layer_groups` of at most `most` layers."""
        if (heads, most) not in self.reads:
            layout, layers = layer_layout(self.manifest.codec, self.manifest.num_tokens, *heads), range(most)
            starts = [layout.num_bytes * layer for layer in layers]
            places = [{n: (at + t.start, at + t.end) for n, t in layout.tensors.items()} for at in starts]
            own = [group.layers for group in groups if group.heads == heads]
            self.reads[heads, most] = LayerReads(self.manifest, own, places)
        return self.reads[heads, most]


class ChunkFinder(Protocol):
    """Finds chunks in a snapshot; `HostCache` remembers them."""

    def find(self, reader: ChunkReader, key: bytes) -> StoredChunk | None: ...


class LookUp:
    """Looks up every chunk."""

    def find(self, reader: ChunkReader, key: bytes) -> StoredChunk | None:
        manifest = reader.manifest(key)
        return None if manifest is None else StoredChunk(manifest)


@dataclass(frozen=True)
class StoredPrompt:
    """Chunks of a prompt whose KV is stored, in order."""

    decoder: Decoder
    source: KVSource
    sequence: PagedSequence
    chunks: tuple[StoredChunk, ...]
    spans: tuple[Segment, ...]  # of the chunks, in the codec of the record
    rope_len: int  # length passed to RoPE

    @classmethod
    def find(
        cls, decoder: Decoder, source: KVSource | None, sequence: PagedSequence, plan: PromptPlan, finder: ChunkFinder
    ) -> StoredPrompt:
        """Find the plan's cached segments. Raises BadChunk if the source no longer has one."""
        segments = plan.stored
        if source is None:
            assert segments[0].key is not None
            raise BadChunk(segments[0].key, "the store cannot be read")
        with source.read() as reader:
            chunks = tuple(_found(finder, reader, segment, decoder.spec) for segment in segments)
        spans = tuple(replace(s, codec=c.manifest.codec) for s, c in zip(segments, chunks, strict=True))
        return cls(decoder, source, sequence, chunks, spans, plan.num_tokens)

    @property
    def num_bytes(self) -> int:
        """Stored bytes of all layers."""
        return sum(
            count * tensor.num_bytes
            for heads, count in Counter(self.decoder.spec.kv_shapes).items()
            for span in self.spans
            for tensor in blob_spec(span.codec, span.num_tokens, *heads).values()
        )

    def layout(self, chunk: int, heads: Heads) -> LayerLayout:
        return layer_layout(self.spans[chunk].codec, self.spans[chunk].num_tokens, *heads)

    def slots(self, spans: Sequence[Segment]) -> tuple[Slots, ...]:
        """Return the slots of the spans' rows for each RoPE; created on the current stream."""
        return slots_of(self.decoder, self.sequence, spans, self.rope_len)

    def place(self, layer: int, chunk: int, slots: Sequence[Slots], memory: Tensor) -> None:
        """Write a chunk's rows to their slots of a layer. memory: the layer, uint8 on the pool's device."""
        cache, part = self.sequence.pool.layers[layer], self.decoder.part
        views = self.layout(chunk, self.decoder.spec.kv_shapes[layer]).views(memory)
        own = {name: part.own_heads(tensor, layer) for name, tensor in views.items()}
        stored = stored_kv(self.spans[chunk].codec, own, cache.k.shape[-1], cache.v.shape[-1])
        self.decoder.kernels.load_kv(stored, cache, slots[self.decoder.rope.of_layer[layer]])


def stored_kv(codec: str, tensors: Mapping[str, Tensor], *dims: int) -> StoredKV:
    """Return stored rows in the form kernels take. tensors: see `LayerLayout.views`; dims: head_dim of K and V."""
    return StoredKV(**tensors, **code_levels(codec, tensors["k"].device, *dims))


def code_levels(codec: str, device: torch.device, *dims: int) -> dict[str, Tensor]:
    """Return the levels of K's and V's codes, as kernels take them; none for values that are not codes."""
    if codec not in BITS:
        return {}
    k, v = (level_table(bits, device) for bits in bits_of(codec, *dims))
    return {"k_levels": k, "v_levels": v}


def slots_of(decoder: Decoder, sequence: PagedSequence, spans: Sequence[Segment], rope_len: int) -> tuple[Slots, ...]:
    """Return the slots of the spans' rows for each RoPE. For one contiguous run, cos and sin are views of its
    table."""
    tables = decoder.rope.tables(rope_len)
    if all(a.end == b.start for a, b in pairwise(spans)):
        start, end = spans[0].start, spans[-1].end
        slots = sequence.slots(torch.arange(start, end, device=decoder.device))
        first = sequence.contiguous_slot + start if sequence.contiguous_slot >= 0 else -1
        return tuple(Slots(slots, cos[start:end], sin[start:end], first) for cos, sin in tables)
    positions = torch.cat([torch.arange(s.start, s.end, device=decoder.device) for s in spans])
    slots = sequence.slots(positions)
    return tuple(Slots(slots, cos, sin) for cos, sin in rows_of_tables(tables, positions))


def _found(finder: ChunkFinder, reader: ChunkReader, segment: Segment, spec: ModelSpec) -> StoredChunk:
    """Return the segment's chunk after comparing its token ids, since equal keys (digests) are not trusted."""
    assert segment.key is not None
    try:
        chunk = finder.find(reader, segment.key)
    except StoreError as error:
        raise BadChunk(segment.key, error.message) from error
    if chunk is None:
        raise BadChunk(segment.key, "it is no longer in the store")
    if chunk.manifest.token_ids != segment.token_ids or chunk.manifest.shapes != spec.kv_shapes:
        raise BadChunk(segment.key, "its record has other tokens or is from another model")
    return chunk
