"""While nobody asks: the exact KV of prompts that were blended. What is asked again finds it hot, and is exact."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from cacheblend_cli.engine.block_manager import BlockManager
from cacheblend_cli.engine.prefill import PrefillState
from cacheblend_cli.engine.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.kv.prefix_cache import KVProvenance

MOST = 64
"""Prompts that are remembered; of more the oldest are forgotten."""
logger = logging.getLogger("cacheblend")


@dataclass
class _Prompt:
    """request: to be computed in full, its chunks up to a whole block. hot: tokens of it that were left in the pool."""

    request: Request
    origin: KVProvenance
    hot: int = 0


class Refiner:
    """Computes the newest of the prompts it was told of, at most max_rows tokens at a time, and holds no blocks in between: a
    piece begins with what is hot and leaves what it computed hot. No sequence may be running."""

    def __init__(self, runtime: Runtime, blocks: BlockManager, max_rows: int) -> None:
        self._runtime, self._blocks = runtime, blocks
        self._rows = max(max_rows, blocks.pool.block_size)  # so that each piece fills a block
        self._prompts: dict[tuple[bytes, tuple[int, ...]], _Prompt] = {}

    def __bool__(self) -> bool:
        """Whether there is something to compute."""
        return bool(self._prompts)

    def note(self, request: Request, origin: KVProvenance) -> None:
        """The prompt was blended. The last block of its chunks is filled up with the question, and then with zeros: it is found
        by whoever asks over the same chunks, and used up to their end."""
        size, num_chunk_tokens = self._blocks.pool.block_size, request.plan.num_tokens - len(request.suffix_ids)
        missing = -num_chunk_tokens % size
        suffix_ids = (*request.suffix_ids, *(0,) * missing)[:missing]
        full = replace(request.in_full(), suffix_ids=suffix_ids)
        if not self._runtime.fits(full.plan.num_tokens, 0):
            return
        key = origin.root, tuple(full.plan.token_ids)
        self._prompts.pop(key, None)
        self._prompts[key] = _Prompt(full, KVProvenance(origin.root, full.plan.num_tokens))
        if len(self._prompts) > MOST:
            del self._prompts[next(iter(self._prompts))]

    def piece(self) -> bool:
        """Compute a piece. Returns whether a prompt is whole with it. One whose KV others took the blocks of meanwhile is
        forgotten: there is no room for it."""
        key, prompt = next(reversed(self._prompts.items()))
        try:
            before, prompt.hot = prompt.hot, self._compute(prompt)
        except Exception:
            logger.exception("a prompt could not be refined")
            del self._prompts[key]
            return False
        whole = prompt.hot == prompt.request.plan.num_tokens
        if whole or prompt.hot <= before:
            del self._prompts[key]
        return whole

    def _compute(self, prompt: _Prompt) -> int:
        """Returns how many tokens of the prompt are hot afterwards."""
        plan, blocks = prompt.request.plan, self._blocks
        hit = blocks.find(plan, prompt.origin).hit
        begin, end = hit.num_tokens, min(hit.num_tokens + self._rows, plan.num_tokens)
        if begin == plan.num_tokens - 1:  # the last token is never found, since it is there to be computed
            return plan.num_tokens
        sequence = blocks.allocate(end, 0, hit)
        try:
            with PrefillState(self._runtime, prompt.request, sequence, begin) as prefilling:
                prefilling.advance(self._rows)
            blocks.keep(sequence, plan.token_ids[:end], prompt.origin)
        finally:
            sequence.release()
        return end // blocks.pool.block_size * blocks.pool.block_size
