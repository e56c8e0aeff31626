"""Warm-up: launch every attention variant that a layer may use once, so that nothing is compiled later."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cacheblend_kernels.interface import AttentionMetadata, AttentionParams, LayerCache
from cacheblend_kernels.triton_backend.configs import LaunchPlan, prefill_configs, split_counts
from cacheblend_kernels.triton_backend.decode_attention import decode_attention
from cacheblend_kernels.triton_backend.prefill_attention import prefill_attention

MOST_THREADS = 8


def warm_up_attention(q: Tensor, cache: LayerCache, params: AttentionParams, max_keys: int, plan: LaunchPlan) -> None:
    """`KernelBackend.warm_up`, in several threads: the compiler releases the GIL most of the time."""
    launches = _launches(q, cache, params, max_keys, plan)
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
        for done in [threads.submit(launch) for launch in launches]:
            done.result()


def _launches(
    q: Tensor, cache: LayerCache, params: AttentionParams, max_keys: int, plan: LaunchPlan
) -> list[Callable[[], Tensor]]:
    """Return launches of all prefill tiles, and of all split counts of both kernels, with and without a block table."""
    num_kv_heads, head_dim = cache.k.shape[2:]
    keys = max_keys if params.sliding_window is None else min(max_keys, params.sliding_window)
    configs = prefill_configs(plan.arch, head_dim, q.element_size(), cache.k.dtype == torch.float8_e4m3fn)
    launches: list[Callable[[], Tensor]] = []
    for meta in (_one_row(q.device, contiguous_slot) for contiguous_slot in (-1, 0)):
        for splits in split_counts(num_kv_heads, keys, plan.num_sms):
            split = replace(plan, num_splits=splits)
            launches += [
                partial(prefill_attention, q, cache, meta, params, replace(split, config=config))
                for config in configs
                if config.block_m >= q.shape[1] // num_kv_heads
            ]
            launches.append(partial(decode_attention, q, cache, meta, params, split))
    return launches


def _one_row(device: torch.device, contiguous_slot: int) -> AttentionMetadata:
    """Return metadata of one row at position 0 of a sequence in block 0."""
    one = torch.ones(1, dtype=torch.int32, device=device)
    return AttentionMetadata(
        positions=torch.zeros(1, dtype=torch.int64, device=device),
        cu_rows=torch.arange(2, dtype=torch.int32, device=device),
        block_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
        kv_lens=one,
        contiguous_slots=(contiguous_slot,),
        max_kv_len=1,
    )
