"""Loader of zeros instead of stored KV, for prompts that run only to compile kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from cacheblend_kernels import StoredKV
from cacheblend_store.format.blobs import GROUP, blob_spec
from cacheblend_store.format.codecs import DTYPES

from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.kv.stored_prompt import StoredSpan, slots_of
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.prompt.plan import PromptPlan


class ZeroLoader(KVLoader):
    """Places zeros for the plan's cached segments, in the waiting thread. codec: the format to dequantise from."""

    def __init__(self, decoder: Decoder, sequence: PagedSequence, plan: PromptPlan, codec: str) -> None:
        spec = decoder.spec
        self._kernels, self._pool = decoder.kernels, sequence.pool
        self._rope_of = decoder.rope.of_layer
        self._rows = []
        for segment in (s for s in plan.segments if s.cached):
            span = StoredSpan(segment.start, segment.end, codec)
            stored = {
                name: torch.zeros(tensor.shape, dtype=DTYPES[tensor.dtype], device=decoder.device)
                for name, tensor in blob_spec(codec, span.num_tokens, spec.num_kv_heads, spec.head_dim).items()
            }
            slots = slots_of(decoder, sequence, [span], plan.num_tokens)
            self._rows.append((StoredKV(**stored, group_size=GROUP), slots))

    def wait(self, layer: int) -> None:
        for stored, slots in self._rows:
            own = slots[self._rope_of[layer]]
            for where in (own, replace(own, first_slot=-1)):  # as a run, and as slots that are none
                self._kernels.load_kv(stored, self._pool.layers[layer], where)
