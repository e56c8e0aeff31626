"""Loading on a CPU: worker threads write stored KV straight into the pool."""

from __future__ import annotations

import time
from concurrent.futures import Future

import torch
from cacheblend_kernels import Slots
from cacheblend_store import StoreError
from cacheblend_store.format.codecs import view_kv

from cacheblend_cli.kv.loader import KVLoader, LoadQueue, Workers, num_workers, workers
from cacheblend_cli.kv.source import KVReader
from cacheblend_cli.kv.stored_prompt import StoredPrompt

MOST_WORKERS = 4


class HostLoader(KVLoader):
    """Each worker reads, within a reader of its own, one blob after another; checked, dequantised and rotated, it goes to
    its slots. The computing thread waits until a layer is there."""

    def __init__(self, stored: StoredPrompt, by: Workers | None = None) -> None:
        self._stored, self._workers = stored, by or workers(num_workers(MOST_WORKERS))
        self._queue = LoadQueue(stored.num_layers, len(stored.spans))
        self._slots: list[tuple[Slots, ...]] = []
        self._running: list[Future[None]] = []
        self._started = time.perf_counter()
        self._stall_s = 0.0
        self.num_bytes = stored.num_bytes

    @property
    def load_s(self) -> float:
        return self._queue.last_arrival - self._started

    @property
    def stall_s(self) -> float:
        return self._stall_s

    def __enter__(self) -> HostLoader:
        self._slots = [self._stored.slots([span]) for span in self._stored.spans]
        self._running = self._workers.start(self._work, len(self._stored.spans))
        return self

    def __exit__(self, *exc: object) -> None:
        self._queue.stop()
        for running in self._running:
            running.result()
        self._slots = []  # whoever keeps the loader for its figures keeps no tables

    def wait(self, layer: int) -> None:
        begin = time.perf_counter()
        self._queue.wait(layer)
        self._stall_s += time.perf_counter() - begin

    @torch.inference_mode()  # it holds for a thread, and the pool may have been made in it
    def _work(self) -> None:
        try:
            with self._stored.source.read() as reader:
                while (blob := self._queue.take()) is not None:
                    self._load(reader, *blob)
        except BaseException as error:
            self._queue.stop(error)

    def _load(self, reader: KVReader, layer: int, index: int) -> None:
        manifest = self._stored.manifests[index]
        try:
            parts = reader.layer(manifest, layer)
        except StoreError as error:
            raise self._stored.bad(index, error) from error
        shape = (manifest.num_tokens, manifest.num_kv_heads, manifest.head_dim)
        self._stored.place(layer, view_kv(parts, manifest.codec, *shape), self._slots[index])
        self._queue.arrived(layer)
