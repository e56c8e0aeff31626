"""Zeros instead of stored KV, for a prompt that is run only to have everything compiled."""

from __future__ import annotations

import torch
from cacheblend_kernels import StoredKV

from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.kv.stored_prompt import StoredSpan, slots_of
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.prompt.plan import PromptPlan


class ZeroLoader(KVLoader):
    """Places zeros for what the plan takes for cached, in the thread that waits."""

    def __init__(self, decoder: Decoder, sequence: PagedSequence, plan: PromptPlan) -> None:
        spec, codec = decoder.spec, str(decoder.dtype).removeprefix("torch.")
        self._kernels, self._pool = decoder.kernels, sequence.pool
        self._rope_of = decoder.rope.of_layer
        self._rows = []
        for segment in (s for s in plan.segments if s.cached):
            span = StoredSpan(segment.start, segment.end, codec)
            shape = (span.num_tokens, spec.num_kv_heads, spec.head_dim)
            zeros = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
            self._rows.append((StoredKV(zeros, zeros), slots_of(decoder, sequence, [span], plan.num_tokens)))

    def wait(self, layer: int) -> None:
        for stored, slots in self._rows:
            self._kernels.load_kv(stored, self._pool.layers[layer], slots[self._rope_of[layer]])
