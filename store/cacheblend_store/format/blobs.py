"""Blobs: one layer of one chunk as a safetensors container, by codec.

A blob has exactly one valid encoding; anything else is damage. This module does not import torch, so that records can
be checked without it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from cacheblend_store.errors import BadBlob
from cacheblend_store.format.levels import BITS, bits_of, packed_bytes

ALIGNMENT = 64
PLAIN = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
FLOAT8 = {"float8_e4m3": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
CODECS = (*PLAIN, "float8_e4m3", "int7", "int4")
REMOVED = ("int8", "int6", "int3", "float8_e5m2")
"""Codecs of earlier versions. Their blobs are checked, moved and removed; their KV cannot be decoded."""
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1}


class TensorSpec(NamedTuple):  # hashed for every layer of every chunk that is loaded
    """Type and shape of one tensor in a blob."""

    dtype: str  # as named by safetensors
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


BlobSpec = Mapping[str, TensorSpec]
"""Tensor name -> dtype and shape, in the order of the data."""


@lru_cache(maxsize=1024)  # a loader needs few shapes, hundreds of times each
def blob_spec(codec: str, num_tokens: int, num_kv_heads: int, head_dim: int, v_head_dim: int = 0) -> BlobSpec:
    """Return the tensors of one layer.

    Plain codecs: k and v [tokens, num_kv_heads, head_dim]. float8 codecs add a scale per head. Few-bit codecs: packed
    codes (bits in `levels.BITS`, layout in `levels.PLANES`), a scale per token and head, and the mean of K's channels
    over the chunk; scales and means are bfloat16.

    v_head_dim: head_dim of v if it differs from k's, else 0.
    """
    dims, dtype = {"k": head_dim, "v": v_head_dim or head_dim}, PLAIN.get(codec) or FLOAT8.get(codec)
    if dtype is not None:
        spec = {name: TensorSpec(dtype, (num_tokens, num_kv_heads, dim)) for name, dim in dims.items()}
        if codec in FLOAT8:
            spec |= dict.fromkeys(("k_scale", "v_scale"), TensorSpec("F32", (num_kv_heads,)))
        return MappingProxyType(spec)
    if codec in BITS:
        scale = TensorSpec("BF16", (num_tokens, num_kv_heads))
        codes = {
            name: TensorSpec("U8", (num_tokens, num_kv_heads, packed_bytes(dim, bits)))
            for (name, dim), bits in zip(dims.items(), bits_of(codec, *dims.values()), strict=True)
        }
        mean = TensorSpec("BF16", (1, num_kv_heads, head_dim))
        return MappingProxyType({**codes, "k_scale": scale, "v_scale": scale, "k_mean": mean})
    raise BadBlob(f"unknown codec {codec!r}", f"known: {', '.join(CODECS)}")


def state_spec(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> BlobSpec:
    """Return the tensors of a state, named by their number. tensors: dtype and shape of each."""
    return {str(i): TensorSpec(*tensor) for i, tensor in enumerate(tensors)}


def encode_blob(spec: BlobSpec, data: Mapping[str, bytes | memoryview]) -> bytes:
    """Return the container. The header is padded so that the data starts at a multiple of ALIGNMENT."""
    for name, tensor in spec.items():
        if memoryview(data[name]).nbytes != tensor.num_bytes:
            raise ValueError(f"tensor {name} has {memoryview(data[name]).nbytes} bytes, its spec {tensor.num_bytes}")
    return b"".join([blob_prefix(spec), *(data[name] for name in spec)])


def blob_prefix(spec: BlobSpec) -> bytes:
    """Return the start of the container: header length and JSON, padded with spaces. The tensor data follows."""
    return _prefix_of(tuple(spec.items()))


def blob_size(spec: BlobSpec) -> int:
    return len(blob_prefix(spec)) + sum(tensor.num_bytes for tensor in spec.values())


@lru_cache(maxsize=256)  # a loader parses hundreds of blobs with few shapes
def _prefix_of(items: tuple[tuple[str, TensorSpec], ...]) -> bytes:
    header, offset = {}, 0
    for name, tensor in items:
        end = offset + tensor.num_bytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % ALIGNMENT)
    return struct.pack("<Q", len(raw)) + raw
