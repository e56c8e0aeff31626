"""Ceilings of a device: copy, bf16 product, host to device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from gpu.context import Cases, Context, Rows
from gpu.timing import median_seconds


def cases(context: Context) -> Cases:
    def measure(name: str) -> Rows:
        yield "ceilings", {name: CEILINGS[name](context.device, context.tiny)}

    for name in CEILINGS:
        yield name, partial(measure, name)


def _device_copy(device: torch.device, tiny: bool) -> float:
    """Return GB/s, bytes read plus bytes written."""
    size = 1 << (20 if tiny else 31)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device).random_(0, 255) for _ in range(2))
    return 2 * size / median_seconds([partial(target.copy_, source)], device, reps=10) / 1e9


def _matmul(device: torch.device, tiny: bool) -> float:
    """Return TFLOP/s in bf16."""
    n = 256 if tiny else 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / median_seconds([partial(torch.matmul, a, b)], device, reps=10) / 1e12


def _host_to_device(device: torch.device, tiny: bool) -> float:
    """Return GB/s from pinned memory."""
    pinned = torch.empty(1 << (20 if tiny else 28), dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty_like(pinned, device=device)
    up = median_seconds([partial(there.copy_, pinned, non_blocking=True)], device, reps=10, graph=False)
    return pinned.numel() / up / 1e9


CEILINGS: dict[str, Callable[[torch.device, bool], float]] = {
    "device_copy_gb_s": _device_copy,
    "matmul_tflop_s": _matmul,
    "host_to_device_gb_s": _host_to_device,
}
