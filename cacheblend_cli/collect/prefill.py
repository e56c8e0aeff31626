"""Collect: prefill chunks after the shared prefix and keep K (before RoPE) and V of every layer.

Several sequences go through the model in one launch, packed up to `pack_tokens` rows: large enough for efficient matrix
products, small enough to bound memory.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import torch
from cacheblend_kernels import Slots, StoredKV
from torch import Tensor

from cacheblend_cli.cancellation import Check, go_on
from cacheblend_cli.errors import DeviceError
from cacheblend_cli.kv.forward import FreshKV, KVOnly, layer_by_layer
from cacheblend_cli.kv.pool import KVPool, PagedSequence, upload
from cacheblend_cli.kv.rows import Rows, packed_rows, slice_rows
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.states import SequenceState

PACK_TOKENS = {"cpu": 512}
OTHER_PACK_TOKENS = 4096
BLOCK_SIZE = 64  # of each launch's own KV pool


def pack_tokens(device: torch.device) -> int:
    """Return the rows per launch. Matrix products reach full speed at about 300 rows on a CPU, at more on a GPU."""
    return PACK_TOKENS.get(device.type, OTHER_PACK_TOKENS)


@dataclass(frozen=True)
class Kept:
    """Keep the KV of tokens start:end of the sequence (counted after the prefix) under `key`."""

    key: bytes
    start: int
    end: int
    with_state: bool = True  # keep a hybrid's state after it, too


@dataclass(frozen=True)
class CollectSequence:
    """Tokens to prefill together after the prefix, and the runs of them to keep."""

    token_ids: tuple[int, ...]
    kept: tuple[Kept, ...]


@dataclass
class ChunkKV:
    """K (before RoPE) and V of one chunk, in the compute dtype: per layer [num_tokens, num_kv_heads, head_dim]; and the
    state of recurrent layers after it."""

    key: bytes
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    state: SequenceState | None = None


@dataclass(frozen=True)
class PrefixKV:
    """KV of the shared prefix. kv.k (before RoPE), kv.v: per layer [prefix_len, num_kv_heads, head_dim]."""

    token_ids: tuple[int, ...]
    kv: ChunkKV


@torch.inference_mode()
def collect_prefix(decoder: Decoder, prefix_ids: Sequence[int], key: bytes = b"") -> PrefixKV:
    """Prefill the prefix alone. An empty prefix is allowed and has no KV."""
    prefix = PrefixKV((), ChunkKV(key))
    if prefix_ids:
        sequence = CollectSequence(tuple(prefix_ids), (Kept(key, 0, len(prefix_ids)),))
        [kv] = _collect_alone(decoder, prefix, sequence)
        prefix = PrefixKV(tuple(prefix_ids), kv)
    return prefix


@torch.inference_mode()
def collect(
    decoder: Decoder, prefix: PrefixKV, sequences: Sequence[CollectSequence], check: Check = go_on
) -> Iterator[ChunkKV]:
    """Yield the KV of every kept run, in order. Raises DeviceError if one sequence alone runs out of memory, and what
    `check` raises."""
    prefix_len = len(prefix.token_ids)
    regimes = [decoder.rope.regime(prefix_len + len(s.token_ids)) for s in sequences]
    # a hybrid's states are needed where chunks end: one sequence at a time
    most = pack_tokens(decoder.device) if decoder.state_layout is None else 0
    for pack in packs(sequences, regimes, most):
        yield from _collect_what_fits(decoder, prefix, pack, check)


def packs(sequences: Sequence[CollectSequence], regimes: Sequence[int], most: int) -> Iterator[list[CollectSequence]]:
    """Group adjacent sequences of one RoPE regime up to `most` rows. A longer sequence gets its own group."""
    pack: list[CollectSequence] = []
    total, current = 0, 0
    for sequence, regime in zip(sequences, regimes, strict=True):
        if pack and (regime != current or total + len(sequence.token_ids) > most):
            yield pack
            pack, total = [], 0
        pack.append(sequence)
        total, current = total + len(sequence.token_ids), regime
    if pack:
        yield pack


def _collect_what_fits(
    decoder: Decoder, prefix: PrefixKV, pack: Sequence[CollectSequence], check: Check
) -> Iterator[ChunkKV]:
    """Collect the whole pack at once, or in halves if the device runs out of memory."""
    if len(pack) == 1:
        yield from _collect_alone(decoder, prefix, pack[0], check)
        return
    try:
        yield from _Place(decoder, prefix, pack, check).collect([(0, len(s.token_ids)) for s in pack])
        return
    except torch.OutOfMemoryError:
        pass  # leave the handler first: the exception's frames hold memory
    for half in (pack[: len(pack) // 2], pack[len(pack) // 2 :]):
        yield from _collect_what_fits(decoder, prefix, half, check)


def _collect_alone(
    decoder: Decoder, prefix: PrefixKV, sequence: CollectSequence, check: Check = go_on
) -> Iterator[ChunkKV]:
    """Collect one sequence in pieces of about `pack_tokens` rows, to bound the memory per launch for a long window."""
    try:
        place = _Place(decoder, prefix, [sequence], check)
        if decoder.state_layout is not None:
            yield from place.collect_in_order(sequence)
            return
        for piece in _pieces(sequence, pack_tokens(decoder.device)):
            yield from place.collect([piece])
    except torch.OutOfMemoryError as error:
        count = len(prefix.token_ids) + len(sequence.token_ids)
        raise DeviceError(
            f"{decoder.device} ran out of memory computing the KV of {count} tokens in one sequence",
            "use a smaller --chunk-tokens (or --window), stop other programs on the GPU, or use --device cpu",
        ) from error


def _pieces(sequence: CollectSequence, most: int) -> Iterator[tuple[int, int]]:
    """Yield runs start:end that cover the sequence.

    Each ends where a kept run ends, and is as long as `most` allows.
    """
    ends = sorted({kept.end for kept in sequence.kept})
    start = 0
    for end, following in zip(ends, [*ends[1:], None], strict=True):
        if following is None or following - start > most:
            yield start, end
            start = end


class NewPlace(msgspec.Struct, tag=True):
    """Message to other ranks: create a place."""

    model: int  # decoder number
    place: int  # number of the new place
    gone: list[int]  # numbers of places to drop
    prefix_ids: list[int]
    pack: list[CollectSequence]


class CollectPieces(msgspec.Struct, tag=True):
    """Message to other ranks: prefill pieces of a place's sequences."""

    model: int
    place: int
    pieces: list[tuple[int, int]]


class Places:
    """Places on a rank other than rank 0, mirroring those of rank 0."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}

    def do(self, decoder: Decoder, message: NewPlace | CollectPieces) -> None:
        if isinstance(message, CollectPieces):
            self._places[message.place].collect(message.pieces)
            return
        for place in message.gone:
            self._places.pop(place, None)
        shapes = [(len(message.prefix_ids), *heads) for heads in decoder.spec.kv_shapes]
        k, v = ([torch.empty(shape, dtype=decoder.dtype, device=decoder.device) for shape in shapes] for _ in range(2))
        prefix = PrefixKV(tuple(message.prefix_ids), ChunkKV(b"", k, v))
        self._places[message.place] = _Place(decoder, prefix, message.pack)


class _Place:
    """A pack of sequences of one RoPE regime after the prefix, in its own KV pool.

    With tensor parallelism, every rank mirrors the places of rank 0.
    """

    _numbers, _gone = itertools.count(), list[int]()

    def __init__(
        self, decoder: Decoder, prefix: PrefixKV, pack: Sequence[CollectSequence], check: Check = go_on
    ) -> None:
        self._decoder, self._pack, self._first, self._check = decoder, pack, len(prefix.token_ids), check
        self._number, self._ranks = next(self._numbers), decoder.part.ranks
        if self._ranks.rank:
            self._fill(prefix)
            return
        weakref.finalize(self, self._gone.append, self._number)
        gone = [self._gone.pop() for _ in [*self._gone]]
        with self._ranks.telling(NewPlace(decoder.number, self._number, gone, [*prefix.token_ids], [*pack])):
            self._fill(prefix)

    def _fill(self, prefix: PrefixKV) -> None:
        decoder, pack = self._decoder, self._pack
        lengths = [self._first + len(s.token_ids) for s in pack]
        blocks = sum(-(-n // BLOCK_SIZE) for n in lengths)
        of = decoder.own_spec, blocks, BLOCK_SIZE, decoder.dtype, decoder.device
        self._pool = pool = KVPool(*of, state_layout=decoder.state_layout)
        self._held, self._rope_len = [pool.new_sequence(n) for n in lengths], max(lengths)
        if prefix.token_ids:
            _place_prefix(decoder, pool, self._held, prefix, self._rope_len)
        if prefix.kv.state is not None and pool.states is not None:
            for sequence in self._held:
                pool.states.put(sequence, self._first, prefix.kv.state)

    def collect(self, pieces: Sequence[tuple[int, int]]) -> list[ChunkKV]:
        """Prefill tokens start:end of each sequence, after all tokens before. Return the kept KV, in order."""
        with self._ranks.telling(CollectPieces(self._decoder.number, self._number, [*pieces])):
            return self._collect(pieces)

    def collect_in_order(self, sequence: CollectSequence) -> Iterator[ChunkKV]:
        """Yield the kept KV of a hybrid's only sequence, with states. It is computed in the slices of a prompt
        (`PromptPlan.in_order`), so that a prompt restores what it would compute, to the bit."""
        assert self._pool.states is not None
        rows, [held], last = slice_rows(self._decoder), self._held, sequence.kept[-1].end
        cuts = {0, *(c for k in sequence.kept for c in (k.start, k.end))}
        cuts |= {at - self._first for at in range(0, self._first + last, rows) if at > self._first}
        ends, parts = {k.end: k for k in sequence.kept}, list[ChunkKV]()
        for piece in pairwise(sorted(cuts)):
            parts += self.collect([piece])
            if (kept := ends.get(piece[1])) is not None:
                k = [torch.cat(of) for of in zip(*(p.k for p in parts), strict=True)]
                v = [torch.cat(of) for of in zip(*(p.v for p in parts), strict=True)]
                state = self._pool.states.at(held, self._first + kept.end) if kept.with_state else None
                yield ChunkKV(kept.key, k, v, state)
                parts = []

    def _collect(self, pieces: Sequence[tuple[int, int]]) -> list[ChunkKV]:
        parts, kept, ids, base = [], list[tuple[bytes, slice]](), list[int](), 0
        for sequence, held, (start, end) in zip(self._pack, self._held, pieces, strict=True):
            positions = torch.arange(self._first + start, self._first + end, device=self._decoder.device)
            parts.append((held, positions, self._first + end))
            ids += sequence.token_ids[start:end]
            inside = (k for k in sequence.kept if start < k.end and k.start < end)
            kept += [(k.key, slice(base + max(k.start - start, 0), base + min(k.end, end) - start)) for k in inside]
            base += end - start
        rows = packed_rows(self._decoder, parts, self._rope_len)
        keeper = _Keeper(self._decoder, rows, [ChunkKV(key) for key, _ in kept], [where for _, where in kept])
        for _ in layer_by_layer(self._decoder, rows, upload(ids, self._decoder.device), keeper):
            self._check()
        return keeper.chunks


class _Keeper(KVOnly):
    """Keeps the rows of each chunk from the K and V of every layer, with the heads of all ranks.

    places: rows of each chunk in the launch.
    """

    def __init__(self, decoder: Decoder, rows: Rows, chunks: list[ChunkKV], places: list[slice]) -> None:
        super().__init__(decoder, rows)
        self._part, self.chunks, self._places = decoder.part, chunks, places

    def fresh(self, fresh: FreshKV) -> None:
        k, v = (self._part.all_heads(x, fresh.layer.index) for x in (fresh.k, fresh.v))
        for chunk, rows in zip(self.chunks, self._places, strict=True):
            chunk.k.append(k[rows].clone())
            chunk.v.append(v[rows].clone())


def _place_prefix(
    decoder: Decoder, pool: KVPool, sequences: Sequence[PagedSequence], prefix: PrefixKV, rope_len: int
) -> None:
    positions = torch.arange(len(prefix.token_ids), device=decoder.device)
    rotations = decoder.rope.cos_sin(positions, rope_len)
    for sequence in sequences:
        places = sequence.slots(positions)
        slots = [Slots(places, cos, sin) for cos, sin in rotations]
        for layer, (k, v) in enumerate(zip(prefix.kv.k, prefix.kv.v, strict=True)):
            decoder.part.ranks.share(k)
            decoder.part.ranks.share(v)
            k, v = decoder.part.own_heads(k, layer), decoder.part.own_heads(v, layer)
            decoder.kernels.load_kv(StoredKV(k, v), pool.layers[layer], slots[decoder.rope.of_layer[layer]])
