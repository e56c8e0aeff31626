"""Loading holds no copy of the weights: the peak of a process that loads a checkpoint (Linux)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cacheblend_kernels import compiled
from checkpoints import write_checkpoint
from gguf_files import write_gguf

CHILD = """
import json, sys
import gguf.quants
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine

def memory(field):
    return int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1]) << 10

small, model, weights = sys.argv[1:]
# what is imported, and what the library keeps
Engine.load(EngineConfig(model=small, dtype="float32", weight_dtype=weights))
before = memory("VmRSS")
engine = Engine.load(EngineConfig(model=model, dtype="float32", weight_dtype=weights))
print(json.dumps([4 * engine.runtime.decoder.num_parameters, memory("VmHWM") - before]))
"""
SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 44}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ "small" and "m" in a folder."""
    folder = tmp_path_factory.mktemp("memory")
    write_checkpoint(folder / "small", "llama-gqa")
    write_checkpoint(folder / "m", "llama-gqa", **SHAPE)
    return folder


@pytest.mark.skipif(not compiled.multiplies(torch.float32), reason="no code was compiled")
@pytest.mark.parametrize(("form", "weights"), [("safetensors", "auto"), ("safetensors", "int8"), ("gguf", "auto")])
def test_loading_copies_next_to_nothing(checkpoints: Path, tmp_path: Path, form: str, weights: str) -> None:
    small, model = str(checkpoints / "small"), str(checkpoints / "m")
    if form == "gguf":
        small, model = str(tmp_path / "small.gguf"), str(tmp_path / "m.gguf")
        for name in ("small", "m"):
            write_gguf(checkpoints / name, tmp_path / f"{name}.gguf", "llama", "Q8_0")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, small, model, weights],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    size, taken = json.loads(done.stdout)
    assert size > 150 << 20  # so large that what else a process takes does not decide
    # quantising reads the checkpoint once: pages of its small tensors count
    assert taken <= (0.1 if weights == "auto" else 1.2) * size, f"{taken / size:.2f} times"
