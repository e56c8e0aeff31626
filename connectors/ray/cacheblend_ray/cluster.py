"""Collect chunks on the workers of a Ray cluster.

The driver reads and cuts documents and commits their records. Workers receive chunks as records without KV, upload the
KV to the tier, and return manifests. Only the tier knows what is already computed, so a run queries it first.

We use Ray actors, not Ray Data: its sources are either read by tasks on the cluster or held whole by the driver. Here
only the driver has the documents and the store that knows which of them changed, and it hands out one batch at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cacheblend_store import BadBlob, ChunkStore, StoreError
from cacheblend_store.format.records import decode_manifest, encode_manifest
from cacheblend_store.writer import with_digests

from cacheblend_cli.collect.collector import (
    ClusterJob,
    CollectedChunk,
    Collector,
    PlannedChunk,
    chunk_manifest,
    collect_sequences,
    planned_of,
)
from cacheblend_cli.collect.encoding import encoded
from cacheblend_cli.collect.prefill import PrefixKV, collect, collect_prefix, pack_tokens
from cacheblend_cli.errors import CacheBlendError, DeviceError, UsageError
from cacheblend_cli.kv.tier_location import open_tier
from cacheblend_cli.prompt.collection import Collection

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
    fingerprint: str  # the driver's model
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
            for manifest, (_, blobs) in zip(manifests, encoded(collected, chunks.codec), strict=True):
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


LOCAL = "local"
_PACKS = 4  # prefill launches per request to a worker
_RESTARTS = 3  # restarts of a worker that died, and retries of its request
_LOOK_UPS = 32  # concurrent look-ups in the tier


def open_cluster(job: ClusterJob) -> RayCluster:
    """Return the cluster of `precompute --collector ray:ADDRESS`, not yet started. Raises UsageError without Ray."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise UsageError(f"--collector ray needs the package ray: {error}", "pip install ray") from error
    remote = RemoteJob(job.load, job.fingerprint, job.tier.url, job.tier_key_file)
    return RayCluster(job.address or LOCAL, job.workers, remote, job.tier, job.cpus, job.gpus)


@dataclass
class RayCluster:
    """Workers of a Ray cluster, started when the first chunks are missing. Use as a context manager."""

    address: str  # address of the cluster, or LOCAL to start one on this machine
    workers: int
    job: RemoteJob
    tier: Tier  # opened by the driver
    cpus: int = 1  # per worker
    gpus: int = 0  # per worker
    sent_bytes: int = 0  # records sent to workers
    returned_bytes: int = 0  # records received from workers
    _actors: list[Any] = field(default_factory=list)

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        if self._actors:
            import ray

            ray.shutdown()

    def collector(self, collection: Collection, store: ChunkStore) -> ClusterCollector:
        return ClusterCollector(collection, store, self)

    def collect(self, groups: Iterator[RemoteChunks]) -> Iterator[list[Record]]:
        """Yield the manifests of each group once its KV is in the tier, in any order.

        Raises the errors of a worker, and DeviceError if workers keep dying.
        """
        import ray
        from ray.util import ActorPool

        if not self._actors:
            self._actors = self._start()
        pool = ActorPool(self._actors)

        def finished() -> list[Record]:
            try:
                records: list[Record] = pool.get_next_unordered()
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                raise cause if isinstance(cause, CacheBlendError | StoreError) else error from None
            except ray.exceptions.RayActorError as error:
                raise DeviceError(
                    f"a worker died {_RESTARTS + 1} times: {str(error).splitlines()[0]}",
                    "see Ray's logs; KV in the tier is kept, run the command again to continue",
                ) from error
            self.returned_bytes += sum(len(record) for _, record in records)
            return records

        for group in groups:
            while not pool.has_free():
                yield finished()
            self.sent_bytes += sum(len(record) for _, record in group.records)
            pool.submit(lambda actor, chunks: actor.collect.remote(chunks), group)
        while pool.has_next():
            yield finished()

    def _start(self) -> list[Any]:
        """Connect and start the workers. Raises DeviceError if the cluster cannot be reached or is too small."""
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
        try:
            ray.init(address=self.address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # ray also raises bare exceptions
            raise DeviceError(
                f"the Ray cluster at {self.address} cannot be used: {str(error).splitlines()[0]}",
                "start it: ray start --head; --collector ray:local starts one on this machine",
            ) from error
        there, each = ray.cluster_resources(), {"CPU": self.cpus, "GPU": self.gpus}
        fit = min(int(there.get(name, 0) // number) for name, number in each.items() if number)
        if fit < self.workers:
            ray.shutdown()
            raise DeviceError(
                f"--workers {self.workers} of {self.cpus} CPUs and {self.gpus} GPUs do not fit the cluster, which has "
                f"{there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs",
                f"use --workers {fit}" if fit else "use fewer --threads",
            )
        actor = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_restarts=_RESTARTS, max_task_retries=_RESTARTS)(
            RemoteWorker
        )
        return [actor.remote(self.job) for _ in range(self.workers)]


class ClusterCollector(Collector):
    """Collects chunks on a cluster. Their KV goes to the tier, not to the store."""

    def __init__(self, collection: Collection, store: ChunkStore, cluster: RayCluster) -> None:
        super().__init__(collection, store)
        self._cluster = cluster

    def present(self, chunks: Sequence[PlannedChunk]) -> set[bytes]:
        """Return the keys of the chunks in the tier. Raises TierError."""

        def there(planned: PlannedChunk) -> bool:
            manifest, tier = chunk_manifest(self.collection, planned), self._cluster.tier
            size = tier.size(tier.name(manifest.collection, manifest.key))
            with suppress(BadBlob):  # the object belongs to another chunk: upload again
                return size is not None and bool(tier.layout(manifest, size))
            return False

        with ThreadPoolExecutor(_LOOK_UPS) as pool:
            return {c.key for c, found in zip(chunks, pool.map(there, chunks), strict=True) if found}

    def store(
        self, chunks: Sequence[PlannedChunk], *, again: bool = False, fetch: bool = True, every_s: float | None = None
    ) -> Iterator[CollectedChunk]:
        """Compute the chunks. Yields each once its KV is in the tier."""
        wanted = {c.key: c for c in chunks}
        for records in self._cluster.collect(self._groups(chunks)):
            for key, record in records:
                assert decode_manifest(key, record).token_ids == wanted[key].chunk.token_ids
                yield CollectedChunk(key, "new", "computed")

    def _groups(self, chunks: Sequence[PlannedChunk]) -> Iterator[RemoteChunks]:
        """Yield groups of chunks, a few launches each.

        Chunks of one window stay together, to compute the left context once.
        """
        collection = self.collection
        most = _PACKS * pack_tokens(collection.decoder.device)
        group, tokens, follows = list[Record](), 0, tuple[int, ...]()
        for planned in chunks:
            if group and tokens >= most and planned.left != follows:
                yield self._group(group)
                group, tokens = [], 0
            group.append((planned.key, encode_manifest(chunk_manifest(collection, planned).without_kv())))
            tokens += len(planned.chunk.token_ids) + (0 if planned.left == follows else len(planned.left))
            follows = (*planned.left, *planned.chunk.token_ids)
        if group:
            yield self._group(group)

    def _group(self, records: Sequence[Record]) -> RemoteChunks:
        of = self.collection
        return RemoteChunks(of.prefix_ids, of.prefix_key, of.codec, records)
