"""A blob: one layer of one chunk as a safetensors container. There is one way to write a blob, so that any other is damage."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

ALIGNMENT = 64
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1}


@dataclass(frozen=True)
class TensorSpec:
    """dtype as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        size = ITEM_BYTES[self.dtype]
        for n in self.shape:
            size *= n
        return size


BlobSpec = Mapping[str, TensorSpec]
"""Tensor name -> what it must be, in the order of the data."""


def encode_blob(spec: BlobSpec, data: Mapping[str, bytes | memoryview]) -> bytes:
    """The container; the header is padded so that the data starts at a multiple of ALIGNMENT."""
    for name, tensor in spec.items():
        if memoryview(data[name]).nbytes != tensor.num_bytes:
            raise ValueError(f"tensor {name} has {memoryview(data[name]).nbytes} bytes, its spec {tensor.num_bytes}")
    return b"".join([blob_prefix(spec), *(data[name] for name in spec)])


def blob_prefix(spec: BlobSpec) -> bytes:
    """What the container begins with: the header's length and its JSON, padded with spaces. The tensors' bytes follow."""
    return _prefix_of(tuple(spec.items()))


def blob_size(spec: BlobSpec) -> int:
    return len(blob_prefix(spec)) + sum(tensor.num_bytes for tensor in spec.values())


@lru_cache(maxsize=256)  # a loader parses hundreds of blobs of a few shapes
def _prefix_of(items: tuple[tuple[str, TensorSpec], ...]) -> bytes:
    header, offset = {}, 0
    for name, tensor in items:
        end = offset + tensor.num_bytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % ALIGNMENT)
    return struct.pack("<Q", len(raw)) + raw
