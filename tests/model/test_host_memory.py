"""Memory of the host."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

import pytest

HELD = """
import ctypes, json, sys
from cacheblend_cli.model.host_memory import keep_freed_memory
class Counts(ctypes.Structure):  # mallinfo(3)
    _fields_ = [(name, ctypes.c_int) for name in "arena ordblks smblks hblks mapped usmblks fsmblks used free keepcost".split()]
libc = ctypes.CDLL(None)
libc.mallinfo.restype, libc.malloc.restype, libc.free.argtypes = Counts, ctypes.c_void_p, [ctypes.c_void_p]
if sys.argv[1] == "kept":
    keep_freed_memory()
before = libc.mallinfo()
blocks = [libc.malloc(24 << 20) for _ in range(5)]
mapped = libc.mallinfo().mapped - before.mapped
for block in blocks:
    libc.free(block)
print(json.dumps([mapped >> 20, libc.mallinfo().arena - before.arena >> 20]))
"""


def held(kept: str, **environment: str) -> list[int]:
    """Take and free 120 MiB in a process of its own. Returns the MiB that were mapped, and those that malloc keeps."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | environment
    command = [sys.executable, "-c", HELD, kept]
    found: list[int] = json.loads(subprocess.run(command, env=mine, capture_output=True, text=True, check=True).stdout)
    return found


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo"), reason="glibc's")
def test_malloc_keeps_freed_memory_unless_the_user_set_otherwise() -> None:
    mapped, kept = held("kept")
    assert mapped == 0
    assert kept > 100
    for mapped, kept in (held("default"), held("kept", MALLOC_MMAP_THRESHOLD_="65536")):
        assert mapped > 100
        assert kept < 20
