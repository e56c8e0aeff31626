"""What a start reads is known before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import write_checkpoint

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.model import read_ahead

AUTO = ("auto", "auto")


def test_a_start_remembers_the_files_that_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[list[str]]()
    monkeypatch.setattr(read_ahead, "_read", read.append)
    path = str(tmp_path / "m")
    write_checkpoint(tmp_path / "m", "llama-gqa")
    assert read_ahead.read_ahead(path, AUTO) is None
    Runtime.load(EngineConfig(model=path))
    monkeypatch.chdir(tmp_path)
    for name, dtypes, files in (
        (path, AUTO, [[os.path.realpath(tmp_path / "m" / "model.safetensors")]]),
        ("m", AUTO, [[os.path.realpath(tmp_path / "m" / "model.safetensors")]]),
        ("m", ("float32", "auto"), []),
        ("other", AUTO, []),
    ):
        if (thread := read_ahead.read_ahead(name, dtypes)) is not None:
            thread.join()
        assert read == files
        read.clear()


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="not Linux")
def test_files_that_are_gone_or_in_memory_cost_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100_000))
    assert read_ahead._read([str(tmp_path / "none"), str(tmp_path / "a"), ""]) == 0


def test_it_needs_no_torch() -> None:
    code = "import sys, cacheblend_cli.model.read_ahead; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
