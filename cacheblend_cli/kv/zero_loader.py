"""Loader of zeros instead of stored KV, for prompts that run only to compile kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from cacheblend_kernels import StoredKV
from cacheblend_store.format.blobs import blob_spec
from cacheblend_store.format.codecs import DTYPES

from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.kv.stored_prompt import StoredSpan, slots_of, stored_kv
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.prompt.plan import PromptPlan


class ZeroLoader(KVLoader):
    """Places zeros for the plan's cached segments, in the waiting thread. codec: the format to dequantise from."""

    def __init__(self, decoder: Decoder, sequence: PagedSequence, plan: PromptPlan, codec: str) -> None:
        spec = decoder.own_spec
        self._kernels, self._pool = decoder.kernels, sequence.pool
        self._rope_of = decoder.rope.of_layer
        self._rows = []
        self._heads = spec.kv_shapes
        for segment in (s for s in plan.segments if s.cached):
            span = StoredSpan(segment.start, segment.end, codec)
            of_heads = {heads: zeros(span, heads, decoder.device) for heads in set(self._heads)}
            self._rows.append((of_heads, slots_of(decoder, sequence, [span], plan.num_tokens)))

    def wait(self, layer: int) -> None:
        for of_heads, slots in self._rows:
            stored = of_heads[self._heads[layer]]
            own = slots[self._rope_of[layer]]
            for where in (own, replace(own, first_slot=-1)):  # consecutive slots, and scattered ones
                self._kernels.load_kv(stored, self._pool.layers[layer], where)


def zeros(span: StoredSpan, heads: tuple[int, ...], device: torch.device) -> StoredKV:
    """Return stored KV of zeros in the span's codec. heads: (KV heads, head_dim) of the layer."""
    tensors = blob_spec(span.codec, span.num_tokens, *heads)
    stored = {name: torch.zeros(t.shape, dtype=DTYPES[t.dtype], device=device) for name, t in tensors.items()}
    return stored_kv(span.codec, stored, *heads[1:])
