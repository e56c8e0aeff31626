"""Collect: prefill chunks behind the shared prefix and keep every layer's K (before RoPE) and V.

Several sequences go through the model in one launch, packed up to `pack_tokens` rows: large enough for the matrix
products to be efficient, small enough to keep memory flat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from cacheblend_kernels import Slots, StoredKV
from torch import Tensor

from cacheblend_cli.errors import DeviceError
from cacheblend_cli.kv.forward import FreshKV, KVOnly, Observer, run_layers
from cacheblend_cli.kv.pool import KVPool, PagedSequence
from cacheblend_cli.kv.rows import packed_rows
from cacheblend_cli.model.decoder import Decoder

PACK_TOKENS = {"cpu": 512}
OTHER_PACK_TOKENS = 4096
BLOCK_SIZE = 64  # of the pool a launch has to itself


def pack_tokens(device: torch.device) -> int:
    """Rows of one launch: a CPU's matrix products are at full speed from some 300 rows, a GPU wants more."""
    return PACK_TOKENS.get(device.type, OTHER_PACK_TOKENS)


@dataclass(frozen=True)
class Kept:
    """Keep the KV of tokens start:end of the sequence (counted after the prefix) under `key`."""

    key: bytes
    start: int
    end: int


@dataclass(frozen=True)
class CollectSequence:
    """Tokens that are prefilled together behind the prefix, and the runs of them to keep."""

    token_ids: tuple[int, ...]
    kept: tuple[Kept, ...]


@dataclass
class ChunkKV:
    """K before RoPE and V of one chunk: a tensor [num_tokens, num_kv_heads, head_dim] a layer, compute dtype."""

    key: bytes
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class PrefixKV:
    """The shared prefix's KV, computed once. kv.k and kv.v: [prefix_len, num_kv_heads, head_dim] a layer, unrotated."""

    token_ids: tuple[int, ...]
    kv: ChunkKV


@torch.inference_mode()
def collect_prefix(decoder: Decoder, prefix_ids: Sequence[int], key: bytes = b"") -> PrefixKV:
    """Prefill the prefix alone. An empty prefix is allowed and has no KV."""
    prefix = PrefixKV((), ChunkKV(key))
    if prefix_ids:
        sequence = CollectSequence(tuple(prefix_ids), (Kept(key, 0, len(prefix_ids)),))
        [kv] = _collect_what_fits(decoder, prefix, [sequence])
        prefix = PrefixKV(tuple(prefix_ids), kv)
    return prefix


@torch.inference_mode()
def collect(decoder: Decoder, prefix: PrefixKV, sequences: Sequence[CollectSequence]) -> Iterator[ChunkKV]:
    """The KV of every run that is kept, in order. Raises DeviceError when the device has no room for a sequence even alone."""
    prefix_len = len(prefix.token_ids)
    regimes = [decoder.rope.regime(prefix_len + len(s.token_ids)) for s in sequences]
    for pack in packs(sequences, regimes, pack_tokens(decoder.device)):
        yield from _collect_what_fits(decoder, prefix, pack)


def packs(sequences: Sequence[CollectSequence], regimes: Sequence[int], most: int) -> Iterator[list[CollectSequence]]:
    """Group adjacent sequences of one RoPE regime up to `most` rows; a longer one goes alone."""
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


def _collect_what_fits(decoder: Decoder, prefix: PrefixKV, pack: Sequence[CollectSequence]) -> list[ChunkKV]:
    """The whole pack at once, or in halves where the device has too little memory for it."""
    try:
        return _collect_pack(decoder, prefix, pack)
    except torch.OutOfMemoryError as error:
        if len(pack) == 1:
            count = len(prefix.token_ids) + len(pack[0].token_ids)
            raise DeviceError(
                f"{decoder.device} ran out of memory computing the KV of {count} tokens that stand together",
                "use a smaller --chunk-tokens (or --window), end what else uses the GPU, or use --device cpu",
            ) from error
    halves = pack[: len(pack) // 2], pack[len(pack) // 2 :]  # the error is gone, and with it what its frames held
    return [kv for half in halves for kv in _collect_what_fits(decoder, prefix, half)]


def _collect_pack(decoder: Decoder, prefix: PrefixKV, pack: Sequence[CollectSequence]) -> list[ChunkKV]:
    start = len(prefix.token_ids)
    lengths = [start + len(s.token_ids) for s in pack]
    blocks = sum(-(-n // BLOCK_SIZE) for n in lengths)
    pool = KVPool(decoder.spec, blocks, BLOCK_SIZE, decoder.dtype, decoder.device)
    held = [pool.new_sequence(n) for n in lengths]
    rope_len = max(lengths)  # a pack is of one RoPE regime, see `packs`
    for sequence in held:
        _place_prefix(decoder, pool, sequence, prefix, rope_len)
    parts = [
        (sequence, torch.arange(start, n, device=decoder.device), n) for sequence, n in zip(held, lengths, strict=True)
    ]
    rows = packed_rows(decoder, parts, rope_len)
    keeper = _Keeper([ChunkKV(kept.key) for s in pack for kept in s.kept], _kept_rows(pack))
    token_ids = torch.tensor([i for s in pack for i in s.token_ids], device=decoder.device)
    run_layers(decoder, rows, token_ids, KVOnly(decoder, rows), keeper)
    return keeper.chunks


class _Keeper(Observer):
    """Keeps what is wanted of every layer's K and V. rows: of each chunk, in the launch."""

    def __init__(self, chunks: list[ChunkKV], rows: list[slice]) -> None:
        self.chunks, self._rows = chunks, rows

    def fresh(self, fresh: FreshKV) -> None:
        for chunk, rows in zip(self.chunks, self._rows, strict=True):
            chunk.k.append(fresh.k[rows].clone())
            chunk.v.append(fresh.v[rows].clone())


def _kept_rows(pack: Sequence[CollectSequence]) -> list[slice]:
    """Rows of each run that is kept, in the packed launch."""
    spans, base = [], 0
    for sequence in pack:
        spans += [slice(base + c.start, base + c.end) for c in sequence.kept]
        base += len(sequence.token_ids)
    return spans


def _place_prefix(decoder: Decoder, pool: KVPool, sequence: PagedSequence, prefix: PrefixKV, rope_len: int) -> None:
    if not prefix.token_ids:
        return
    positions = torch.arange(len(prefix.token_ids), device=decoder.device)
    cos, sin = decoder.rope.cos_sin(positions, rope_len)
    slots = Slots(sequence.slots(positions), cos, sin)
    for cache, k, v in zip(pool.layers, prefix.kv.k, prefix.kv.v, strict=True):
        decoder.kernels.load_kv(StoredKV(k, v), cache, slots)
