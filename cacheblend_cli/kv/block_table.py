"""Block tables map positions of a sequence to blocks of a pool. They are on the host, without tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from cacheblend_cli.kv.block_allocator import BlockAllocator


class BlockSpace(ABC):
    """Blocks that sequences share: of a pool in this process, or of a worker's pool."""

    block_size: int
    allocator: BlockAllocator

    @abstractmethod
    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole blocks of every layer. `source` and `target` are disjoint."""

    def has_state(self, block: int, num_tokens: int) -> bool:
        """Return whether the block has the recurrent state after the first num_tokens of its sequence."""
        return False

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class BlockTable:
    """The blocks of one sequence; position p is in blocks[p // block_size].

    num_freed_blocks: number of leading blocks given back, since no layer attends to their positions any more. Their
    entries are placeholders that are neither read nor written.
    """

    def __init__(self, space: BlockSpace, blocks: list[int], num_freed_blocks: int = 0) -> None:
        self._space, self.blocks, self.num_freed_blocks = space, blocks, num_freed_blocks
        self._changed()

    def _changed(self) -> None:
        """Called whenever `blocks` changes."""

    @property
    def owned(self) -> list[int]:
        """Blocks it holds a reference to."""
        return self.blocks[self.num_freed_blocks :]

    def ensure(self, num_tokens: int) -> None:
        """Grow to hold num_tokens positions. Raises DeviceError when the pool is full."""
        missing = self._space.blocks_for(num_tokens) - len(self.blocks)
        if missing > 0:
            last = self.blocks[-1] if self.blocks else None
            self.blocks = self.blocks + self._space.allocator.allocate(missing, after=last)
            self._changed()

    def fork(self) -> Self:
        """Return a second owner of the same blocks; the first to write copies (`make_writable`)."""
        self._space.allocator.share(self.owned)
        return type(self)(self._space, list(self.blocks), self.num_freed_blocks)

    def give_back(self, count: int) -> None:
        """Give back the first `count` blocks, at least one fewer than all."""
        self._space.allocator.free(self.blocks[self.num_freed_blocks : count])
        self.blocks[:count] = [self.blocks[count]] * count
        self.num_freed_blocks = count
        self._changed()

    def make_writable(self, start: int, end: int) -> None:
        """Copy on write: afterwards this sequence alone owns the blocks of positions start:end."""
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
        self._space.allocator.free(self.owned)
        self.blocks, self.num_freed_blocks = [], 0
        self._changed()
