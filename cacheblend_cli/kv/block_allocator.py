"""Blocks of the paged KV cache: who owns which, counted by references.

Ranges and owners: a block is free (in `_free`) or used (reference count >= 1 in `_refs`), never both;
free + used = total. Block tables own one reference to each of their blocks.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from enum import Enum

from cacheblend_cli.errors import DeviceError


class Allocation(Enum):
    OK = "ok"
    LATER = "later"  # fits once running sequences have ended
    NEVER = "never"  # larger than the whole pool


class BlockAllocator:
    """Reference-counted blocks. `watermark`: share of the pool kept free for sequences that grow while they decode."""

    def __init__(self, num_blocks: int, watermark: float = 0.0) -> None:
        if num_blocks < 1:
            raise ValueError("a pool has at least one block")
        self.num_blocks = num_blocks
        self._reserve = int(watermark * num_blocks)
        self._free = list(range(num_blocks))  # sorted
        self._refs: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._refs)

    def can_allocate(self, count: int) -> Allocation:
        if count > self.num_blocks - self._reserve:
            return Allocation.NEVER
        return Allocation.OK if count <= self.num_free - self._reserve else Allocation.LATER

    def can_append(self, count: int = 1) -> bool:
        """Whether running sequences can take `count` more blocks; the watermark is there for them."""
        return count <= self.num_free

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, adjacent when there is such a run (the CPU path then attends over a view). Raises DeviceError."""
        if count > self.num_free:
            raise DeviceError(
                f"the KV pool has {self.num_free} free blocks of {self.num_blocks}, and {count} are needed",
                "ask with fewer chunks or a smaller --max-tokens",
            )
        start = self._adjacent(count)
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more owner of each block."""
        for block in blocks:
            self._refs[block] += 1

    def is_shared(self, block: int) -> bool:
        return self._refs[block] > 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block; the last one frees it."""
        for block in blocks:
            self._refs[block] -= 1
            if self._refs[block] == 0:
                del self._refs[block]
                bisect.insort(self._free, block)

    def check_integrity(self) -> None:
        """free + used = total, no block both, no block lost. Raises AssertionError: it is our own bug."""
        assert len(self._free) + len(self._refs) == self.num_blocks
        assert set(self._free).isdisjoint(self._refs)
        assert set(self._free) | set(self._refs) == set(range(self.num_blocks))
        assert self._free == sorted(self._free)
        assert all(count > 0 for count in self._refs.values())

    def _adjacent(self, count: int) -> int:
        """Index in the free list of the first run of `count` adjacent blocks, else 0."""
        run = 0
        for i, block in enumerate(self._free):
            run = run + 1 if i and block == self._free[i - 1] + 1 else 1
            if run >= count:
                return i - count + 1
        return 0
