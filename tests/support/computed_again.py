"""Stored KV compared with KV that the model computes again: digests show only that KV is unchanged since it was
written."""

from __future__ import annotations

import torch
from cacheblend_store import ChunkManifest, ChunkStore
from cacheblend_store.format.codecs import coded
from decoded import decode_kv, read_kv
from torch import Tensor

from cacheblend_cli.collect.collector import Collector, planned_of
from cacheblend_cli.collect.prefill import ChunkKV
from cacheblend_cli.prompt.collection import Collection

NOISE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Compute dtype -> relative error allowed between KV of the same tokens from different kernels or batch shapes."""


def differing_chunks(collection: Collection, store: ChunkStore) -> dict[str, str]:
    """Compute every chunk of the store again. Return id -> layer and part of those with other KV, such as "2 v".

    The error of a token is |stored - computed| over the root mean square of the computed tokens' norms. Allowed is
    twice the codec's own error on the computed KV, plus the noise of the compute dtype.
    """
    collector, found = Collector(collection, store), dict[str, str]()
    for manifest in store.chunks(prefixes=True):
        is_prefix = manifest.context == "prefix"
        assert is_prefix or (manifest.collection == collection.id and manifest.has_kv)
        [fresh] = [collector.prefix.kv] if is_prefix else collector.collect([planned_of(manifest)])
        if difference := _difference(store, manifest, fresh, NOISE[collection.model.decoder.dtype]):
            found[manifest.id] = difference
    return found


def _difference(store: ChunkStore, manifest: ChunkManifest, fresh: ChunkKV, noise: float) -> str:
    codec = manifest.codec
    for layer, (k, v) in enumerate(zip(fresh.k, fresh.v, strict=True)):
        with store.read() as reader:
            stored = read_kv(reader, manifest, layer)
        again = decode_kv(coded(k, v, codec), codec, k.shape[-1], v.shape[-1])
        for part, was, now, through in zip("kv", stored, (k.float(), v.float()), again, strict=True):
            if not _worst_token(was, now) <= 2 * _worst_token(through, now) + noise:  # NaN differs
                return f"{layer} {part}"
    return ""


def _worst_token(a: Tensor, b: Tensor) -> float:
    """Return the error of the worst token of a relative to b, both [tokens, num_kv_heads, head_dim] in fp32."""
    norms = b.flatten(1).norm(dim=1)
    scale = norms.square().mean().sqrt().clamp_min(1e-12)
    return float(((a - b).flatten(1).norm(dim=1) / scale).max())
