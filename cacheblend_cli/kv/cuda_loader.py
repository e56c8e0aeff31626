"""Loading stored KV to a GPU: from blocks of pinned host memory through staging buffers to the pool."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from cacheblend_cli.kv.host_cache import Block, HostCache
from cacheblend_cli.kv.load_queue import Part, num_workers, workers
from cacheblend_cli.kv.loader import StoredLoader
from cacheblend_cli.kv.staging import STAGED_BYTES, Staging, group_layers
from cacheblend_cli.kv.stored_prompt import StoredPrompt
from cacheblend_cli.kv.transfer import STAGES, CudaTransfer
from cacheblend_cli.model.host_memory import available_memory

MOST_WORKERS = 4
FREE_SHARE = 0.25  # of the available memory, for the host cache


def warm_up_loading(device: torch.device, gib: float | None, num_ranks: int) -> HostCache:
    """Return the host cache, which begins to pin memory, and create the threads and streams of loading. gib: of the
    cache, None for a share of the free memory, which all ranks of a model share."""
    CudaTransfer(device)
    workers(num_workers(MOST_WORKERS))
    num_bytes = int(FREE_SHARE * (available_memory() or 0)) if gib is None else int(gib * 2**30)
    cache = HostCache(num_bytes // num_ranks)
    if cache.is_off:
        host_buffers(0)
    return cache


def host_buffers(num_bytes: int) -> list[Tensor]:
    """Return pinned buffers of at least num_bytes, usually those of an earlier prompt: PyTorch keeps them by size."""
    size = max(num_bytes, STAGED_BYTES)
    return list(torch.empty(STAGES * size, dtype=torch.uint8, pin_memory=True).split(size))


class CudaLoader(StoredLoader):
    """Copies groups of layers from the host to the GPU, and writes them to the pool.

    A chunk has a block of the host cache, all layers one after another: filled for an earlier prompt, or by this one's
    workers. A chunk without a block is read into one of two host buffers, laid out as the staging buffers are.

    All work for the GPU is queued by the computing thread while it waits for a layer, since threads that queue work
    compete for the GIL at every operation: per group a copy a chunk, and a launch a codec.
    """

    def __init__(self, stored: StoredPrompt, cache: HostCache | None) -> None:
        super().__init__(stored, group_layers(stored.decoder, stored.spans), MOST_WORKERS)
        self._transfer = CudaTransfer(stored.decoder.device)
        self._cache = cache
        self._starts: list[list[int]] = []  # of each chunk's groups in its block, and the end
        for chunk in range(len(stored.chunks)):
            sizes = (len(group.layers) * stored.layout(chunk, group.heads).num_bytes for group in self._groups)
            self._starts.append(list(accumulate(sizes, initial=0)))
        self._blocks: dict[int, Block] = {}  # of chunks
        self._to_read: list[int] = []  # chunks whose blocks are not filled
        self._was_read: list[Part] = []
        self._staging: Staging | None = None
        self._buffers: list[Tensor] = []
        self._num_sent = self._num_joined = 0  # groups

    @property
    def load_s(self) -> float:
        return self._transfer.seconds()[0]

    @property
    def stall_s(self) -> float:
        return self._transfer.seconds()[1]

    def open(self) -> CudaLoader:
        stored = self._stored
        try:
            self._take_blocks()
            self._staging = Staging(stored.decoder, stored.sequence, stored.spans, stored.rope_len, self._groups)
            if any(chunk not in self._blocks for chunk in self._to_read):
                self._buffers = host_buffers(self._staging.num_bytes)
            self._transfer.open(self._staging.num_bytes)
            super().open()
        except BaseException:
            self.close()
            raise
        return self

    def _take_blocks(self) -> None:
        chunks, cache = self._stored.chunks, self._cache
        if cache is None:
            self._to_read = list(range(len(chunks)))
            return
        self._blocks = {n: block for n, chunk in enumerate(chunks) if (block := cache.hold(chunk)) is not None}
        self._to_read = [n for n in range(len(chunks)) if n not in self._blocks]
        for n in self._to_read:
            if (block := cache.reserve(chunks[n], self._starts[n][-1])) is not None:
                self._blocks[n] = block

    def _chunks_to_read(self) -> list[int]:
        return self._to_read

    def close(self) -> None:
        super().close()
        copied = self._transfer.close()
        whole = [chunk for chunk in self._to_read if sum(n == chunk for _, n in self._was_read) == len(self._groups)]
        for chunk, block in self._blocks.items():
            assert self._cache is not None, "it has the block"
            if chunk in whole:
                self._cache.keep(self._stored.chunks[chunk], block)
            self._cache.release(block, copied)
        self._blocks, self._buffers, self._staging = {}, [], None  # a loader outlives the load because of its figures

    def is_ready(self, layer: int) -> bool:
        return all(self._queue.is_ready(group) for group in range(self._num_sent, self._group_of[layer] + 1))

    def wait(self, layer: int) -> None:
        group, self.next_layer = self._group_of[layer], layer + 1
        if group < self._num_joined:
            return
        self._transfer.arrive()
        while self._num_sent <= group:
            self._send(self._num_sent)
        self._transfer.join(group)
        self._num_joined = group + 1
        if self._num_sent < len(self._groups) and self._queue.is_ready(self._num_sent):
            self._send(self._num_sent)  # to be copied during the layers of this group

    def _send(self, number: int) -> None:
        """Queue the copies and launches of a group, once the host has it. Raises BadChunk."""
        self._queue.wait(number)
        assert self._staging is not None
        group = self._groups[number]
        starts = self._staging.starts[group.heads]
        parts = [(start, self._memory((number, chunk))) for chunk, start in enumerate(starts[:-1])]
        self._transfer.send(number, parts, partial(self._staging.place, group))
        self._num_sent = number + 1
        if self._buffers and not self._queue.is_taken:
            self._start(self._num_workers)  # a host buffer is free: go on where workers found none

    def _load(self) -> None:
        while (part := self._queue.take(self._may_begin)) is not None:
            self._wait_for_copies(part)
            if self._read(part, self._memory(part).numpy().data):
                self._was_read.append(part)
            self._queue.arrived(part[0])

    def _wait_for_copies(self, part: Part) -> None:
        """Wait until the part's memory may be written to: the copies from it are queued, or done."""
        number, chunk = part
        block = self._blocks.get(chunk)
        earlier = self._transfer.copied(number - STAGES) if block is None else block.free_after
        if earlier is not None:
            earlier.synchronize()

    def _may_begin(self, part: Part) -> bool:
        number, chunk = part
        return chunk in self._blocks or number < self._num_sent + STAGES

    def _memory(self, part: Part) -> Tensor:
        """Return the host memory of a part, pinned."""
        number, chunk = part
        start, end = self._starts[chunk][number : number + 2]
        if chunk in self._blocks:
            return self._blocks[chunk].memory[start:end]
        assert self._staging is not None
        at = self._staging.starts[self._groups[number].heads][chunk]
        return self._buffers[number % STAGES][at : at + end - start]
