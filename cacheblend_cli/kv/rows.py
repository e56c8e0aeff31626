"""Rows of one launch: positions to compute, and the batch metadata a layer needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from cacheblend_kernels import AttentionMetadata, Slots
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cacheblend_cli.kv.pool import KVPool, PagedSequence, upload
from cacheblend_cli.model.decoder import Decoder, DecoderLayer
from cacheblend_cli.model.rope import CosSin, rows_of_tables
from cacheblend_cli.prompt.plan import Segment

if TYPE_CHECKING:
    from cacheblend_cli.kv.block_states import OpenStates

LEAST_KV_BUCKET = 1024
"""Positions of the smallest bucket of contexts of CUDA graphs."""
SLICE_ROWS, GPU_SLICE_ROWS = 256, 2048
"""Positions of a prefill per step. Smaller slices delay other answers less; larger products are more efficient."""
NARROW = 2048
"""Hidden size up to which a GPU computes GPU_SLICE_ROWS rows of a layer faster than the host launches its kernels."""


def slice_rows(decoder: Decoder) -> int:
    """Return the positions of a prefill per step. They depend on the model and the kind of device alone, since the bits
    of KV and logits depend on them."""
    if decoder.device.type == "cpu":
        return SLICE_ROWS
    is_narrow = decoder.device.type == "cuda" and decoder.spec.hidden_size <= NARROW
    return 2 * GPU_SLICE_ROWS if is_narrow else GPU_SLICE_ROWS


@dataclass(frozen=True)
class Rows:
    pool: KVPool  # where K and V of the rows are written
    positions: Tensor  # [num_rows] int64
    slots: Tensor  # [num_rows] int64
    rotations: tuple[CosSin, ...]  # cos and sin [num_rows, head_dim] fp32 of each RoPE of the model
    attention: AttentionMetadata  # batch metadata for attention kernels
    decode: bool = False  # one row per sequence, after all its tokens
    token_ids: Tensor | None = None  # [num_rows] int64, set in a pass
    states: OpenStates | None = None  # of a hybrid: the rows of each sequence follow each other and end at its kv_len

    def __len__(self) -> int:
        return int(self.positions.shape[0])

    @cached_property
    def mappings(self) -> tuple[Slots, ...]:
        """The slot mapping with each RoPE of the model."""
        return tuple(Slots(self.slots, cos, sin) for cos, sin in self.rotations)

    def cos_sin(self, layer: DecoderLayer) -> CosSin:
        """Return cos and sin of the layer's RoPE."""
        return self.rotations[layer.rope]

    def take(self, index: Tensor) -> Rows:
        """Select rows, in order. index: [n] int64, sorted."""
        bounds = torch.searchsorted(index, self.attention.cu_rows.long(), out_int32=True)
        positions = self.positions[index]
        attention = replace(self.attention, positions=positions, cu_rows=bounds)
        return replace(
            self,
            positions=positions,
            slots=self.slots[index],
            rotations=rows_of_tables(self.rotations, index),
            attention=attention,
            token_ids=None if self.token_ids is None else self.token_ids[index],
        )


def rows_of(decoder: Decoder, sequence: PagedSequence, positions: Tensor, kv_len: int, rope_len: int) -> Rows:
    """Return rows at `positions` (sorted int64) of one sequence holding kv_len positions. rope_len: length passed to
    RoPE."""
    return packed_rows(decoder, [(sequence, positions, kv_len)], rope_len)


def rows_alone(decoder: Decoder, num_rows: int, block_size: int) -> Rows:
    """Return all rows of a sequence of num_rows tokens in a pool of its own."""
    sequence = KVPool.of(decoder, -(-num_rows // block_size), block_size).new_sequence(num_rows)
    return rows_of(decoder, sequence, torch.arange(num_rows, device=decoder.device), num_rows, num_rows)


def packed_rows(decoder: Decoder, parts: Sequence[tuple[PagedSequence, Tensor, int]], rope_len: int) -> Rows:
    """Return rows of several sequences in one launch; parts: (sequence, positions, kv_len). Does not synchronise."""
    device = parts[0][1].device
    positions = torch.cat([p for _, p, _ in parts]) if len(parts) > 1 else parts[0][1]
    slots = torch.cat([s.slots(p) for s, p, _ in parts]) if len(parts) > 1 else parts[0][0].slots(positions)
    counts = [int(p.shape[0]) for _, p, _ in parts]
    meta = AttentionMetadata(
        positions=positions,
        cu_rows=_uploaded([0, *accumulate(counts)], device),
        block_table=block_tables([s for s, _, _ in parts], device),
        kv_lens=_uploaded([n for _, _, n in parts], device),
        max_kv_len=max(n for _, _, n in parts),
        contiguous_slots=tuple(s.contiguous_slot for s, _, _ in parts),
    )
    states = [(s, kv_len - count, count) for (s, _, kv_len), count in zip(parts, counts, strict=True)]
    return Rows(
        parts[0][0].pool, positions, slots, decoder.rope.cos_sin(positions, rope_len), meta, states=_opened(states)
    )


def _uploaded(values: list[int], device: torch.device) -> Tensor:
    """Return ints as int32 on the device; one, or 0 and another one, by a launch, which takes the host less time than
    pinned memory and a copy."""
    if len(values) == 1:
        return torch.full((1,), values[0], dtype=torch.int32, device=device)
    if len(values) == 2 and 0 == values[0] < values[1]:
        return torch.arange(0, values[1] + 1, values[1], dtype=torch.int32, device=device)
    return upload(values, device, torch.int32)


def next_rows(decoder: Decoder, sequences: Sequence[PagedSequence], kv_lens: Sequence[int]) -> Rows:
    """Return the rows of the token after the kv_len tokens of each sequence; blocks are allocated and made writable."""
    slots, device = list[int](), decoder.device
    for sequence, kv_len in zip(sequences, kv_lens, strict=True):
        sequence.ensure(kv_len + 1)
        sequence.make_writable(kv_len, kv_len + 1)
        block, offset = divmod(kv_len, sequence.pool.block_size)
        slots.append(sequence.blocks[block] * sequence.pool.block_size + offset)
    assert len({decoder.rope.regime(n + 1) for n in kv_lens}) == 1, "one launch has one set of RoPE frequencies"
    max_kv_len = max(kv_lens) + 1
    positions, slot_mapping = upload(torch.tensor([list(kv_lens), slots]), device)
    attention = AttentionMetadata(
        positions=positions,
        cu_rows=torch.arange(len(slots) + 1, dtype=torch.int32, device=device),
        block_table=block_tables(sequences, device),
        kv_lens=(positions + 1).int(),
        max_kv_len=max_kv_len,
        contiguous_slots=tuple(s.contiguous_slot for s in sequences),
    )
    rotations = decoder.rope.cos_sin(positions, max_kv_len)
    states = _opened([(s, n, 1) for s, n in zip(sequences, kv_lens, strict=True)], decode=True)
    return Rows(sequences[0].pool, positions, slot_mapping, rotations, attention, decode=True, states=states)


def _opened(parts: Sequence[tuple[PagedSequence, int, int]], decode: bool = False) -> OpenStates | None:
    """Return the recurrent states of a launch. parts: see `BlockStates.launch`."""
    held = parts[0][0].pool.states
    return None if held is None else held.launch(parts, decode)


def filled(decoder: Decoder, rows: Rows, count: int, spare: int) -> Rows:
    """Pad decode rows with `count` rows that see no key and write to the slots from block `spare` on."""
    none = torch.zeros(count, dtype=torch.int64, device=decoder.device)
    own = torch.arange(count, device=decoder.device) + spare * rows.pool.block_size
    first = rows_of_tables(decoder.rope.tables(1), none)
    rotations = tuple(
        (torch.cat((cos, c)), torch.cat((sin, s))) for (cos, sin), (c, s) in zip(rows.rotations, first, strict=True)
    )
    positions = torch.cat((rows.positions, none))
    attention = replace(rows.attention, positions=positions)
    return replace(
        rows, positions=positions, slots=torch.cat((rows.slots, own)), rotations=rotations, attention=attention
    )


def positions_of(segments: Sequence[Segment], device: torch.device) -> Tensor:
    """Return the positions of the segments, int64."""
    return joined([torch.arange(s.start, s.end) for s in segments], device)


def joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Concatenate runs of int64 on the host (possibly none) into one tensor on the device."""
    return upload(torch.cat([torch.empty(0, dtype=torch.int64), *parts]), device)


def block_tables(sequences: Sequence[PagedSequence], device: torch.device) -> Tensor:
    """Return [num_seqs, max_blocks] int32; short rows end in zeros."""
    if len(sequences) == 1:
        return sequences[0].block_table[None]
    own = [torch.tensor(s.blocks, dtype=torch.int32) for s in sequences]
    return upload(pad_sequence(own, batch_first=True), device, torch.int32)


def bucket(count: int, least: int) -> int:
    """Round up to a power of two, at least `least`."""
    return max(least, 1 << (count - 1).bit_length())
