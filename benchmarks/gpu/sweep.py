"""Prefill attention with every tile and number of splits, against torch's SDPA by cuDNN and by flash attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from cacheblend_kernels import AttentionParams
from gpu.inputs import prefill_inputs
from gpu.sdpa import sdpa_prefill
from gpu.speeds import LLAMA_8B, SUFFIX, TINY, Work
from gpu.timing import Call

SPLITS = (1, 2, 4, 8)
UNEVEN = 4000  # prompt length that is not a multiple of the padding of cuDNN's plans


def sweep_works(device: torch.device, tiny: bool) -> Iterator[Work]:
    """Yield the measurements; on a CPU only flash attention, without tiles."""
    shape, lengths = (TINY, (96,)) if tiny else (LLAMA_8B, (UNEVEN, 4096, 16384))
    for length in lengths:
        for kind in ("full", "scattered 5%", "scattered 15%", "suffix"):
            if length == UNEVEN and kind != "full":
                continue
            inputs = prefill_inputs(shape, kind, length, min(SUFFIX, length // 4), device)
            params = AttentionParams(shape.head_dim**-0.5)
            flops = 4 * shape.num_heads * shape.head_dim * int((inputs.meta.positions + 1).sum())
            at = f"N={length} {kind}, {inputs.q.shape[0]} rows"
            for name, call in _calls(kind, inputs, params, device):
                yield Work("prefill_attention", f"{at}, {name}", [call], "matmul", flops=flops)


def _calls(kind: str, inputs: Any, params: AttentionParams, device: torch.device) -> Iterator[tuple[str, Call]]:
    """Yield SDPA with the copies it needs, and each of our tiles."""
    if kind == "full":
        for kernel in ("cudnn", "flash") if device.type == "cuda" else ("flash",):
            call = partial(sdpa_prefill, inputs.q, inputs.cache, inputs.meta.contiguous_slot, params.scale, kernel)
            yield f"SDPA by {kernel}", call
    if device.type == "cuda":
        yield from _tiles(kind, inputs, params, device)


def _tiles(kind: str, inputs: Any, params: AttentionParams, device: torch.device) -> Iterator[tuple[str, Call]]:
    from cacheblend_kernels.triton_backend.configs import LaunchPlan, arch_of, prefill_configs
    from cacheblend_kernels.triton_backend.prefill_attention import prefill_attention

    arch = arch_of(torch.cuda.get_device_capability(device))
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    q, cache, meta = inputs.q, inputs.cache, inputs.meta
    group = q.shape[1] // cache.k.shape[2]
    for config in prefill_configs(arch, q.shape[2], q.element_size()):
        for splits in (1,) if kind == "full" else SPLITS:
            if config.block_m >= group:
                plan = LaunchPlan(arch, num_sms, config, splits)
                name = f"{config.block_m} x {config.block_n}, {splits} splits"
                yield name, partial(prefill_attention, q, cache, meta, params, plan)
