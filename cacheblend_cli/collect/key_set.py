"""A set of chunk keys with eight bytes per key, for corpora of millions of chunks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
from cacheblend_store.format.keys import KEY_BYTES
from numpy.typing import NDArray

_RECENT = 1 << 16
_KEY = np.dtype([("number", "<u8"), ("rest", f"V{KEY_BYTES - 8}")])


class KeySet:
    """Chunk keys by their first 64 bits. Among ten million keys, the probability of a collision is 3e-6.

    Keys are in a sorted array; the latest ones are in a set until there are enough to merge.
    """

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self._sorted = np.empty(0, np.uint64).data
        self._recent = set[int]()
        for key in keys:
            self.add(key)

    def add(self, key: bytes) -> bool:
        """Add a key. Returns whether it is new."""
        if key in self:
            return False
        self._recent.add(_number(key))
        if len(self._recent) >= _RECENT:
            recent = np.fromiter(self._recent, np.uint64, len(self._recent))
            merged = np.concatenate((np.asarray(self._sorted), recent))
            merged.sort(kind="stable")
            self._sorted, self._recent = merged.data, set()
        return True

    def add_all(self, keys: bytes) -> NDArray[np.bool_]:
        """Add joined keys. Return a mask [num_keys] of the first occurrence of each new key."""
        numbers = np.frombuffer(keys, _KEY)["number"]
        new = np.zeros(len(numbers), np.bool_)
        new[np.unique(numbers, return_index=True)[1]] = True
        recent = np.fromiter(self._recent, np.uint64, len(self._recent))
        new &= ~np.isin(numbers, recent) & ~self._are_sorted(numbers)
        merged = np.concatenate((np.asarray(self._sorted), recent, numbers[new]))
        merged.sort(kind="stable")
        self._sorted, self._recent = merged.data, set()
        return new

    def _are_sorted(self, numbers: NDArray[np.uint64]) -> NDArray[np.bool_]:
        known = np.asarray(self._sorted)
        if not len(known):
            return np.zeros(len(numbers), np.bool_)
        at = known.searchsorted(numbers)
        return known[np.minimum(at, len(known) - 1)] == numbers

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes)
        number = _number(key)
        if number in self._recent:
            return True
        at = bisect_left(self._sorted, number)
        return at < len(self._sorted) and self._sorted[at] == number

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)


def _number(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")
