"""Stored KV as K and V again, by the backend that is the reference of the others."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from cacheblend_kernels.torch_backend import dequantized
from cacheblend_store import ChunkManifest, StoreReader
from cacheblend_store.format.codecs import DTYPES
from cacheblend_store.format.records import layer_spec
from torch import Tensor

from cacheblend_cli.kv.stored_prompt import stored_kv


def decode_kv(tensors: Mapping[str, Tensor], codec: str, *dims: int) -> tuple[Tensor, Tensor]:
    """Return k and v [tokens, num_kv_heads, head_dim] as fp32 copies. dims: head_dim of K and of V if it differs."""
    dims = dims[0], dims[-1]
    k, v = dequantized(stored_kv(codec, tensors, *dims), *dims)
    return k.to(torch.float32, copy=True), v.to(torch.float32, copy=True)


def read_kv(reader: StoreReader, manifest: ChunkManifest, layer: int) -> tuple[Tensor, Tensor]:
    """Return K and V of a stored layer, as `decode_kv`. Raises BadBlob."""
    data, spec = reader.layer(manifest, layer), layer_spec(manifest, layer)
    tensors = {n: torch.frombuffer(data[n], dtype=DTYPES[t.dtype]).view(t.shape) for n, t in spec.items()}
    return decode_kv(tensors, manifest.codec, *manifest.shapes[layer][1:])
