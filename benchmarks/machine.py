"""What the benchmarks share: the machine they run on, what other processes use of it, and a checkpoint of random
weights."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MOST_USED = 0.2
"""CPUs that other processes may use during a run whose figures are kept."""


class Others:
    """CPU time of other processes since construction, in CPUs (1.0 = one core). Child processes count as ours once
    reaped. ours: CPU seconds so far of others that belong to what is measured."""

    def __init__(self, ours: Callable[[], float] = lambda: 0.0) -> None:
        self._ours = ours
        self._start = self._now()

    def used(self) -> float:
        wall, busy, own = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return max(0.0, busy - own) / wall

    def _now(self) -> tuple[float, float, float]:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.monotonic(), busy, sum(usage.ru_utime + usage.ru_stime for usage in own) + self._ours()


def hardware() -> dict[str, Any]:
    """Return CPU, cores, memory, torch threads and torch version, as every result names them."""
    import torch

    from cacheblend_cli.evaluation.speed import device_name

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": device_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def machine_name() -> str:
    """Return the CPU with the widest matrix or vector instructions it has, as "AMD EPYC, AVX512-BF16"."""
    import torch

    from cacheblend_cli.evaluation.speed import device_name

    flags = next((line.split() for line in Path("/proc/cpuinfo").read_text().splitlines() if line[:5] == "flags"), [])
    names = {"amx_tile": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX512", "avx2": "AVX2"}
    widest = next((name for flag, name in names.items() if flag in flags), "")
    return ", ".join(filter(None, (device_name(torch.device("cpu")), widest)))


def write_checkpoint(path: Path, config: Path) -> Path:
    """Write a float32 checkpoint of random weights in the shape of the config, with the demo model's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from cacheblend_cli.demo import model_dir

    torch.manual_seed(0)
    path.mkdir(parents=True)
    shutil.copy(config, path / "config.json")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    model.save_pretrained(path)
    shutil.copy(config, path / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(model_dir() / name, path / name)
    return path
