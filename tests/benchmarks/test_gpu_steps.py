"""The parts of the GPU plan on a fake GPU, in tiny shapes: what they call of a device exists, and the numbers hold."""

from __future__ import annotations

import gc
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from cacheblend_kernels.triton_backend.backend import TritonBackend
from fake_gpu import FakeGpu, compute_with_torch, installed, watch_launches

from cacheblend_cli.engine.worker import memory

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from gpu import profiles  # noqa: E402
from gpu.context import Context  # noqa: E402
from gpu.log import Log  # noqa: E402
from gpu.steps import run_step  # noqa: E402


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    importlib.import_module("transformers.models.llama.modeling_llama")  # annotates with classes of torch.cuda
    with installed({}) as gpu, pytest.MonkeyPatch.context() as patch:
        watch_launches(gpu, patch)
        compute_with_torch(gpu, patch, TritonBackend)
        patch.setattr(memory, "PROFILE_ROWS", (64, 32))
        gpu.total = 1 << 34
        try:
            yield gpu
        finally:
            gc.unfreeze()


@pytest.mark.parametrize(("step", "least"), [("ceilings", 3), ("kernel speeds", 17), ("llama-3.1-8b", 40)])
def test_a_part_runs_on_a_device(
    step: str, least: int, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "ACTIVITIES", [torch.profiler.ProfilerActivity.CPU])
    log = Log(tmp_path / "log.jsonl")
    code = run_step(Context(step, torch.device("cuda", 0), True, tmp_path, log, time.time() + 600))
    lines = log.lines()
    assert code == 0
    assert gc.get_freeze_count() > 0
    assert [line for line in lines if line["event"] in ("fault", "skipped")] == []
    rows = [line["row"] for line in lines if line["event"] == "row"]
    assert [row for row in rows if "message" in row or not row.get("ok", True)] == []
    assert sum(line["event"] == "done" for line in lines) >= least
    assert not gpu.errors
