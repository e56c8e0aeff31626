"""The checks of Triton's interpreter (`tests/support/interpreter_checks.py`) find planted faults."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

SUPPORT = Path(__file__).parents[1] / "support"
KERNELS = """
import torch, triton, triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

@triton.jit
def move(x_ptr, y_ptr, num, read_from, write_to, step, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + at + read_from, mask=at < num)
    tl.store(y_ptr + at // step + write_to, x, mask=at < num)

@triton.jit
def count(out_ptr, also_ptr, num, PLAIN: tl.constexpr, B: tl.constexpr):
    at = tl.arange(0, B)
    tl.atomic_add(out_ptr + at, 1.0, mask=at < num)
    if PLAIN:
        tl.store(also_ptr + at, tl.load(out_ptr + at))

@triton.jit
def copy_tile(desc, out_ptr, B: tl.constexpr):
    tile = desc.load([tl.program_id(0) * B, 0])
    tl.store(out_ptr + tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :], tile)

def ones(n):
    return torch.ones(n)

def test_good():
    x, y = ones(60), ones(60)
    move[(4,)](x, y, 60, 0, 0, 1, B=16)
    move[(4,)](x, x, 60, 0, 0, 1, B=16)
    count[(4,)](x, y, 60, False, B=64)
    copy_tile[(1,)](TensorDescriptor(torch.ones(16, 16), [16, 16], [16, 1], [16, 16]), torch.ones(256), B=16)

def test_slice_of_a_tensor():
    whole = ones(128)
    move[(4,)](whole[64:], whole[:64], 64, 0, 0, 1, B=16)

def test_read_past():
    move[(4,)](ones(64), ones(64), 64, 1, 0, 1, B=16)

def test_read_before():
    move[(4,)](ones(64)[2:], ones(64), 62, -2, 0, 1, B=16)

def test_write_past():
    move[(4,)](ones(64), ones(60), 64, 0, 0, 1, B=16)

def test_past_a_slice():
    x = ones(64)
    move[(4,)](x[:32], ones(64), 64, 0, 0, 1, B=16)

def test_two_writers():
    move[(4,)](ones(64), ones(64), 64, 0, 0, 17, B=16)

def test_read_of_a_written():
    x = ones(80)
    move[(4,)](x, x, 64, 0, 16, 1, B=16)

def test_write_of_a_read():
    x = ones(80)
    move[(4,)](x, x, 64, 16, 0, 1, B=16)

def test_atomic_and_plain():
    count[(4,)](ones(64), ones(64), 64, True, B=64)

def test_after_them():
    test_good()
"""
FOUND = {
    "test_read_past": "move: read out of bounds: 4 bytes past the end of x_ptr",
    "test_read_before": "move: read out of bounds: 8 bytes before x_ptr",
    "test_write_past": r"move: write out of bounds: \d+ bytes past the end of y_ptr",
    "test_past_a_slice": r"move: read out of bounds: \d+ bytes past the end of x_ptr",
    "test_two_writers": "move: write of y_ptr where another program has written",
    "test_read_of_a_written": "move: read of x_ptr, y_ptr where another program has written",
    "test_write_of_a_read": "move: write of x_ptr, y_ptr where another program has read",
    "test_atomic_and_plain": "count: read of out_ptr where another program has changed atomically",
}


def test_planted_faults_are_found(tmp_path: Path) -> None:
    file = tmp_path / "test_planted.py"
    file.write_text(KERNELS)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "interpreter_checks", "-p", "no:cacheprovider", "-rA", "--rootdir",
         str(tmp_path), "-c", os.devnull, "-W", "ignore", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT)},
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert set(re.findall(r"^PASSED \S*::(\w+)", result.stdout, re.M)) == {
        "test_good", "test_slice_of_a_tensor", "test_after_them"
    }, result.stdout[-6000:] + result.stderr[-2000:]  # fmt: skip
    assert set(re.findall(r"^FAILED \S*::(\w+)", result.stdout, re.M)) == set(FOUND)
    for name, message in FOUND.items():
        [part] = re.findall(rf"^_+ {name} _+$(.*?)(?=^_+ test_|^=+)", result.stdout, re.M | re.S)
        assert re.search(message, part), part
    assert re.search(r"checked [\d,]+ accesses of \d+ launches", result.stdout)
