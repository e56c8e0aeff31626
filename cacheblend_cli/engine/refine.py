"""Prompts that were blended, whose exact KV the engine computes while it is idle."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.engine.checks import Refine
from cacheblend_cli.engine.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.kv.prefix_cache import KVProvenance

MOST = 64
"""Prompts that are remembered; the oldest are dropped."""


class Refiner:
    """Remembers prompts, the newest last. block_size: of the pool."""

    def __init__(self, runtime: Runtime, block_size: int) -> None:
        self._runtime, self._block_size = runtime, block_size
        self._prompts: dict[tuple[bytes, tuple[int, ...]], Request] = {}

    def __bool__(self) -> bool:
        """Return whether there is a prompt to compute."""
        return bool(self._prompts)

    def note(self, request: Request, provenance: KVProvenance) -> None:
        """Remember a blended prompt. The last block of its chunks is filled up with the question, and then with zeros, so that any
        question over the same chunks finds all of their KV."""
        missing = -(request.plan.num_tokens - len(request.suffix_ids)) % self._block_size
        suffix_ids = (*request.suffix_ids, *(0,) * missing)[:missing]
        full = replace(request.in_full(), suffix_ids=suffix_ids)
        if not self._runtime.fits(full.plan.num_tokens, 0):
            return
        key = provenance.root, tuple(full.plan.token_ids)
        self._prompts.pop(key, None)
        self._prompts[key] = full
        if len(self._prompts) > MOST:
            del self._prompts[next(iter(self._prompts))]

    def pop(self) -> Refine:
        """Take the newest prompt."""
        _, request = self._prompts.popitem()
        return Refine(self._runtime, request)
