"""The stored part of a prompt: its chunks, their slots in the pool, and batches of them on the way to a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from cacheblend_kernels import Slots, StoredKV
from cacheblend_store import ChunkManifest, StoreError
from cacheblend_store.format.blobs import PLAIN, blob_spec
from cacheblend_store.format.codecs import DTYPES, level_table
from cacheblend_store.format.levels import BITS, bits_of
from torch import Tensor

from cacheblend_cli.kv.pool import PagedSequence, upload
from cacheblend_cli.kv.source import BadChunk, ChunkReader, KVSource
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.rope import rows_of_tables
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.prompt.plan import PromptPlan, Segment

ALIGNMENT = 512  # bytes, of each tensor in a buffer


@dataclass(frozen=True)
class BatchRows:
    """Rows of the chunks that are placed together. The same for every layer."""

    slots: tuple[Slots, ...]  # for each RoPE of the model
    chunks: Tensor | None  # see `StoredKV.row_chunks`


@dataclass(frozen=True)
class StoredPrompt:
    """Chunks of a prompt whose KV is stored, in order."""

    decoder: Decoder
    source: KVSource
    sequence: PagedSequence
    manifests: tuple[ChunkManifest, ...]
    spans: tuple[Segment, ...]  # in the codec of the record; manifests[i] describes spans[i]
    rope_len: int  # length passed to RoPE

    @classmethod
    def find(cls, decoder: Decoder, source: KVSource | None, sequence: PagedSequence, plan: PromptPlan) -> StoredPrompt:
        """Read the manifests of the plan's cached segments. Raises BadChunk if the source no longer has one."""
        segments = plan.stored
        if source is None:
            assert segments[0].key is not None
            raise BadChunk(segments[0].key, "the store cannot be read")
        with source.read() as reader:
            manifests = tuple(_manifest(reader, segment, decoder.spec) for segment in segments)
        spans = tuple(replace(s, codec=m.codec) for s, m in zip(segments, manifests, strict=True))
        return cls(decoder, source, sequence, manifests, spans, plan.num_tokens)

    @property
    def num_bytes(self) -> int:
        """Stored bytes of all layers."""
        return sum(
            count * tensor.num_bytes
            for heads, count in Counter(self.decoder.spec.kv_shapes).items()
            for span in self.spans
            for tensor in blob_spec(span.codec, span.num_tokens, *heads).values()
        )

    def rows(self, spans: Sequence[Segment]) -> BatchRows:
        """Return the rows of spans of one codec, one after another; created on the current stream."""
        slots = slots_of(self.decoder, self.sequence, spans, self.rope_len)
        return BatchRows(slots, row_chunks_of(spans, self.decoder.device))

    def place(self, layer: int, batch: KVBatch, rows: BatchRows, staged: Tensor) -> None:
        """Write a batch's rows to their slots of a layer. staged: the batch's buffer, uint8 on the pool's device."""
        cache, part = self.sequence.pool.layers[layer], self.decoder.part
        tensors = {name: part.own_heads(tensor, layer) for name, tensor in batch.tensors(staged).items()}
        stored = stored_kv(batch.spans[0].codec, tensors, rows.chunks, cache.k.shape[-1], cache.v.shape[-1])
        self.decoder.kernels.load_kv(stored, cache, rows.slots[self.decoder.rope.of_layer[layer]])


def stored_kv(codec: str, tensors: Mapping[str, Tensor], row_chunks: Tensor | None, *dims: int) -> StoredKV:
    """Return stored rows in the form kernels take. tensors: see `KVBatch.tensors`; dims: head_dim of K and V."""
    if codec not in BITS:
        return StoredKV(**tensors, row_chunks=row_chunks)
    k_levels, v_levels = (level_table(bits, tensors["k"].device) for bits in bits_of(codec, *dims))
    return StoredKV(**tensors, k_levels=k_levels, v_levels=v_levels, row_chunks=row_chunks)


def row_chunks_of(spans: Sequence[Segment], device: torch.device) -> Tensor | None:
    """Return the index of each row's span, [num_rows] int32; None if kernels do not need it. On a GPU, a single span
    has it too if its codec has scales, so that only one form of the kernel is compiled."""
    if spans[0].codec in PLAIN or (len(spans) == 1 and device.type != "cuda"):
        return None
    counts = torch.tensor([span.num_tokens for span in spans])
    return upload(torch.repeat_interleave(torch.arange(len(spans)), counts), device, torch.int32)


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


def _manifest(reader: ChunkReader, segment: Segment, spec: ModelSpec) -> ChunkManifest:
    """Return the segment's manifest after comparing its token ids, since equal keys (digests) are not trusted."""
    assert segment.key is not None
    try:
        manifest = reader.manifest(segment.key)
    except StoreError as error:
        raise BadChunk(segment.key, error.message) from error
    if manifest is None:
        raise BadChunk(segment.key, "it is no longer in the store")
    if manifest.token_ids != segment.token_ids or manifest.shapes != spec.kv_shapes:
        raise BadChunk(segment.key, "its record has other tokens or is from another model")
    return manifest


class KVBatch:
    """Chunks of one layer that are copied and placed together. The batches group the same chunks at every layer.

    The buffer holds the codec's tensors one after another, each for all chunks in order: k of every chunk, then v, then
    scales and means. So the chunks become one tensor each: tensors of rows are concatenated, those of a chunk stacked.
    """

    def __init__(self, first: int, spans: Sequence[Segment], *heads: int) -> None:
        """heads: KV heads, head_dim and V's head_dim, as in `blob_spec`."""
        self.first, self.spans = first, tuple(spans)
        specs = [blob_spec(s.codec, s.num_tokens, *heads) for s in spans]
        self._parts: dict[str, tuple[torch.dtype, list[int], list[int]]] = {}  # dtype, shape, start of each chunk
        self.num_bytes = 0
        for name, spec in specs[0].items():
            bounds = list(accumulate((s[name].num_bytes for s in specs), initial=self.num_bytes))
            if len(spec.shape) > 1:
                shape = [sum(s[name].shape[0] for s in specs), *spec.shape[1:]]
            else:  # a scale per head
                shape = [len(specs), *spec.shape]
            self._parts[name] = DTYPES[spec.dtype], shape, bounds
            self.num_bytes = bounds[-1] + -bounds[-1] % ALIGNMENT

    @cached_property
    def places(self) -> list[dict[str, tuple[int, int]]]:
        """Start and end in the buffer of each chunk's tensors."""
        return [
            {name: (at[index], at[index + 1]) for name, (_, _, at) in self._parts.items()}
            for index in range(len(self.spans))
        ]

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """Tensors of all chunks as views of the buffer [num_bytes] uint8, in the shapes of `StoredKV`."""
        return {
            name: buffer[at[0] : at[-1]].view(dtype).view(shape) for name, (dtype, shape, at) in self._parts.items()
        }


def batches_of(
    spans: Sequence[Segment], shapes: Sequence[tuple[int, ...]], most_bytes: int
) -> list[dict[tuple[int, ...], KVBatch]]:
    """Group adjacent chunks of the same codec, up to most_bytes; a larger chunk is a batch of its own.

    Returns, per group, a batch for each of the layers' shapes (KV heads, head_dim). The largest shape decides the size
    of a group.
    """
    largest = max(shapes, key=lambda heads: heads[0] * (heads[1] + heads[-1]))
    groups: list[list[Segment]] = []
    room = 0
    for span in spans:
        spec = blob_spec(span.codec, span.num_tokens, *largest)
        size = sum(tensor.num_bytes for tensor in spec.values())
        if groups and span.codec == groups[-1][0].codec and size <= room:
            groups[-1].append(span)
        else:
            groups.append([span])
            room = most_bytes
        room -= size
    firsts = accumulate(map(len, groups), initial=0)
    return [
        {heads: KVBatch(first, group, *heads) for heads in set(shapes)}
        for first, group in zip(firsts, groups, strict=False)
    ]
