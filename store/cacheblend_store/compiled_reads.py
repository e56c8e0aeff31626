"""compiled_reads.c through ctypes: many values of a file read and digested in one call, without the GIL.

Built when the package is installed, if there is a C compiler. The digests are computed by the library inside the xxhash
package. Without either, readers read and digest value by value, which takes the GIL several times for each.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from struct import Struct
from typing import Any

ABI, DIGEST_BYTES = 1, 16  # as in compiled_reads.c
_READS, _HASH = Struct("2q4Pq2P").pack, Struct("5P").pack
_HASH_FUNCTIONS = ("createState", "freeState", "128bits_reset", "128bits_update", "128bits_digest")


def read_digested(
    handle: int, offsets: Sequence[int], parts: Sequence[Sequence[memoryview]], seeds: Sequence[bytes]
) -> list[bytes] | None:
    """Fill each value's parts from its offset in the file. Returns the XXH3-128 of each seed and value, without the
    value's first part.

    parts: writable, contiguous; seeds: all of one length. None if there is no compiled code, or a value could not be
    read whole.
    """
    found = _library()
    if found is None or not offsets:
        return None
    code, hash_functions = found
    count, memory = len(offsets), [_address_and_size(part) for value in parts for part in value]
    flat = [number for pair in memory for number in pair]
    of_offsets = (ctypes.c_int64 * count)(*offsets)
    firsts = (ctypes.c_int64 * (count + 1))(*accumulate(map(len, parts), initial=0))
    of_parts = (ctypes.c_uint64 * len(flat))(*flat)
    digests, all_seeds = ctypes.create_string_buffer(DIGEST_BYTES * count), b"".join(seeds)
    address = ctypes.addressof
    of_seeds = ctypes.c_char_p(all_seeds)
    given = _READS(
        handle, count, address(of_offsets), address(firsts), address(of_parts),
        ctypes.cast(of_seeds, ctypes.c_void_p).value, len(seeds[0]), address(digests), address(hash_functions),
    )  # fmt: skip
    if code.cb_read_digested(given):
        return None
    raw = digests.raw
    return [raw[at : at + DIGEST_BYTES] for at in range(0, len(raw), DIGEST_BYTES)]


def _address_and_size(part: memoryview) -> tuple[int, int]:
    size = part.nbytes
    return (ctypes.addressof(ctypes.c_char.from_buffer(part)), size) if size else (0, 0)


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
        code.cb_read_digested.argtypes = [ctypes.c_char_p]
        functions = [getattr(xxhash, f"XXH3_{name}") for name in _HASH_FUNCTIONS]
    except (OSError, AttributeError, ValueError):  # built for another machine, or a library that hides its functions
        return None
    addresses = _HASH(*(ctypes.cast(function, ctypes.c_void_p).value for function in functions))
    return code, ctypes.create_string_buffer(addresses, len(addresses))
