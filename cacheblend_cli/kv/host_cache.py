"""Chunks' KV in pinned host memory, checked, so that the next prompt that has them reads nothing. For GPUs."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from cacheblend_cli.kv.source import ChunkReader
from cacheblend_cli.kv.stored_prompt import StoredChunk

logger = logging.getLogger("cacheblend")

SLAB_BYTES = 256 << 20  # pinned at once: pinning takes a tenth of a second, in which the driver may wait
MOST_KNOWN = 4096  # chunks whose places in the store are remembered


@dataclass(eq=False)
class Slab:
    """Pinned memory that is filled with one block after another."""

    memory: Tensor  # uint8
    used: int = 0
    num_prompts: int = 0  # that copy from its blocks now
    copied: torch.cuda.Event | None = None  # end of the copies of the last prompt
    free_after: torch.cuda.Event | None = None  # as it was when the slab was emptied
    chunks: list[StoredChunk] = field(default_factory=list)  # served from its blocks


@dataclass(eq=False)
class Block:
    """Memory of a chunk: its layers one after another."""

    slab: Slab
    memory: Tensor  # uint8
    free_after: torch.cuda.Event | None = None  # end of copies from the same memory, before it is written to


class HostCache:
    """Keeps chunks of the last prompts. If all memory is used, the slab that was used least recently is emptied.

    A chunk is served again as long as its record in the source is the same, and only after all of its layers were read
    and checked. Memory is pinned when it is needed, by a thread of its own.
    """

    def __init__(self, num_bytes: int) -> None:
        self._most_slabs = num_bytes // SLAB_BYTES
        self._slabs: OrderedDict[Slab, None] = OrderedDict()  # least recently used first
        self._filling: Slab | None = None
        self._next: Future[Tensor] | None = None
        self._pinning = ThreadPoolExecutor(1, "pinning")
        self._chunks: OrderedDict[bytes, StoredChunk] = OrderedDict()
        self._blocks: dict[StoredChunk, Block] = {}  # with all layers, checked
        self._lock = threading.Lock()
        self._hits = self._misses = 0  # chunks of prompts
        self._pin()

    def wait(self) -> None:
        """Wait until memory is pinned for the first prompt."""
        if self._next is not None:
            self._next.exception()

    @property
    def counts(self) -> dict[str, int]:
        """Counts, as `EngineStats` names them."""
        return {"host_cache_bytes": self.num_bytes, "host_cache_hits": self._hits, "host_cache_misses": self._misses}

    @property
    def num_bytes(self) -> int:
        """Bytes of pinned memory."""
        return sum(len(slab.memory) for slab in self._slabs)

    def find(self, reader: ChunkReader, key: bytes) -> StoredChunk | None:
        """Return a chunk of the source. It is looked up only if the source has changed since."""
        with self._lock:
            known = self._chunks.pop(key, None)
        if known is None or reader.version is None or known.version != reader.version:
            manifest = reader.manifest(key)
            if manifest is None:
                return None
            if known is None or manifest != known.manifest:
                known = StoredChunk(manifest)
            known.version = reader.version
        if reader.version is not None:
            with self._lock:
                self._chunks[key] = known
                while len(self._chunks) > MOST_KNOWN:
                    self._chunks.popitem(last=False)
        return known

    def hold(self, chunk: StoredChunk) -> Block | None:
        """Return the block of a chunk that is served, to be released."""
        with self._lock:
            block = self._blocks.get(chunk)
            self._hits, self._misses = self._hits + (block is not None), self._misses + (block is None)
            return block and self._held(block)

    def reserve(self, chunk: StoredChunk, num_bytes: int) -> Block | None:
        """Return a block to fill with a chunk that is not served, to be released; None if there is no room now. Comes
        after `hold` of the prompt's other chunks: they may be in the slab that is emptied."""
        if chunk.version is None or num_bytes > SLAB_BYTES:
            return None
        with self._lock:
            slab = self._filling
            if slab is None or slab.used + num_bytes > SLAB_BYTES:
                slab = self._filling = self._pinned() or self._emptied()
            if slab is None:
                return None
            block = Block(slab, slab.memory[slab.used : slab.used + num_bytes], slab.free_after)
            slab.used += num_bytes
            return self._held(block)

    def release(self, block: Block, copied: torch.cuda.Event | None) -> None:
        """End the use of a block. copied: end of the copies from it."""
        with self._lock:
            block.slab.num_prompts -= 1
            block.slab.copied = copied or block.slab.copied

    def keep(self, chunk: StoredChunk, block: Block) -> None:
        """Serve the chunk from its block, which has all layers, from now on. Comes before `release`."""
        with self._lock:
            self._blocks[chunk] = block
            block.slab.chunks.append(chunk)

    def _held(self, block: Block) -> Block:
        block.slab.num_prompts += 1
        self._slabs.move_to_end(block.slab)
        return block

    def _pin(self) -> None:
        if len(self._slabs) < self._most_slabs:
            self._next = self._pinning.submit(partial(torch.empty, SLAB_BYTES, dtype=torch.uint8, pin_memory=True))

    def _pinned(self) -> Slab | None:
        """Return a new slab, if its memory is pinned, and begin to pin the next."""
        if self._next is None or not self._next.done():
            return None
        future, self._next = self._next, None
        try:
            slab = Slab(future.result())
        except RuntimeError as error:
            logger.warning("the host cache stays at %d bytes: %s", self.num_bytes, str(error).splitlines()[0])
            self._most_slabs = len(self._slabs)
            return None
        self._slabs[slab] = None
        self._pin()
        return slab

    def _emptied(self) -> Slab | None:
        """Empty the slab that was used least recently, unless more can be pinned."""
        if self._next is not None:
            return None
        slab = next((slab for slab in self._slabs if not slab.num_prompts), None)
        if slab is not None:
            for chunk in slab.chunks:
                if chunk in self._blocks and self._blocks[chunk].slab is slab:  # another prompt may have read it, too
                    del self._blocks[chunk]
            slab.used, slab.chunks, slab.free_after = 0, [], slab.copied
        return slab
