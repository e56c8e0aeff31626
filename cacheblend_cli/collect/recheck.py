"""Compute stored chunks again and compare. Digests show that KV is unchanged since it was written; this shows it is
correct."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import torch
from cacheblend_store import BadBlob, ChunkManifest, ChunkStore
from cacheblend_store.format.blobs import CODECS
from cacheblend_store.format.codecs import coded, decode_kv
from cacheblend_store.upkeep import Progress
from torch import Tensor

from cacheblend_cli.collect.collector import Collector, planned_of, stored_kv
from cacheblend_cli.collect.prefill import ChunkKV
from cacheblend_cli.prompt.collection import Collection

NOISE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Compute dtype -> relative error allowed between KV of the same tokens from different kernels or batch shapes."""


@dataclass(frozen=True)
class Mismatch:
    """A chunk whose stored KV differs from what the model computes."""

    key: bytes
    layer: int
    part: str  # "k" or "v"
    error: float  # relative error of the worst token
    allowed: float  # error explained by codec and rounding

    @property
    def message(self) -> str:
        return (
            f"layer {self.layer} of chunk {self.key.hex()[:12]} is not what the model computes: "
            f"{self.part.upper()} differs by {self.error:.2g}; codec and rounding explain {self.allowed:.2g}"
        )


@dataclass
class RecheckReport:
    """Result of a recheck, in chunks."""

    checked: int = 0  # computed again
    foreign: int = 0  # other models, salts or prompts: not checked
    replaced: int = 0  # repaired
    mismatches: list[Mismatch] = field(default_factory=list)


def recheck(
    collection: Collection, store: ChunkStore, count: int, *, repair: bool = False, progress: Progress | None = None
) -> RecheckReport:
    """Compute `count` random chunks of this model again and compare each token of each layer with the stored KV.

    The error of a token is |stored - computed| over the root mean square of the computed tokens' norms. Allowed is
    twice the codec's own error on the computed KV, plus the noise of the compute dtype. Damaged blobs are skipped:
    `verify` reports them. repair: replace wrong KV with the computed KV.
    """
    report = RecheckReport()
    manifests = [m for m in store.chunks(prefixes=True) if m.has_kv]
    of_codecs = (Collector(replace(collection, codec=codec), store) for codec in CODECS)
    collectors = {c.collection.id: c for c in of_codecs}
    own = [m for m in manifests if m.collection in collectors]
    report.foreign = len(manifests) - len(own)
    chosen = random.sample(own, min(count, len(own)))
    for done, manifest in enumerate(chosen, 1):
        collector = collectors[manifest.collection]
        is_prefix = manifest.context == "prefix"
        [fresh] = [collector.prefix.kv] if is_prefix else collector.collect([planned_of(manifest)])
        try:
            mismatch = _compare(store, manifest, fresh, NOISE[collection.model.decoder.dtype])
        except BadBlob:
            pass  # `verify` reports it
        else:
            report.checked += 1
            if mismatch is not None:
                report.mismatches.append(mismatch)
                if repair:
                    collector.put(planned_of(manifest), fresh)
                    report.replaced += 1
        if progress is not None:
            progress(done, len(chosen))
    return report


def _compare(store: ChunkStore, manifest: ChunkManifest, fresh: ChunkKV, noise: float) -> Mismatch | None:
    """Return the mismatch of the first layer that differs, None if none does. Raises BadBlob."""
    for layer, (k, v) in enumerate(zip(fresh.k, fresh.v, strict=True)):
        computed = k.cpu(), v.cpu()
        with store.read() as reader:
            stored = stored_kv(reader, manifest, layer)
        again = decode_kv(coded(*computed, manifest.codec), manifest.codec, manifest.v_head_dim)
        for part, was, now, through in zip("kv", stored, computed, again, strict=True):
            now = now.float()
            error = _worst_token(was, now)
            allowed = 2 * _worst_token(through, now) + noise
            if not error <= allowed:  # NaN is a mismatch
                return Mismatch(manifest.key, layer, part, error, allowed)
    return None


def _worst_token(a: Tensor, b: Tensor) -> float:
    """Return the error of the worst token of a relative to b, both [tokens, num_kv_heads, head_dim] in fp32."""
    norms = b.flatten(1).norm(dim=1)
    scale = norms.square().mean().sqrt().clamp_min(1e-12)
    return float(((a - b).flatten(1).norm(dim=1) / scale).max())
