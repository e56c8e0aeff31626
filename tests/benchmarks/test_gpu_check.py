"""benchmarks/gpu_check.py: every line that needs no GPU runs, and it says what it left out and what went wrong."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_cli.blend.policy import LayerReport, Status

ROOT = Path(__file__).parent.parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import gpu_check  # noqa: E402
import gpu_end_to_end  # noqa: E402
import gpu_kernels  # noqa: E402
from gpu_budget import Budget  # noqa: E402
from gpu_cost import Ceilings, prefill_floor  # noqa: E402
from gpu_model import read_config  # noqa: E402
from gpu_report import markdown, targets  # noqa: E402

from cacheblend_cli.model.families import spec_from_config  # noqa: E402


def run(out: Path, *more: str) -> tuple[int, dict[str, Any], str, str]:
    """Exit code, the JSON, stdout, stderr."""
    command = [sys.executable, "benchmarks/gpu_check.py", "--device", "cpu", "--tiny", "--out", str(out), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    return done.returncode, json.loads(out.with_suffix(".json").read_text()), done.stdout, done.stderr


def test_every_step_runs_on_a_cpu(tmp_path: Path) -> None:
    code, result, stdout, stderr = run(tmp_path / "all", "--store-dir", str(tmp_path), "--processes", "1")
    assert (code, result["faults"], result["skipped"]) == (0, [], []), stderr
    assert stdout.strip() == (tmp_path / "all.md").read_text().strip()
    assert not list(tmp_path.glob("cacheblend-gpu-*"))  # nothing stays but the two files
    kernels = {row["kernel"] for row in result["checks"]}
    assert kernels >= {
        "prefill_attention",
        "decode_attention",
        "rope",
        "rope_and_cache",
        "load_kv",
        "kv_deviation",
        "copy_blocks",
    }
    assert all(row["ok"] for row in result["checks"])
    assert all(row["seconds"] > 0 and row["ceiling"] > 0 for row in result["kernels"])
    [model] = result["end_to_end"]
    cases = ["full", "transformers", *(f"blend {r:.2f}" for r in (0, 0.05, 0.1, 0.15, 0.2, 1))]
    assert [(r["length"], r["case"]) for r in model["times"]] == [(n, case) for n in (96, 160) for case in cases]
    for row in model["times"]:
        assert row["seconds"] > 0
        assert row["floor_s"] > 0
        assert ("load_gb_s" in row) == row["case"].startswith("blend")
        chosen = round(float(row["case"][-4:]) * (row["length"] - 24) + 0.49) if "blend" in row["case"] else 0
        assert row["chosen"] == chosen  # prefix and suffix aside
    assert [(r["length"], r["case"]) for r in model["decode"]] == [
        (n, c) for n in (96, 160) for c in ("eager", "graphs")
    ]
    assert all(r["tokens_like_eager"] == 1 for r in model["decode"] if r["case"] == "graphs")
    assert len(model["checks"]) == 8
    assert all(row["error"] <= 1e-5 for row in model["checks"])
    assert "blend 0.15" in (tmp_path / "all.md").read_text()


def test_what_does_not_fit_its_time_is_left_out_and_said(tmp_path: Path) -> None:
    code, result, _, stderr = run(tmp_path / "none", "--budget", "0", "--processes", "1")
    assert code == 1  # the kernel checks did not end
    assert any("kernel checks" in fault for fault in result["faults"])
    assert "tiny from question to answer" in result["skipped"]
    assert "left out" in stderr
    assert "Left out:" in (tmp_path / "none.md").read_text()


def test_what_raises_leaves_the_rest_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(bench: Any, length: int) -> list[dict[str, Any]]:
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(gpu_end_to_end, "load", load)
    scenario = replace(gpu_end_to_end.TINY, lengths=(96,))
    ceilings = {"matmul_tflop_s": 0.1, "device_copy_gb_s": 10.0, "host_to_device_gb_s": 10.0}
    faults: list[str] = []
    result = gpu_end_to_end.measure_end_to_end(
        "tiny", scenario, torch.device("cpu"), ceilings, tmp_path, Budget(600), faults
    )
    assert faults == ["tiny N=96, load: RuntimeError: CUDA error: misaligned address"]
    assert result["load"] == []
    assert len(result["times"]) == 8
    assert len(result["decode"]) == 2


def test_wheels_are_put_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = "cacheblend_probe-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "cacheblend_probe-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("cacheblend_probe.py", "answer = 42\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: cacheblend-probe\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    gpu_check.install(tmp_path, tmp_path / "site")
    assert importlib.import_module("cacheblend_probe").answer == 42
    with pytest.raises(SystemExit, match="no wheels"):
        gpu_check.install(tmp_path / "site", tmp_path / "elsewhere")


def test_an_unknown_family_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_kernels.py", "--device", "cpu", "--tiny", "--only", "swap"])
    with pytest.raises(SystemExit, match="2"):
        gpu_kernels.main()
    assert "invalid choice: 'swap'" in capsys.readouterr().err


def test_a_budget_notes_what_it_refuses() -> None:
    budget = Budget(1000)
    assert budget.allows(900, "short")
    assert not budget.allows(1001, "long")
    assert budget.skipped == ["long"]


@pytest.mark.parametrize(("ratio", "speedup"), [(0.05, 10.5), (0.1, 7.0), (0.15, 5.3), (0.2, 4.2)])
def test_the_cost_model_gives_the_known_ceilings(ratio: float, speedup: float) -> None:
    """(1 + (L-1) s/N) / L for 32 layers, 4096 tokens and a suffix of 64, whatever the device."""
    spec, length, suffix = spec_from_config(read_config("llama-3.1-8b")), 4096, 64
    chosen = round(ratio * (length - suffix))
    blend = [
        LayerReport(0, Status.PREFILL, length, length - suffix),
        LayerReport(1, Status.CHECK, length, length - suffix),
        *(LayerReport(i, Status.AFTER_CHECK, chosen + suffix, chosen) for i in range(2, 32)),
    ]
    full = [LayerReport(i, Status.AFTER_CHECK, length, 0) for i in range(32)]
    fast = Ceilings(flops=1e12, memory=1e20, bus=1e20)
    floors = [prefill_floor(spec, length, suffix, layers, 1 << 29, fast) for layers in (full, blend)]
    assert floors[0] / floors[1] == pytest.approx(speedup, rel=0.08)
    slow_bus = Ceilings(flops=1e12, memory=1e20, bus=1e6)
    assert prefill_floor(spec, length, suffix, blend, 1 << 29, slow_bus) == (1 << 29) / 1e6


def test_targets_tell_met_missed_and_not_measured() -> None:
    times = [
        {"length": 4096, "case": "full", "seconds": 0.1, "tflop_s": 500.0},
        {"length": 4096, "case": "transformers", "seconds": 0.09},
        {"length": 4096, "case": "blend 0.15", "seconds": 0.02, "speedup": 5.0},
    ]
    model = {"model": "llama-3.1-8b", "times": times, "decode": [], "load": [{"length": 16384, "gb_s": 20.0}]}
    kernel = {"kernel": "decode_attention", "case": "llama-3.1-8b batch 1, context 16384, triton", "share": 0.85}
    found = {
        row["what"]: row["met"]
        for row in targets({"end_to_end": [model], "kernels": [kernel], "ceilings": {"matmul_tflop_s": 700.0}})
    }
    assert found["blend at ratio 0.15 over full prefill, N=4096"] is True
    assert found["blend at ratio 0.15 over full prefill, N=16384"] is None
    assert found["transformers' SDPA prefill's time over ours, N=4096"] is False
    assert found["decode attention, share of the copy's ceiling, context 16384"] is True
    assert found["store to pool, verified, GB/s"] is False


def test_wrong_numbers_are_shown() -> None:
    row = {"kernel": "rms_norm", "case": "width 80", "dtype": "float16", "backend": "triton", "tolerance": 1e-3}
    result = {
        "hardware": {"device": "GPU", "cpu": "CPU", "cores": 1, "memory_gib": 1},
        "versions": {},
        "tiny": False,
        "seconds": 1.0,
        "skipped": [],
        "faults": [],
        "checks": [{**row, "error": float("nan"), "ok": False, "message": "CUDA error: an illegal memory access"}],
        "ceilings": {},
        "end_to_end": [],
        "kernels": [],
    }
    text = markdown(result)
    assert "0 of 1 cases" in text
    assert "illegal memory access" in text
    assert text.count("not measured") == len(targets(result))
