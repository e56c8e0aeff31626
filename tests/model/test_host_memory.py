"""Memory of the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = """
import resource, torch
from cacheblend_cli.model.host_memory import keep_freed_memory
keep_freed_memory()
def activations():
    return [torch.ones(4 << 20, dtype=torch.uint8) for _ in range(4)], torch.ones(24 << 20, dtype=torch.uint8)
for _ in range(12):  # until the heap has grown
    activations()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    activations()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> int:
    """Return the page faults of taking and freeing 40 MiB eight times, in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", PAGES], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return int(run.stdout)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
def test_freed_memory_is_taken_again_without_page_faults_unless_the_user_set_otherwise() -> None:
    if "libc.so.6" not in Path("/proc/self/maps").read_text():
        pytest.skip("no glibc")
    of_a_round = (40 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert faults() < of_a_round
    assert faults(MALLOC_MMAP_THRESHOLD_="65536") > 7 * of_a_round  # the user's setting
