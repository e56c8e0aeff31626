"""Worker side of a distributed `precompute`: receives chunk texts, uploads KV to the tier, returns manifests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from cacheblend_store.format.codecs import encode_kv
from cacheblend_store.format.records import decode_manifest, encode_manifest
from cacheblend_store.tier import open_tier
from cacheblend_store.writer import with_digests

from cacheblend_cli.collect.collector import collect_sequences, planned_of
from cacheblend_cli.collect.prefill import PrefixKV, collect, collect_prefix
from cacheblend_cli.errors import UsageError

if TYPE_CHECKING:
    from cacheblend_store.tier import Tier

    from cacheblend_cli.model.loading import LoadedModel

_PUTS = 4
Record = tuple[bytes, bytes]
"""A chunk's key and its encoded manifest."""


@dataclass(frozen=True)
class RemoteJob:
    """Settings of every worker."""

    load: Callable[[], LoadedModel]  # loads the model in the driver's dtype
    fingerprint: str  # of the driver's model
    tier: str  # URL
    tier_key_file: str = ""  # path on the worker's machine, "" for none


@dataclass(frozen=True)
class RemoteChunks:
    """Chunks to collect after one prefix."""

    prefix_ids: tuple[int, ...]
    prefix_key: bytes
    codec: str
    records: Sequence[Record]  # without KV, in order


class RemoteWorker:
    """Holds the model and the tier. They are loaded with the first chunks, so a restarted worker loads them again."""

    def __init__(self, job: RemoteJob) -> None:
        self._job, self._prefixes = job, dict[bytes, PrefixKV]()

    def collect(self, chunks: RemoteChunks) -> list[Record]:
        """Compute the KV of the chunks and upload it to the tier. Return manifests with sizes and digests once all are
        uploaded.

        Raises UsageError if this machine's model differs from the driver's, DeviceError, TierError.
        """
        decoder, tier = self._model.decoder, self._tier
        if chunks.prefix_key not in self._prefixes:
            self._prefixes[chunks.prefix_key] = collect_prefix(decoder, chunks.prefix_ids, chunks.prefix_key)
        manifests = [decode_manifest(*record) for record in chunks.records]
        collected = collect(
            decoder, self._prefixes[chunks.prefix_key], collect_sequences([planned_of(m) for m in manifests])
        )
        found, puts = list[Record](), []
        with ThreadPoolExecutor(_PUTS) as pool:
            for manifest, kv in zip(manifests, collected, strict=True):
                blobs = [encode_kv(k, v, manifest.codec) for k, v in zip(kv.k, kv.v, strict=True)]
                whole = with_digests(manifest, blobs)
                found.append((whole.key, encode_manifest(whole)))
                puts.append(pool.submit(tier.put_chunk, whole, blobs))
        for put in puts:
            put.result()
        return found

    @cached_property
    def _model(self) -> LoadedModel:
        model = self._job.load()
        if model.fingerprint != self._job.fingerprint:
            raise UsageError(
                f"the model {model.name} on a worker differs from the one on this machine: their KV cannot be mixed",
                "use the same model files and the same version of cacheblend everywhere",
            )
        return model

    @cached_property
    def _tier(self) -> Tier:
        return open_tier(self._job.tier, self._job.tier_key_file or None)
