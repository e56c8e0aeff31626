"""Prefix cache: full blocks whose KV stays in the pool after their sequence, found by their token ids and by how it was computed.

A block is known by a digest of the block before it, its token ids and its provenance; token ids are compared on every hit.
By default a prompt finds only KV that it would compute to the same bits: of slices cut and filled alike.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from cacheblend_cli.kv.block_table import BlockSpace, BlockTable


@dataclass(frozen=True)
class KVProvenance:
    """Provenance of a prompt's KV. root: common to all of it, such as the tenant. exact_until: positions before it
    hold exact KV. blended: tells the other positions' KV from that of other prompts. slices: how each slice of slice_rows
    positions before exact_until is filled; slice_rows 0: all exact KV is taken for the same."""

    root: bytes
    exact_until: int
    blended: bytes = b""
    slices: tuple[bytes, ...] = ()
    slice_rows: int = 0

    @property
    def is_exact(self) -> bool:
        """Return whether all positions hold exact KV."""
        return not self.blended

    @property
    def in_full(self) -> KVProvenance:
        """Exact KV of the same prompt, computed in any way."""
        return KVProvenance(self.root, sys.maxsize)

    def of(self, end: int) -> bytes:
        """Provenance of a block that ends before this position."""
        if end > self.exact_until:
            return self.blended
        return self.slices[(end - 1) // self.slice_rows] if self.slice_rows else b""

    def reusable(self, num_tokens: int) -> int:
        """Return how many of the first num_tokens may serve another prompt: those of whole slices."""
        if not self.slice_rows:
            return num_tokens
        return min(num_tokens, self.exact_until) // self.slice_rows * self.slice_rows


@dataclass(frozen=True)
class Hit:
    """KV of a prompt's first num_tokens positions, found in these blocks; the last one may be used in part."""

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0

    def cut(self, num_tokens: int, block_size: int) -> Hit:
        """The first so many of its tokens."""
        return Hit(self.blocks[: -(-num_tokens // block_size)], num_tokens) if num_tokens > 0 else Hit()


@dataclass(frozen=True)
class _Kept:
    parent: bytes
    digest: bytes
    token_ids: tuple[int, ...]


class PrefixCache:
    """The index of a pool's kept blocks. It owns no reference: the allocator says when a block is given away."""

    def __init__(self, space: BlockSpace) -> None:
        self._space, self._size = space, space.block_size
        self._block_of: dict[bytes, int] = {}
        self._kept: dict[int, _Kept] = {}
        self._behind: dict[bytes, set[int]] = {}  # parent -> blocks

    def find(self, token_ids: Sequence[int], origin: KVProvenance) -> Hit:
        """The longest run of leading tokens whose KV is there, of this origin. A block may be used in part."""
        blocks: list[int] = []
        parent, size = origin.root, self._size
        for start in range(0, len(token_ids), size):
            ids, how = tuple(token_ids[start : start + size]), origin.of(start + size)
            digest = _digest(parent, ids, how)
            block = self._block_of.get(digest) if len(ids) == size else None
            if block is None or self._kept[block].token_ids != ids:
                part, length = self._in_part(_digest(parent, (), how), ids)
                return Hit((*blocks, part), start + length) if length else Hit(tuple(blocks), start)
            blocks.append(block)
            parent = digest
        return Hit(tuple(blocks), len(blocks) * size)

    def keep(self, sequence: BlockTable, token_ids: Sequence[int], origin: KVProvenance) -> None:
        """The sequence holds these tokens, and writes to its full blocks no more: keep those that are not kept yet."""
        parent, size = origin.root, self._size
        for i in range(len(token_ids) // size):
            ids, how = tuple(token_ids[i * size : (i + 1) * size]), origin.of((i + 1) * size)
            digest, block = _digest(parent, ids, how), sequence.blocks[i]
            if i >= sequence.gone and digest not in self._block_of and block not in self._kept:
                behind = _digest(parent, (), how)
                self._block_of[digest], self._kept[block] = block, _Kept(behind, digest, ids)
                self._behind.setdefault(behind, set()).add(block)
                self._space.allocator.keep(block, self._forget)
            parent = digest

    def take(self, hit: Hit, num_tokens: int, headroom: int = 0) -> BlockTable:
        """A sequence with room for num_tokens that begins with the hit: whole blocks are shared, one used in part is copied.
        headroom: tokens it may grow by. Raises DeviceError when the pool is too small."""
        space, whole = self._space, hit.num_tokens // self._size
        space.allocator.share(hit.blocks)  # so that none of them is given away for those to come
        try:
            fresh = space.allocator.allocate(space.blocks_for(num_tokens) - whole, headroom=space.blocks_for(headroom))
        except BaseException:
            space.allocator.free(hit.blocks)
            raise
        sequence = BlockTable(space, [*hit.blocks[:whole], *fresh])
        if part := hit.blocks[whole:]:
            space.copy_blocks(part, fresh[:1])
            space.allocator.free(part)
        return sequence

    def _in_part(self, parent: bytes, ids: tuple[int, ...]) -> tuple[int, int]:
        """The block behind this parent that begins with most of the ids, and with how many of them."""
        best, length = -1, 0
        for block in self._behind.get(parent, ()):
            pairs = zip(self._kept[block].token_ids, ids, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if same > length:
                best, length = block, same
        return best, length

    def _forget(self, block: int) -> None:
        kept = self._kept.pop(block)
        del self._block_of[kept.digest]
        siblings = self._behind[kept.parent]
        siblings.discard(block)
        if not siblings:
            del self._behind[kept.parent]


def _digest(parent: bytes, ids: tuple[int, ...], how: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in (parent, how, np.asarray(ids, dtype=np.int64).tobytes()):
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()
