"""Header of a safetensors file: the dtype, shape and bytes of each tensor."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.model_files import AGAIN, is_there

# Limits of a file's header. The largest models have half as many tensors in all their files.
MOST_TENSORS, MOST_HEADER_BYTES = 1 << 18, 32 << 20
MOST_BYTES = 1 << 63
BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""dtype -> bits of a value."""


class StoredRange(NamedTuple):
    """A tensor in the file: bytes `begin` to `end` from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def safetensors_offsets(path: Path) -> dict[str, StoredRange]:
    """Return the tensors of a file in stored order. Raises UsageError unless they fill the file behind the header
    without gaps or overlaps, each with as many bytes as its dtype and shape have, as safetensors requires."""
    if not is_there(path):
        raise UsageError(f"{path} does not exist", AGAIN)
    with open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_bytes > size - 8:
            raise _damaged(path, f"it has {size:,} bytes and ends inside its header")
        if header_bytes > MOST_HEADER_BYTES:
            raise UsageError(
                f"{path} has a header of {header_bytes:,} bytes; the limit is {MOST_HEADER_BYTES:,}", AGAIN
            )
        raw = stream.read(header_bytes)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    if len(header) > MOST_TENSORS:
        raise UsageError(f"{path} holds {len(header):,} tensors; the limit is {MOST_TENSORS:,}", AGAIN)
    start = 8 + header_bytes
    found = {name: _range(path, name, entry, start) for name, entry in header.items()}
    found = dict(sorted(found.items(), key=lambda item: item[1][2:]))
    end = start
    for name, stored in found.items():
        if stored.begin != end:
            raise _damaged(path, f"{name} begins at byte {stored.begin:,}, the tensor before it ends at {end:,}")
        end = stored.end
    if end != size:
        raise _damaged(path, f"its tensors end at byte {end:,}, the file has {size:,}")
    return found


def _range(path: Path, name: str, entry: Any, start: int) -> StoredRange:
    """Return a header's entry, checked. start: of the data, in bytes."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        bits = BITS[dtype]
        if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, f"{name} has no known dtype, shape and data_offsets") from None
    num_bits = _product(shape) * bits
    if num_bits % 8 or end - begin != num_bits // 8:
        raise _damaged(path, f"{name}, {dtype} {shape}, has {end - begin:,} bytes instead of {num_bits / 8:,.1f}")
    return StoredRange(dtype, tuple(shape), start + begin, start + end)


def _product(shape: list[int]) -> int:
    """Return the number of values, at most MOST_BYTES: a header may hold large numbers, and many."""
    if 0 in shape:
        return 0
    count = 1
    for n in shape:
        count = min(MOST_BYTES, count * n)
    return count


def _damaged(path: Path, reason: str) -> UsageError:
    return UsageError(f"{path} is not a readable safetensors file: {reason}", AGAIN)
