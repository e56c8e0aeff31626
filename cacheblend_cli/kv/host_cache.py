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
LEAST_SLAB_BYTES, LEAST_SLABS = 16 << 20, 4  # a smaller cache has smaller slabs, or none
MOST_KNOWN = 1024  # other chunks whose places in the store are remembered


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
    and checked. Memory is pinned by a thread of its own, a slab at the start and another when one is half full.
    """

    def __init__(self, num_bytes: int) -> None:
        self._slab_bytes = min(SLAB_BYTES, num_bytes // LEAST_SLABS)
        self.is_off = self._slab_bytes < LEAST_SLAB_BYTES
        self._most_slabs = 0 if self.is_off else num_bytes // self._slab_bytes
        self._slabs: OrderedDict[Slab, None] = OrderedDict()  # least recently used first
        self._filling: Slab | None = None
        self._next: Future[Tensor] | None = None
        self._pinning = ThreadPoolExecutor(1, "pinning")
        self._served: dict[bytes, tuple[StoredChunk, Block]] = {}  # with all layers, checked
        self._known: OrderedDict[bytes, StoredChunk] = OrderedDict()  # the others
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
        num_bytes = sum(len(slab.memory) for slab in self._slabs)
        return {"host_cache_bytes": num_bytes, "host_cache_hits": self._hits, "host_cache_misses": self._misses}

    def find(self, reader: ChunkReader, key: bytes) -> StoredChunk | None:
        """Return a chunk of the source. It is looked up only if the source has changed since."""
        with self._lock:
            known = self._served[key][0] if key in self._served else self._known.get(key)
        if known is None or reader.version is None or known.version != reader.version:
            manifest = reader.manifest(key)
            if manifest is None:
                return None
            if known is None or manifest != known.manifest:
                known = StoredChunk(manifest)
            known.version = reader.version or known.version
        with self._lock:
            if known.version is not None and not self._is_served(known):
                self._served.pop(key, None)
                self._known[key] = known
                self._known.move_to_end(key)
                while len(self._known) > MOST_KNOWN:
                    self._known.popitem(last=False)
        return known

    def hold(self, chunk: StoredChunk) -> Block | None:
        """Return the block of a chunk that is served, to be released."""
        with self._lock:
            is_served = self._is_served(chunk)
            self._hits, self._misses = self._hits + is_served, self._misses + (not is_served)
            return self._held(self._served[chunk.manifest.key][1]) if is_served else None

    def reserve(self, chunk: StoredChunk, num_bytes: int) -> Block | None:
        """Return a block to fill with a chunk that is not served, to be released; None if there is no room now. Comes
        after `hold` of the prompt's other chunks: they may be in the slab that is emptied."""
        if chunk.version is None or num_bytes > self._slab_bytes:
            return None
        with self._lock:
            slab = self._filling
            if slab is None or slab.used + num_bytes > self._slab_bytes:
                slab = self._pinned() or self._emptied()
                if slab is None:
                    return None
                self._filling = slab
            block = Block(slab, slab.memory[slab.used : slab.used + num_bytes], slab.free_after)
            slab.used += num_bytes
            return self._held(block)

    def release(self, block: Block, copied: torch.cuda.Event | None) -> None:
        """End the use of a block. copied: end of the copies from it."""
        with self._lock:
            block.slab.num_prompts -= 1
            block.slab.copied = copied or block.slab.copied
            if self._filling is not None and 2 * self._filling.used > self._slab_bytes:
                self._pin()

    def keep(self, chunk: StoredChunk, block: Block) -> None:
        """Serve the chunk from its block, which has all layers, from now on. Comes before `release`."""
        with self._lock:
            key = chunk.manifest.key
            if self._known.get(key) is chunk or self._is_served(chunk):  # else its record is another one by now
                self._known.pop(key, None)
                self._served[key] = chunk, block
                block.slab.chunks.append(chunk)

    def _is_served(self, chunk: StoredChunk) -> bool:
        return chunk.manifest.key in self._served and self._served[chunk.manifest.key][0] is chunk

    def _held(self, block: Block) -> Block:
        block.slab.num_prompts += 1
        self._slabs.move_to_end(block.slab)
        return block

    def _pin(self) -> None:
        if self._next is None and len(self._slabs) < self._most_slabs:
            self._next = self._pinning.submit(
                partial(torch.empty, self._slab_bytes, dtype=torch.uint8, pin_memory=True)
            )

    def _pinned(self) -> Slab | None:
        """Return a new slab, if its memory is pinned."""
        if self._next is None or not self._next.done():
            return None
        future, self._next = self._next, None
        try:
            slab = Slab(future.result())
        except RuntimeError as error:
            size = self.counts["host_cache_bytes"]
            logger.warning("the host cache stays at %d bytes: %s", size, str(error).splitlines()[0])
            self._most_slabs = len(self._slabs)
            return None
        self._slabs[slab] = None
        return slab

    def _emptied(self) -> Slab | None:
        """Empty the slab that was used least recently, unless more can be pinned."""
        if len(self._slabs) < self._most_slabs:
            self._pin()
            return None
        slab = next((slab for slab in self._slabs if not slab.num_prompts), None)
        if slab is not None:
            for chunk in slab.chunks:
                if self._is_served(chunk) and self._served[chunk.manifest.key][1].slab is slab:
                    del self._served[chunk.manifest.key]  # unless another prompt has read it, too
            slab.used, slab.chunks, slab.free_after = 0, [], slab.copied
        return slab
