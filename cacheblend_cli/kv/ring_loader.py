"""Loading for a GPU: worker threads fill pinned buffers, and streams of their own copy and place what is in them."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial

import torch
from cacheblend_kernels import Slots
from cacheblend_store import StoreError
from torch import Tensor

from cacheblend_cli.kv.batch import KVBatch, batches_of
from cacheblend_cli.kv.loader import KVLoader, LoadQueue, num_workers, workers
from cacheblend_cli.kv.source import KVReader
from cacheblend_cli.kv.staging import StagingRing, Transfer
from cacheblend_cli.kv.stored_prompt import StoredPrompt

MOST_WORKERS = 8
NUM_SLOTS = 6


class RingLoader(KVLoader):
    """Workers copy blobs, still compressed, into the ring of `staging.py`. A submitter thread queues batch after batch:
    the copy to the device, and behind it the kernel that dequantises, rotates and writes into the pool. The computing
    thread waits until all of a layer is *queued*, and its stream until it is there; nobody waits for the device.
    """

    def __init__(self, stored: StoredPrompt, transfer: Transfer) -> None:
        self._stored, self._transfer = stored, transfer
        spec = stored.decoder.spec
        self._batches = batches_of(stored.spans, spec.num_kv_heads, spec.head_dim)
        self._batch_of = [i for i, batch in enumerate(self._batches) for _ in batch.spans]
        self._num_batches = stored.num_layers * len(self._batches)  # of all layers: batch b of layer l has number
        self._num_slots = min(NUM_SLOTS, self._num_batches)  # l * len(batches) + b
        self._ring = StagingRing(self._num_slots, [len(b.spans) for b in self._batches] * stored.num_layers)
        self._queue = LoadQueue(stored.num_layers, len(stored.spans))
        self._slots: list[tuple[Slots, ...]] = []
        self._buffers: list[memoryview] = []
        self._running: list[Future[None]] = []
        self._submitter = threading.Thread(target=self._submit, name="kv-submitter", daemon=True)
        self.num_bytes = stored.num_bytes

    @property
    def load_s(self) -> float:
        return self._transfer.seconds()[0]

    @property
    def stall_s(self) -> float:
        return self._transfer.seconds()[1]

    def __enter__(self) -> RingLoader:
        self._slots = [self._stored.slots(batch.spans) for batch in self._batches]
        self._transfer.open(self._num_slots, max(batch.num_bytes for batch in self._batches))
        self._buffers = [memoryview(slot.numpy().data) for slot in self._transfer.host]
        self._submitter.start()
        self._running = workers(num_workers(MOST_WORKERS)).start(self._work, len(self._stored.spans))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()
        for running in self._running:
            running.result()
        self._submitter.join()
        self._transfer.close()
        self._buffers, self._slots = [], []  # whoever keeps the loader for its figures keeps no memory

    def wait(self, layer: int) -> None:
        self._transfer.arrive(layer)
        self._queue.wait(layer)
        self._transfer.join(layer)

    def _work(self) -> None:
        try:
            with self._stored.source.read() as reader:
                while (blob := self._queue.take()) is not None:
                    self._fill(reader, *blob)
        except BaseException as error:
            self._stop(error)

    def _fill(self, reader: KVReader, layer: int, index: int) -> None:
        """A blob to its place in the ring."""
        which = self._batch_of[index]
        batch, number = self._batches[which], layer * len(self._batches) + which
        slot = self._ring.acquire(number)
        if slot is None:
            return
        try:
            targets = batch.targets(index - batch.first, self._buffers[slot])
            reader.copy_layer(self._stored.manifests[index], layer, targets)
        except StoreError as error:
            raise self._stored.bad(index, error) from error
        self._ring.filled(number)

    @torch.inference_mode()  # it holds for a thread, and the pool may have been made in it
    def _submit(self) -> None:
        try:
            for number in range(self._num_batches):
                slot = self._ring.wait_filled(number)
                if slot is None:
                    return
                layer, which = divmod(number, len(self._batches))
                place = partial(self._place, layer, self._batches[which], self._slots[which])
                self._ring.submitted(number, self._transfer.send(slot, self._batches[which].num_bytes, place))
                if which == len(self._batches) - 1:
                    self._transfer.finish_layer(layer)
                    self._queue.arrived(layer, len(self._stored.spans))
        except BaseException as error:
            self._stop(error)

    def _place(self, layer: int, batch: KVBatch, slots: tuple[Slots, ...], staged: Tensor) -> None:
        self._stored.place(layer, batch.tensors(staged), slots)

    def _stop(self, error: BaseException | None = None) -> None:
        self._queue.stop(error)
        self._ring.stop()
