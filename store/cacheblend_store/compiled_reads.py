"""compiled_reads.c through ctypes: several values of a file read and checked in one call, without the GIL.

Built when the package is installed, if there is a C compiler. Digests are computed by the library inside the xxhash
package. Without either, readers read and digest value by value, and take the GIL several times for each.
"""

from __future__ import annotations

import ctypes
import importlib.util
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from struct import Struct
from typing import Any, NamedTuple

ABI, MOST_PARTS = 1, 15  # as in compiled_reads.c
_READS, _HASH = Struct("4q9P").pack, Struct("5P").pack
_HASH_FUNCTIONS = ("createState", "freeState", "128bits_reset", "128bits_update", "128bits_digest")


class Value(NamedTuple):
    """A value to read. offset: of its page header in the file; head: the page header and the value's own head, both
    compared; seed: digested before its head and the rest; digest: XXH3-128."""

    offset: int
    head: bytes
    seed: bytes
    digest: bytes


class CompiledReads:
    """Reads of values into places of a buffer, one group at a time. All values have heads and parts of the same sizes.
    Several threads may read at once."""

    def __init__(self, groups: Sequence[Sequence[Value]], places: Sequence[Sequence[tuple[int, int]]]) -> None:
        """places: (start, end) in the buffer of each part of each value of the largest group."""
        values = [value for group in groups for value in group]
        first = values[0]
        self._bounds, self._num_parts = list(accumulate(map(len, groups), initial=0)), len(places[0])
        self._seed_bytes, self._head_bytes = len(first.seed), len(first.head)
        self._ends = [max(end for _, end in parts) for parts in places]
        self._offsets = array("q", [value.offset for value in values])
        self._head_starts = array("q", [i * self._head_bytes for i in range(len(places) + 1)])
        self._places = array("q", [n for parts in places for start, end in parts for n in (start, end - start)])
        self._heads, self._seeds, self._digests = (
            ctypes.create_string_buffer(b"".join(getattr(value, name) for value in values))
            for name in ("head", "seed", "digest")
        )

    def read(self, handle: int, group: int, buffer: memoryview) -> bool:
        """Fill the buffer's places with a group of the file's values. Returns whether all of them could be read and are
        right; False also without compiled code."""
        found, first = _library(), self._bounds[group]
        count = self._bounds[group + 1] - first
        if found is None or buffer.nbytes < max(self._ends[:count]) or self._num_parts > MOST_PARTS:
            return False
        (code, hash_functions), address = found, ctypes.addressof
        scratch = ctypes.create_string_buffer(self._head_bytes * count)
        given = _READS(
            handle, count, self._num_parts, self._seed_bytes,
            self._offsets.buffer_info()[0] + 8 * first, self._head_starts.buffer_info()[0],
            self._places.buffer_info()[0], address(self._heads) + self._head_bytes * first, address(scratch),
            address(ctypes.c_char.from_buffer(buffer)), address(self._seeds) + self._seed_bytes * first,
            address(self._digests) + 16 * first, address(hash_functions),
        )  # fmt: skip
        return bool(code.cb_read_values(given))


@cache
def _library() -> tuple[Any, Any] | None:
    """Return the compiled code and the addresses of xxhash's functions; None if one of them does not load."""
    found = importlib.util.find_spec("cacheblend_store._compiled_reads")
    of_xxhash = importlib.util.find_spec("xxhash._xxhash")
    if found is None or found.origin is None or of_xxhash is None or of_xxhash.origin is None:
        return None
    try:
        code, xxhash = ctypes.CDLL(found.origin), ctypes.CDLL(of_xxhash.origin)
        if ctypes.c_int32.in_dll(code, "cb_abi").value != ABI:
            return None
        code.cb_read_values.argtypes = [ctypes.c_char_p]
        functions = [getattr(xxhash, f"XXH3_{name}") for name in _HASH_FUNCTIONS]
    except (OSError, AttributeError, ValueError):  # built for another machine, or a library that hides its functions
        return None
    addresses = _HASH(*(ctypes.cast(function, ctypes.c_void_p).value for function in functions))
    return code, ctypes.create_string_buffer(addresses, len(addresses))
