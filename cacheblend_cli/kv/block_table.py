"""Block tables: which blocks of a pool hold the positions of a sequence. On the host; no tensor is needed for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from cacheblend_cli.kv.block_allocator import BlockAllocator


class BlockSpace(ABC):
    """Blocks that sequences share: of a pool here, or of one that a worker has."""

    block_size: int
    allocator: BlockAllocator

    @abstractmethod
    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole blocks of every layer. None is in both."""

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class BlockTable:
    """The blocks of one sequence, position p in blocks[p // block_size]. It has a reference to each of them."""

    def __init__(self, space: BlockSpace, blocks: list[int]) -> None:
        self._space, self.blocks = space, blocks
        self._changed()

    def _changed(self) -> None:
        """Called whenever the blocks are others."""

    @property
    def capacity(self) -> int:
        return len(self.blocks) * self._space.block_size

    def ensure(self, num_tokens: int) -> None:
        """Grow to hold num_tokens positions. Raises DeviceError when the pool is full."""
        missing = self._space.blocks_for(num_tokens) - len(self.blocks)
        if missing > 0:
            last = self.blocks[-1] if self.blocks else None
            self.blocks = self.blocks + self._space.allocator.allocate(missing, behind=last)
            self._changed()

    def fork(self) -> Self:
        """A second owner of the same blocks; whoever writes first copies (`make_writable`)."""
        self._space.allocator.share(self.blocks)
        return type(self)(self._space, list(self.blocks))

    def make_writable(self, start: int, end: int) -> None:
        """Copy on write: the blocks of positions start:end belong to this sequence alone afterwards."""
        allocator, size = self._space.allocator, self._space.block_size
        indexes = [i for i in range(start // size, -(-end // size)) if allocator.is_shared(self.blocks[i])]
        if not indexes:
            return
        fresh = allocator.allocate(len(indexes))
        shared = [self.blocks[i] for i in indexes]
        self._space.copy_blocks(shared, fresh)
        allocator.free(shared)
        for i, block in zip(indexes, fresh, strict=True):
            self.blocks[i] = block
        self._changed()

    def release(self) -> None:
        """Give the blocks back. The sequence is empty afterwards."""
        self._space.allocator.free(self.blocks)
        self.blocks = []
        self._changed()
