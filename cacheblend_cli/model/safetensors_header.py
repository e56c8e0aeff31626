"""Header of a safetensors file: the dtype, shape and bytes of each tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.model_files import AGAIN, is_there

MOST_HEADER_BYTES = 32 << 20
"""Of a file: enough for 200,000 tensors."""


class StoredRange(NamedTuple):
    """A tensor in the file: bytes `begin` to `end` from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def safetensors_offsets(path: Path) -> dict[str, StoredRange]:
    """Return the tensors of a file in stored order. Raises UsageError for a file that the library refuses: it checks
    that they fill the file behind the header, each with as many bytes as its dtype and shape have."""
    if not is_there(path):
        raise UsageError(f"{path} does not exist", AGAIN)
    try:
        with open(path, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > MOST_HEADER_BYTES:
                raise ValueError(f"its header has {size:,} bytes; the limit is {MOST_HEADER_BYTES:,}")
            with safe_open(path, framework="np"):  # checks the header
                header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        found = {
            name: StoredRange(entry["dtype"], tuple(entry["shape"]), *(8 + size + at for at in entry["data_offsets"]))
            for name, entry in header.items()
        }
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is not a readable safetensors file: {error}", AGAIN) from error
    return dict(sorted(found.items(), key=lambda item: item[1][2:]))
