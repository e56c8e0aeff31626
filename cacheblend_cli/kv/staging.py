"""Stored KV in a buffer on the pool's device: a group of layers of a prompt's chunks, and its way into the pool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from cacheblend_kernels import Slots, StagedChunk, StoredLayers, layers_table
from torch import Tensor

from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.pool import PagedSequence, upload
from cacheblend_cli.kv.stored_prompt import Heads, LayerGroup, code_levels, layer_groups, layer_layout, slots_of
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.prompt.plan import PromptPlan, Segment

GROUPS = 4  # of a model whose layers are alike: a copy or a launch costs the host more than the GPU
STAGED_BYTES = 128 << 20  # of a group, unless one layer has more


def group_layers(decoder: Decoder, spans: Sequence[Segment]) -> int:
    """Return the most layers of a group. spans: chunks, in the codec of their records."""
    num_layers, kinds = len(decoder.spec.kv_shapes), set(decoder.spec.kv_shapes)
    of_layer = max(sum(layer_layout(s.codec, s.num_tokens, *heads).num_bytes for s in spans) for heads in kinds)
    return max(1, min(-(-num_layers // GROUPS), STAGED_BYTES // max(1, of_layer)))


@dataclass(frozen=True)
class CodecRows:
    """Rows of chunks in one codec, which one launch writes."""

    codec: str
    slots: tuple[Slots, ...]  # for each RoPE
    row_chunks: Tensor  # see `StoredLayers`
    chunks: dict[Heads, tuple[tuple[StagedChunk, ...], Tensor]]  # by shape, and their table


class Staging:
    """The chunks of a prompt in a staging buffer: for each, the layers of a group one after another."""

    def __init__(
        self,
        decoder: Decoder,
        sequence: PagedSequence,
        spans: Sequence[Segment],
        rope_len: int,
        groups: Sequence[LayerGroup],
    ) -> None:
        """spans: in the codec of their records. Tensors are created on the current stream."""
        self._decoder, self._sequence, self._spans = decoder, sequence, spans
        self.starts: dict[Heads, list[int]] = {}  # by shape: first byte of each chunk, and the end
        for heads in {group.heads for group in groups}:
            most = max(len(group.layers) for group in groups if group.heads == heads)
            sizes = (most * layer_layout(s.codec, s.num_tokens, *heads).num_bytes for s in spans)
            self.starts[heads] = list(accumulate(sizes, initial=0))
        of_codec = defaultdict[str, list[int]](list)
        for number, span in enumerate(spans):
            of_codec[span.codec].append(number)
        self._rows = [self._rows_of(numbers, rope_len) for numbers in of_codec.values()]

    @property
    def num_bytes(self) -> int:
        return max(starts[-1] for starts in self.starts.values())

    def place(self, group: LayerGroup, data: Tensor, *, scattered: bool = False) -> None:
        """Write a group of layers to the pool. data: [num_bytes] uint8. scattered: whether to treat consecutive slots
        like others."""
        first, caches = group.layers[0], [self._sequence.pool.layers[layer] for layer in group.layers]
        for rows in self._rows:
            chunks, table = rows.chunks[group.heads]
            levels = code_levels(rows.codec, data.device, caches[0].k.shape[-1], caches[0].v.shape[-1])
            own = self._decoder.part.first_head(first)
            stored = StoredLayers(data, chunks, table, rows.row_chunks, **levels, first_head=own)
            slots = rows.slots[group.rope]
            self._decoder.kernels.load_layers(stored, caches, replace(slots, first_slot=-1) if scattered else slots)

    def _rows_of(self, numbers: Sequence[int], rope_len: int) -> CodecRows:
        spans, device = [self._spans[number] for number in numbers], self._decoder.device
        counts = torch.tensor([span.num_tokens for span in spans])
        row_chunks = upload(torch.repeat_interleave(torch.arange(len(spans)), counts), device, torch.int32)
        chunks = {}
        for heads, starts in self.starts.items():
            staged = tuple(_staged(self._spans[number], heads, starts[number]) for number in numbers)
            chunks[heads] = staged, upload(torch.tensor(layers_table(staged)), device)
        return CodecRows(spans[0].codec, slots_of(self._decoder, self._sequence, spans, rope_len), row_chunks, chunks)


def _staged(span: Segment, heads: Heads, start: int) -> StagedChunk:
    layout = layer_layout(span.codec, span.num_tokens, *heads)
    tensors = {name: tensor._replace(start=start + tensor.start) for name, tensor in layout.tensors.items()}
    return StagedChunk(tensors, layout.num_bytes)


class ZeroLoader(KVLoader):
    """Places zeros for the plan's cached segments, for prompts that run only to compile or time kernels."""

    def __init__(self, decoder: Decoder, sequence: PagedSequence, plan: PromptPlan, codec: str) -> None:
        """codec: the format to dequantise from."""
        spans = [replace(segment, codec=codec) for segment in plan.stored]
        self._groups = {g.layers[0]: g for g in layer_groups(decoder, group_layers(decoder, spans))}
        self._staging = Staging(decoder, sequence, spans, plan.num_tokens, list(self._groups.values()))
        self._zeros = torch.zeros(self._staging.num_bytes, dtype=torch.uint8, device=decoder.device)

    def wait(self, layer: int) -> None:
        if layer in self._groups:
            for scattered in (False, True):
                self._staging.place(self._groups[layer], self._zeros, scattered=scattered)
