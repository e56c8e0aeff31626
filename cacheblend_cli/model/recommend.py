"""Model recommendation by memory and cores, for `cacheblend init`. Imports no torch unless there is a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cacheblend_cli.model.host_memory import total_memory
from cacheblend_cli.model.named import INSTALL, SMOLLM2, SMOLLM2_BYTES

GPU_SHARE, CPU_SHARE = 0.5, 0.4
"""Share of GPU or host memory for weights. The rest is for KV, activations and other programs."""
CPU_BYTES_A_CORE = 900 * 10**6
"""Weights per core. Decoding reads all weights for every token, so larger models decode slower than people read."""


@dataclass(frozen=True)
class Machine:
    """Memory and CPU cores of a machine."""

    memory_bytes: int  # host memory
    cores: int  # usable CPU cores
    gpu_bytes: int = 0  # memory of the largest GPU, 0 without one


@dataclass(frozen=True)
class Candidate:
    """A recommended model."""

    name: str  # value of --model
    weight_bytes: int  # of its files
    get: str  # command that fetches it


def _hub(name: str, parameters: float) -> Candidate:
    return Candidate(name, int(round(2 * parameters, 1) * 10**9), f"cacheblend models pull {name}")


CANDIDATES = (
    Candidate(SMOLLM2, SMOLLM2_BYTES, INSTALL),
    _hub("Qwen/Qwen3-0.6B", 0.6),
    _hub("Qwen/Qwen3-1.7B", 1.7),
    _hub("Qwen/Qwen3-4B-Instruct-2507", 4.0),
    _hub("Qwen/Qwen3-8B", 8.2),
)
"""Smallest first."""


def detect() -> Machine:
    """Read memory (a container's limit included), cores and GPU memory of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(total_memory(), cores, _gpu_bytes())


def _gpu_bytes() -> int:
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    import torch

    if not torch.cuda.is_available():
        return 0
    return max(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))


def weight_budget(machine: Machine) -> int:
    """Return the bytes of weights that run well on the machine."""
    if machine.gpu_bytes:
        return int(machine.gpu_bytes * GPU_SHARE)
    return min(int(machine.memory_bytes * CPU_SHARE), machine.cores * CPU_BYTES_A_CORE)


def recommend(machine: Machine) -> Candidate:
    """Return the largest candidate within the budget, or the smallest candidate."""
    budget = weight_budget(machine)
    return max((c for c in CANDIDATES if c.weight_bytes <= budget), key=lambda c: c.weight_bytes, default=CANDIDATES[0])
