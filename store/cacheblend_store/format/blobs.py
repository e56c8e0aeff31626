"""A blob: one layer of one chunk as a safetensors container. The parser trusts nothing it reads."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from cacheblend_store.errors import BadBlob

MAX_HEADER_BYTES = 64 << 10
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
    """What the container begins with: the header's length and the header. The tensors' bytes follow."""
    header = blob_header(spec)
    return struct.pack("<Q", len(header)) + header


def parse_blob(view: memoryview, spec: BlobSpec) -> dict[str, memoryview]:
    """Views of the tensors' bytes. Raises BadBlob unless the container is exactly what `spec` says."""
    if len(view) < 8:
        raise BadBlob("the blob is shorter than its header")
    (length,) = struct.unpack("<Q", view[:8])
    if length > MAX_HEADER_BYTES or 8 + length > len(view):
        raise BadBlob(f"the blob's header claims {length} bytes")
    total = sum(t.num_bytes for t in spec.values())
    if 8 + length + total != len(view):
        raise BadBlob(f"the blob has {len(view)} bytes, and {8 + length + total} are implied")
    raw = bytes(view[8 : 8 + length])
    if raw != blob_header(spec):  # the common case is byte for byte what we write; anything else is read carefully
        _check_header(raw, spec)
    out, offset = {}, 8 + length
    for name, tensor in spec.items():
        out[name] = view[offset : offset + tensor.num_bytes]
        offset += tensor.num_bytes
    return out


def _check_header(raw: bytes, spec: BlobSpec) -> None:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadBlob("the blob's header is not JSON") from error
    if not isinstance(header, dict) or set(header) - {"__metadata__"} != set(spec):
        raise BadBlob("the blob's header does not name the tensors it should")
    offset = 0
    for name, tensor in spec.items():
        wanted = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        if header[name] != wanted:
            raise BadBlob(f"tensor {name} of the blob is not {tensor.dtype} {list(tensor.shape)}")
        offset += tensor.num_bytes


def blob_header(spec: BlobSpec) -> bytes:
    """The JSON header of the container, padded with spaces."""
    return _header_of(tuple(spec.items()))


@lru_cache(maxsize=256)  # a loader parses hundreds of blobs of a few shapes
def _header_of(items: tuple[tuple[str, TensorSpec], ...]) -> bytes:
    header, offset = {}, 0
    for name, tensor in items:
        end = offset + tensor.num_bytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    return raw + b" " * (-(8 + len(raw)) % ALIGNMENT)
