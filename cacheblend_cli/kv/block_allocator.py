"""Reference-counted blocks of the paged KV cache.

Ranges and owners: a block is in one of three places, and free + cached + used = total.

| place   | owners | what it holds                                                          |
|---------|--------|------------------------------------------------------------------------|
| `_free` | none   | nothing                                                                |
| `_cached`  | none   | KV for later prompts; reused, least recently used first, if no block is free             |
| `_refs` | 1 or more | KV of sequences; block tables own one reference to each of their blocks |
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum

from cacheblend_cli.errors import DeviceError


class Allocation(Enum):
    OK = "ok"
    LATER = "later"  # fits once running sequences have ended
    NEVER = "never"  # larger than the whole pool


class BlockAllocator:
    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("a pool has at least one block")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))  # sorted
        self._refs: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._forget: dict[int, Callable[[int], None]] = {}  # called when a cached block is reused
        self.on_free: Callable[[int], None] = lambda block: None  # called when a block's contents are given up

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return len(self._refs)

    def allocate(self, count: int, *, after: int | None = None, headroom: int = 0) -> list[int]:
        """Allocate `count` blocks, adjacent if possible (the CPU path then attends over a view). Raises DeviceError if
        too few are free.

        after: preferred place, directly after this block. headroom: blocks to leave free after them if possible, to
        grow into.
        """
        if count > self.num_free:
            raise DeviceError(
                f"the KV pool has {self.num_free} free blocks of {self.num_blocks}; {count} are needed",
                "ask with fewer chunks or a smaller --max-tokens",
            )
        while len(self._free) < count:
            self._evict()
        start = self._place(count, after, headroom)
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add an owner to each block. A block has an owner already, or is cached."""
        for block in blocks:
            if block in self._cached:
                del self._cached[block]
            self._refs[block] = self._refs.get(block, 0) + 1

    def is_shared(self, block: int) -> bool:
        return self._refs[block] > 1

    def is_used(self, block: int) -> bool:
        return block in self._refs

    def keep(self, block: int, forget: Callable[[int], None]) -> None:
        """Keep a used block's contents after its last owner drops it. forget: called when the block is reused."""
        assert block in self._refs
        self._forget[block] = forget

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block; the last one frees it. Of kept blocks, the last is reused first."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                del self._refs[block]
                if block in self._forget:
                    self._cached[block] = None
                else:
                    self._give_up(block)

    def check_integrity(self) -> None:
        """Check that free + cached + used = total, no block is in two places, and none is lost. Raises
        AssertionError."""
        assert len(self._free) + len(self._cached) + len(self._refs) == self.num_blocks
        assert set(self._free) | set(self._cached) | set(self._refs) == set(range(self.num_blocks))
        assert self._free == sorted(self._free)
        assert all(count > 0 for count in self._refs.values())
        assert set(self._cached) <= self._forget.keys() <= set(self._cached) | set(self._refs)

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        self._forget.pop(block)(block)
        self._give_up(block)

    def _give_up(self, block: int) -> None:
        self.on_free(block)
        bisect.insort(self._free, block)

    def _place(self, count: int, after: int | None, headroom: int) -> int:
        """Return the index in the free list from which `count` blocks are taken."""
        if after is not None:
            i = bisect.bisect_left(self._free, after + 1)
            if self._free[i : i + count] == [*range(after + 1, after + 1 + count)]:
                return i
        found = self._adjacent(count + headroom) if headroom else None
        return (self._adjacent(count) or 0) if found is None else found

    def _adjacent(self, count: int) -> int | None:
        """Return the index in the free list of the first run of `count` adjacent blocks."""
        run = 0
        for i, block in enumerate(self._free):
            run = run + 1 if i and block == self._free[i - 1] + 1 else 1
            if run >= count:
                return i - count + 1
        return None
