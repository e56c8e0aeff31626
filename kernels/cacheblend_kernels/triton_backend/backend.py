"""The Triton backend: every kernel of the interface on an NVIDIA GPU of compute capability 8.0 or newer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cacheblend_kernels.interface import (
    AttentionMetadata,
    AttentionParams,
    KernelBackend,
    KernelError,
    LayerCache,
    Slots,
    StoredLayers,
)
from cacheblend_kernels.triton_backend import cache_ops, norms
from cacheblend_kernels.triton_backend.attention_peaks import attention_peaks
from cacheblend_kernels.triton_backend.checks import interpreted, is_float8
from cacheblend_kernels.triton_backend.configs import LaunchPlan, arch_of, prefill_configs, split_counts
from cacheblend_kernels.triton_backend.correction import correct_stale
from cacheblend_kernels.triton_backend.decode_attention import decode_attention
from cacheblend_kernels.triton_backend.load_kv import load_kv, load_layers
from cacheblend_kernels.triton_backend.prefill_attention import prefill_attention

MINIMUM_CAPABILITY = (8, 0)
MOST_THREADS = 8


class TritonBackend(KernelBackend):
    """Kernels for one device. In Triton's interpreter (TRITON_INTERPRET=1) the same code runs on CPU tensors. arch,
    num_sms: target of the launch plans, read from the device unless given."""

    name = "triton"
    has_attention_peaks = True
    has_correction = True

    def __init__(self, device: torch.device, *, arch: int | None = None, num_sms: int | None = None) -> None:
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if capability < MINIMUM_CAPABILITY:
                raise KernelError(
                    f"the GPU has compute capability {capability[0]}.{capability[1]}; the {self.name} backend needs 8.0",
                    "use --attention-backend torch",
                )
            properties = torch.cuda.get_device_properties(device)
            arch, num_sms = arch or arch_of(capability), num_sms or properties.multi_processor_count
        elif not interpreted():
            raise KernelError(
                f"the {self.name} backend needs a CUDA device, not {device}", "use --attention-backend torch"
            )
        self._plan = LaunchPlan(arch or 90, num_sms or 132)

    def prefill_attention(
        self, q: Tensor, cache: LayerCache, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        return prefill_attention(q, cache, meta, params, self._plan)

    def decode_attention(
        self, q: Tensor, cache: LayerCache, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        if q.shape[0] == meta.num_seqs:
            return decode_attention(q, cache, meta, params, self._plan)
        out = torch.zeros_like(q)  # rows after those of the sequences are padding
        out[: meta.num_seqs] = decode_attention(q[: meta.num_seqs], cache, meta, params, self._plan)
        return out

    attention_peaks = staticmethod(attention_peaks)
    correct_stale = staticmethod(correct_stale)
    rope_and_cache = staticmethod(cache_ops.rope_and_cache)
    load_kv = staticmethod(load_kv)
    rope = staticmethod(cache_ops.rope)
    kv_deviation = staticmethod(cache_ops.kv_deviation)
    rms_norm = staticmethod(norms.rms_norm)
    add_rms_norm = staticmethod(norms.add_rms_norm)
    act_and_mul = staticmethod(norms.act_and_mul)

    def load_layers(self, stored: StoredLayers, caches: Sequence[LayerCache], slots: Slots) -> None:
        if not load_layers(stored, caches, slots):
            super().load_layers(stored, caches, slots)

    def warm_up(self, q: Tensor, cache: LayerCache, params: AttentionParams, max_keys: int) -> None:
        """Compile in several threads: the compiler releases the GIL most of the time."""
        launches = self._launches(q, cache, params, max_keys)
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
            for done in [threads.submit(launch) for launch in launches]:
                done.result()

    def _launches(
        self, q: Tensor, cache: LayerCache, params: AttentionParams, max_keys: int
    ) -> list[Callable[[], Tensor | None]]:
        """Return launches of all prefill tiles, of all split counts of both kernels, and of the peaks, with and without
        a table."""
        plan, (num_kv_heads, head_dim) = self._plan, cache.k.shape[2:]
        keys = max_keys if params.sliding_window is None else min(max_keys, params.sliding_window)
        configs = prefill_configs(plan.arch, head_dim, q.element_size(), is_float8(cache))
        launches: list[Callable[[], Tensor | None]] = []
        peaks = torch.zeros(1, device=q.device)
        for meta in (_one_row(q.device, contiguous_slot) for contiguous_slot in (-1, 0)):
            for splits in split_counts(num_kv_heads, keys, plan.num_sms):
                split = replace(plan, num_splits=splits)
                launches += [
                    partial(prefill_attention, q, cache, meta, params, replace(split, config=config))
                    for config in configs
                    if config.block_m >= q.shape[1] // num_kv_heads
                ]
                launches.append(partial(decode_attention, q, cache, meta, params, split))
            launches.append(partial(attention_peaks, q, meta.positions, cache, meta, params, peaks))
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
