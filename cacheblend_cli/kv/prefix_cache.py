"""Prefix cache: full blocks whose KV stays in the pool after their sequence ends, found by token ids and KV provenance.

A block's key is a digest of the block before it, its token ids and the provenance of its slice of the prompt. Token ids
are compared on every hit. A prompt finds only KV that it would compute to the same bits: whole slices with the same
boundaries and provenance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cacheblend_cli.kv.block_table import BlockSpace, BlockTable


@dataclass(frozen=True)
class KVProvenance:
    """Provenance of the exact KV at the beginning of a prompt."""

    root: bytes  # common to the whole prompt, such as the tenant
    slices: tuple[bytes, ...]  # how each whole slice is filled
    slice_rows: int  # positions of a slice, a multiple of the block size

    @property
    def num_tokens(self) -> int:
        """Number of leading positions that may serve another prompt."""
        return len(self.slices) * self.slice_rows


@dataclass(frozen=True)
class PrefixHit:
    """Cached KV of a prompt's first num_tokens positions."""

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0


@dataclass(frozen=True)
class _Kept:
    digest: bytes
    token_ids: tuple[int, ...]


class PrefixCache:
    """Index of a pool's kept blocks. It owns no references: the allocator reports when a block is reused."""

    def __init__(self, space: BlockSpace) -> None:
        self._allocator, self._size = space.allocator, space.block_size
        self._block_of: dict[bytes, int] = {}
        self._kept: dict[int, _Kept] = {}

    def find(self, token_ids: Sequence[int], origin: KVProvenance) -> list[int]:
        """Return the blocks of the longest run of leading tokens with cached KV of this origin."""
        blocks: list[int] = []
        parent, size = origin.root, self._size
        for start in range(0, origin.num_tokens, size):
            ids = tuple(token_ids[start : start + size])
            parent = _digest(parent, ids, origin.slices[start // origin.slice_rows])
            block = self._block_of.get(parent)
            if block is None or self._kept[block].token_ids != ids:
                break
            blocks.append(block)
        return blocks

    def keep(self, table: BlockTable, token_ids: Sequence[int], origin: KVProvenance) -> None:
        """Keep the blocks of these leading tokens unless they are kept already. The blocks are not written to any
        more."""
        parent, size = origin.root, self._size
        for start in range(0, min(len(token_ids), origin.num_tokens) // origin.slice_rows * origin.slice_rows, size):
            ids, index = tuple(token_ids[start : start + size]), start // size
            parent = _digest(parent, ids, origin.slices[start // origin.slice_rows])
            block = table.blocks[index]
            if index >= table.num_freed_blocks and parent not in self._block_of and block not in self._kept:
                self._block_of[parent], self._kept[block] = block, _Kept(parent, ids)
                self._allocator.keep(block, self._forget)

    def _forget(self, block: int) -> None:
        del self._block_of[self._kept.pop(block).digest]


def _digest(parent: bytes, ids: tuple[int, ...], how: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in (parent, how, np.asarray(ids, dtype=np.int64).tobytes()):
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()
