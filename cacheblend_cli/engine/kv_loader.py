"""Stored KV into the paged pool, layer by layer, ahead of compute.

Threads read blobs out of the LMDB map inside their own read transaction, verify them, decode them, rotate K to its
new positions and write both into the pool. The main thread waits for a layer only when it gets there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import torch
from cacheblend_store import ChunkManifest, ChunkStore, StoreError, StoreReader
from cacheblend_store.codecs import decode_kv, view_kv

from cacheblend_cli.engine.kv_pool import KVPool, PagedSequence
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.prompt.plan import Segment


class BadChunk(Exception):
    """A cached chunk whose KV cannot be used: missing, corrupt or foreign. The caller computes it instead."""

    def __init__(self, key: bytes, reason: str) -> None:
        super().__init__(reason)
        self.key, self.reason = key, reason


class KVLoader:
    """Loads the cached segments of one prompt. Use as a context manager; `wait(layer)` before a layer's KV is read.

    After the last wait: `num_bytes` read from the store, `load_s` from start to the last layer, `stall_s` of it
    spent waiting by the compute thread.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: ChunkStore | None,
        pool: KVPool,
        sequence: PagedSequence,
        segments: Sequence[Segment],
        rope_len: int,
        num_threads: int | None = None,
    ) -> None:
        self._decoder, self._store, self._pool, self._sequence = decoder, store, pool, sequence
        self._segments = [s for s in segments if s.cached and s.token_ids]
        self._rope_len = rope_len
        self._num_layers = decoder.spec.num_layers
        self._lock = threading.Condition()
        self._next = 0  # tasks handed out: layer-major, so layer 0 is complete first
        self._remaining = [len(self._segments)] * self._num_layers
        self._error: BaseException | None = None
        self._stop = False
        self._started = time.perf_counter()
        self._loaded_at = self._started
        self.num_bytes = 0
        self.stall_s = 0.0
        cores = os.cpu_count() or 1
        wanted = num_threads or (1 if cores <= 2 else min(4, cores // 2))
        self._threads = [
            threading.Thread(target=self._work, name=f"kv-loader-{i}", daemon=True)
            for i in range(min(wanted, len(self._segments)))
        ]

    def __enter__(self) -> KVLoader:
        if self._segments:
            cos, sin = [], []
            for segment in self._segments:
                positions = torch.arange(segment.start, segment.end, device=self._decoder.device)
                c, s = self._decoder.rope.cos_sin(positions, self._rope_len)
                cos.append(c)
                sin.append(s)
            self._cos, self._sin = cos, sin
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._stop = True
        for thread in self._threads:
            thread.join()

    @property
    def load_s(self) -> float:
        return self._loaded_at - self._started if self._segments else 0.0

    def wait(self, layer: int) -> None:
        """Return when the layer's KV is in the pool. Raises BadChunk."""
        if not self._segments:
            return
        begin = time.perf_counter()
        with self._lock:
            self._lock.wait_for(lambda: self._error is not None or self._remaining[layer] == 0)
            if self._error is not None:
                raise self._error
        self.stall_s += time.perf_counter() - begin

    def _work(self) -> None:
        assert self._store is not None
        try:
            with self._store.read() as reader:
                manifests = [self._manifest(reader, segment) for segment in self._segments]
                while (task := self._take()) is not None:
                    layer, index = task
                    self._load(reader, manifests[index], layer, index)
                    with self._lock:
                        self._remaining[layer] -= 1
                        self._loaded_at = time.perf_counter()
                        self._lock.notify_all()
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
                self._lock.notify_all()

    def _manifest(self, reader: StoreReader, segment: Segment) -> ChunkManifest:
        """The segment's manifest, its token ids compared: a key is a digest, and digests are not taken on trust."""
        assert segment.key is not None
        try:
            manifest = reader.manifest(segment.key)
        except StoreError as error:
            raise BadChunk(segment.key, error.message) from error
        if manifest is None:
            raise BadChunk(segment.key, "it is no longer in the store")
        spec = self._decoder.spec
        shape = (manifest.num_layers, manifest.num_kv_heads, manifest.head_dim)
        if manifest.token_ids != segment.token_ids or shape != (
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_dim,
        ):
            raise BadChunk(segment.key, "its record is of other tokens or another model")
        return manifest

    def _take(self) -> tuple[int, int] | None:
        with self._lock:
            if self._stop or self._error is not None or self._next == self._num_layers * len(self._segments):
                return None
            task = divmod(self._next, len(self._segments))
            self._next += 1
            return task

    def _load(self, reader: StoreReader, manifest: ChunkManifest, layer: int, index: int) -> None:
        segment, spec = self._segments[index], self._decoder.spec
        assert segment.key is not None
        try:
            parts = reader.layer(manifest, layer)
        except StoreError as error:
            raise BadChunk(segment.key, error.message) from error
        codec = manifest.codec
        encoded = view_kv(parts, codec, len(segment.token_ids), spec.num_kv_heads, spec.head_dim)
        k, v = decode_kv(encoded, dtype=torch.float32) if codec not in _DIRECT else (encoded.k, encoded.v)
        device = self._pool.device
        positions = torch.arange(segment.start, segment.end, device=device)
        contiguous = self._sequence.contiguous_slot
        self._decoder.kernels.load_kv(
            k.to(device),
            v.to(device),
            self._cos[index],
            self._sin[index],
            self._pool.k[layer],
            self._pool.v[layer],
            self._sequence.slots(positions),
            first_slot=contiguous + segment.start if contiguous >= 0 else -1,
        )
        size = sum(part.nbytes for part in parts.values())
        with self._lock:
            self.num_bytes += size


_DIRECT = ("float32", "bfloat16", "float16")  # stored as they are: the write into the pool converts
