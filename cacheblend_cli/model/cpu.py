"""The CPU of this machine, to tell records of measured speeds apart."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


def cpu_name() -> str:
    return next((s.split(":")[1].strip() for s in _cpu_info() if s.startswith("model name")), platform.machine())


def cpu_features() -> list[str | None]:
    """Return the CPU's instruction sets, and the user's limits."""
    flags = next((line for line in _cpu_info() if line.startswith(("flags", "Features"))), "")
    return [flags, *(os.environ.get(name) for name in _VARIABLES)]


@cache
def _cpu_info() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
