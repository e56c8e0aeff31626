"""The files of a start are known before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import write_checkpoint

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.model import read_ahead

PAGE = 4096


def test_a_start_remembers_the_files_that_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[list[str]]()
    monkeypatch.setattr(read_ahead, "_read", read.append)
    start = EngineConfig(str(tmp_path / "m"))
    write_checkpoint(tmp_path / "m", "llama-gqa")
    assert read_ahead.read_ahead(start.model, start.dtype, start.weight_dtype) is None
    Runtime.load(start)
    weights = os.path.realpath(tmp_path / "m/model.safetensors")
    monkeypatch.chdir(tmp_path)
    for asked, files in (
        (start, [[weights]]),
        (replace(start, model="m"), [[weights]]),
        (replace(start, dtype="float32"), []),
        (replace(start, model="other"), []),
    ):
        if (thread := read_ahead.read_ahead(asked.model, asked.dtype, asked.weight_dtype)) is not None:
            thread.join()
        assert read == files
        read.clear()


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="not Linux")
def test_files_that_are_gone_or_in_memory_cost_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100_000))
    assert read_ahead._read([str(tmp_path / "none"), str(tmp_path / "a"), ""]) == 0


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="not Linux")
def test_a_piece_whose_beginning_the_kernel_has_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads a little more than it is asked for."""
    cached, size = set[int](), 5 * PAGE * 4
    (tmp_path / "a").write_bytes(bytes(size))
    monkeypatch.setattr(read_ahead, "PIECE", PAGE * 4)

    def preadv(file: int, buffers: list[bytearray], start: int, flags: int = 0) -> int:
        if flags and start // PAGE not in cached:
            raise BlockingIOError
        first = start // PAGE
        cached.update(range(first, first + len(buffers[0]) // PAGE + (0 if flags else 2)))
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", preadv)
    assert read_ahead._read([str(tmp_path / "a")]) == 5


def test_it_needs_no_torch() -> None:
    code = "import sys, cacheblend_cli.model.read_ahead; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
