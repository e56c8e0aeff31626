"""The KV pools that answers are made in, and the workers that compute in them."""

from __future__ import annotations

import os

from cacheblend_cli.engine.events import Limits
from cacheblend_cli.engine.ranks.rank_worker import RankedWorker
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.decode import BatchRunner
from cacheblend_cli.engine.worker.memory import DeviceMemory
from cacheblend_cli.engine.worker.worker import Worker
from cacheblend_cli.kv.pool import KVPool, bytes_per_token

FREE_SHARE = 0.25  # of a CPU's free memory, for an engine that many ask at once


def lasting_pool(runtime: Runtime, limits: Limits) -> DeviceMemory:
    """The pool of an engine that many ask at once, and what decodes in it. On a CPU it is as large as the limits say,
    or as many whole contexts as there are sequences, within a quarter of the memory that is free; nothing of it is
    taken before it is written to."""
    decoder, tokens = runtime.decoder, limits.pool_tokens
    if tokens is None:
        ranks = 1 if decoder.shard is None else decoder.shard.ranks.size  # each takes as much, of the same memory
        fits = int(_free_bytes() * FREE_SHARE / (bytes_per_token(decoder) * ranks))
        tokens = max(decoder.spec.max_context, min(fits, limits.max_sequences * decoder.spec.max_context))
    return pool_for(runtime, -(-tokens // runtime.config.block_size), limits.max_sequences)


def _free_bytes() -> int:
    """Free memory of the host; half of all memory on systems that do not tell (macOS)."""
    page = os.sysconf("SC_PAGE_SIZE")
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * page
    return os.sysconf("SC_PHYS_PAGES") * page // 2


def pool_for(runtime: Runtime, num_blocks: int, at_once: int = 1) -> DeviceMemory:
    """A pool for as many requests at once. On a GPU it is the runtime's own, as large as the device has room for, on a
    CPU one of num_blocks blocks."""
    memory, decoder, block_size = runtime.memory(at_once), runtime.decoder, runtime.config.block_size
    if memory is not None:
        return memory
    pool = KVPool.of(decoder, num_blocks + -(-BatchRunner.SPARE // block_size), block_size)
    return DeviceMemory(pool, BatchRunner(decoder, pool))


def worker_of(runtime: Runtime, memory: DeviceMemory) -> Worker:
    """Return the worker of a core with this pool."""
    if runtime.driver is None:
        return Worker(runtime.decoder, memory)
    return RankedWorker(runtime.driver, runtime.decoder, memory)
