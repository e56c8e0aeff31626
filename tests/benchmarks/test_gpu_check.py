"""benchmarks/gpu_check.py: every line that needs no GPU runs, its processes are followed, and packs are unpacked."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import gpu.runner  # noqa: E402
import gpu.speeds  # noqa: E402
import gpu.steps  # noqa: E402
import gpu_check  # noqa: E402
from gpu.context import Context  # noqa: E402
from gpu.end_to_end import FEW, PREFILLS, prepare  # noqa: E402
from gpu.log import Log, assemble  # noqa: E402
from gpu.model import read_config  # noqa: E402
from gpu.plan import PLAN, Part  # noqa: E402
from gpu.profiles import Event, rows_of  # noqa: E402
from gpu.report import markdown  # noqa: E402
from gpu.runner import Clock, Runner  # noqa: E402

from cacheblend_cli.model.families import spec_from_config  # noqa: E402
from cacheblend_cli.model.weight_map import expected_shapes  # noqa: E402

MODELS = [part.name for part in PLAN if part.name.startswith("llama")]
HERE = "GPU; torch 1; code abc"


@pytest.mark.parametrize(("name", "billions"), [("llama-3.1-8b", 8.0), ("llama-3.2-1b", 1.2)])
def test_the_models_of_the_plan_have_a_configuration(name: str, billions: float) -> None:
    shapes = {target: shape for _, target, _, shape in expected_shapes(spec_from_config(read_config(name))).values()}
    assert sum(map(math.prod, shapes.values())) / 1e9 == pytest.approx(billions, abs=0.1)
    assert name in MODELS


class Inline:
    """A part's process that ran in this one."""

    def __init__(self, code: int) -> None:
        self._code = code

    def poll(self) -> int:
        return self._code

    def stop(self, stack: bool) -> None:
        raise AssertionError("it has ended")


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """Runs parts in this process, which has torch already. Returns the JSON."""

    def child(command: list[str], messages: Path) -> Inline:
        monkeypatch.setattr(sys, "argv", command[2:])
        return Inline(gpu.steps.main())

    def run_here(*parts: str) -> dict[str, Any]:
        monkeypatch.setattr(gpu_check, "PLAN", [part for part in PLAN if part.name in parts])
        command = ["gpu_check.py", "--device", "cpu", "--tiny", "--processes", "1", "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", [*command, "--minutes", "5"])
        assert gpu_check.main() == 0, capsys.readouterr().err
        [result] = tmp_path.glob("gpu-*-tiny.json")
        return dict(json.loads(result.read_text()))

    monkeypatch.setattr(gpu.runner, "TICK_S", 0.0)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(gpu.steps, "dump_stacks", lambda: None)
    monkeypatch.setattr(gpu_check, "ChildProcess", child)
    return run_here


@pytest.mark.default_codec
def test_a_model_is_measured_from_question_to_answer(here: Callable[..., dict[str, Any]]) -> None:
    result = here("ceilings", "llama-3.1-8b", "llama-3.2-1b")
    assert (result["faults"], result["skipped"], result["assumed"]) == ([], [], [])
    for step, lengths, prefills in (("llama-3.1-8b", (96, 160), PREFILLS), ("llama-3.2-1b", (96,), FEW)):
        rows = [row for row in result["times"] if row["step"] == step]
        assert [(r["length"], r["case"]) for r in rows] == [
            (n, c) for n in lengths for c in (*prefills, "transformers")
        ]
        for row in rows:
            assert row["seconds"] > 0
            others = "transformers", "from the store", "without graphs"
            assert row["case"].endswith(others) or row["expected_s"] > 0
            assert row["seconds"] <= row["p90_s"] == max(row["values"])  # of one run here
            blended = row["case"].startswith(("query", "hkvd"))
            assert ("load_gb_s" in row) == (blended and not row["case"].endswith("pool"))
            if row["case"] != "transformers":  # prefix and suffix aside
                assert row["chosen"] == (math.ceil(0.15 * (row["length"] - 24)) if blended else 0)
            assert ("speedup" in row) == (row["case"] != "full")
        decoded = [row for row in result["decode"] if row["step"] == step]
        names = ("batch 1", "batch 2", "batch 1, 4 proposals")
        assert [(r["length"], r["case"]) for r in decoded] == [(n, name) for n in lengths for name in names]
        assert [row["tokens"] for row in decoded if "proposals" not in row["case"]] == [6, 12] * len(lengths)
        assert all(row["first_token_s"] > 0 for row in decoded)
    seen = {
        (r["step"], r["case"]): {s["host"] for s in result["stamps"] if s["case"] == r["case"]}
        for r in result["stamps"]
    }
    assert seen["llama-3.1-8b", "query 0.15"] == {"plan", "find", "open", "wait", "choose", "run"}
    assert seen["llama-3.1-8b", "query 0.15 in the pool"] == {
        "wait",
        "choose",
        "run",
    }  # what is loaded before is not seen
    stored = [row for row in result["load"] if row["case"] == "precompute"]
    assert {row["codec"] for row in stored} == {"int7"}  # the default, at every length once
    assert len(stored) == 3
    assert sum(row["cases"] for row in result["checks"]) == 15


def test_kernels_are_checked_and_timed(here: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    result = here("kernel checks", "kernel speeds")
    kernels = {"prefill_attention", "decode_attention", "load_kv"}
    rows = {"rope_and_cache", "rope", "kv_deviation", "rms_norm", "act_and_mul"}
    assert {row["kernel"] for row in result["checks"]} >= kernels | rows
    assert {row["kernel"] for row in result["kernels"]} == kernels
    assert result["assumed"] == ["device_copy_gb_s", "matmul_tflop_s", "host_to_device_gb_s"]
    [report] = tmp_path.glob("*.md")
    assert "| matmul_tflop_s | 790, assumed |" in report.read_text()


def test_the_command_line_answers_from_stored_kv(here: Callable[..., dict[str, Any]]) -> None:
    result = here("command line")
    assert [(row["case"], row["ok"]) for row in result["commands"]] == [
        ("precompute on cpu", True),
        ("ask on cpu", True),
    ]
    assert result["commands"][1]["told"].startswith("4 of 4 answers are the handbook's")


def test_storing_kv_is_tried_once(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    context = Context("llama-3.2-1b", torch.device("cpu"), True, tmp_path, log, time.time() + 60)
    with prepare(context) as bench:
        assert bench.fill(96)["tokens"] == 72
        (tmp_path / "llama-3.2-1b-96").touch()  # left by a process that was ended
        with pytest.raises(RuntimeError, match="failed before"):
            bench.fill(96)


CHILD = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
import gpu.steps
from gpu.context import Context
from gpu.log import Log

def rows(case):
    yield "commands", {{"case": case, "ok": True}}
    if case == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if case in ("raises", "spoils"):
        raise RuntimeError("CUDA error: misaligned address")
    if case == "hangs":
        time.sleep(600)

class Spoilt(Context):
    def synchronize(self):
        if self.log.lines()[-1]["case"] == "spoils":
            raise RuntimeError("CUDA error: misaligned address")

def cases(context):
    with open(context.folder / "processes", "a") as file:
        print(os.getpid(), file=file)
    for case in {cases!r}:
        yield case, lambda case=case: rows(case)
    if (context.folder / "broken").exists():
        raise RuntimeError("no memory for the next inputs")

gpu.steps.dump_stacks()
gpu.steps.cases_of = cases
log, folder = Log(Path(sys.argv[1])), Path(sys.argv[1]).parent
sys.exit(gpu.steps.run_step(Spoilt("step", None, True, folder, log, time.time() + 60)))
"""

CASES = ("first", "dies", "raises", "spoils", "hangs", "last")


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """Follows real processes of a part whose cases go wrong in every way. Returns what the log then holds."""
    monkeypatch.setattr(gpu.runner, "QUIET_S", 2.0)
    log = Log(tmp_path / "log.jsonl")
    (tmp_path / "steps.py").write_text(CHILD.format(benchmarks=str(ROOT / "benchmarks"), cases=CASES))

    def spawn(part: Part, number: int, seconds: float) -> gpu_check.ChildProcess:
        command = [sys.executable, str(tmp_path / "steps.py"), str(log.path)]
        return gpu_check.ChildProcess(command, tmp_path / "messages")

    def follow() -> dict[str, Any]:
        Runner(log, spawn, 60, Clock()).run_part(Part("step", "", 50, ""), 50)
        return assemble(log.lines(), HERE, tiny=True)

    return follow


def test_a_case_that_raises_dies_or_hangs_leaves_the_next_its_turn(
    followed: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    result = followed()
    assert [row["case"] for row in result["commands"]] == list(CASES)
    assert result["faults"] == [
        "step, dies: the process ended with -9",
        *(f"step, {case}: RuntimeError: CUDA error: misaligned address" for case in ("raises", "spoils")),
        "step, hangs: nothing came for 2 s",
    ]
    # what raises and leaves a device that works needs no new process
    assert len((tmp_path / "processes").read_text().split()) == 4
    assert (
        "in rows" in (tmp_path / "messages").read_text().rpartition("Current thread")[2]
    )  # where the one that hung stood


def test_a_preparation_that_fails_ends_the_part(followed: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    for case in CASES:
        log.write("step", case, "done")
    (tmp_path / "broken").touch()
    assert followed()["faults"] == ["step: RuntimeError: no memory for the next inputs"]
    assert len((tmp_path / "processes").read_text().split()) == 1


def test_inputs_that_cannot_be_made_cost_their_family_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def _broken(device: torch.device, tiny: bool) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu.speeds, "FAMILIES", [_broken, gpu.speeds._load_kv])
    log = Log(tmp_path / "log.jsonl")
    context = Context("kernel speeds", torch.device("cpu"), True, tmp_path, log, time.time() + 60)
    names = [name for name, _ in gpu.speeds.cases(context)]
    assert all(name.startswith("load_kv") for name in names)
    assert names
    faults = assemble(log.lines(), HERE, tiny=True)["faults"]
    assert faults == ["kernel speeds: broken: RuntimeError: out of memory"]


@pytest.mark.parametrize(
    ("on", "taken"),
    [(HERE, True), ("GPU; torch 1; code mended", True), ("GPU; torch 2; code abc", False), ("other; torch 1; ", False)],
)
def test_rows_of_another_device_or_version_are_refused(
    tmp_path: Path, on: str, taken: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gpu-x.json").write_text(json.dumps({"on": on}))
    found = gpu_check.earlier_result(tmp_path / "gpu-x", "GPU; torch 1; ")
    assert found == ({"on": on} if taken else None)
    assert taken or f"has rows of {on}" in capsys.readouterr().err
    assert gpu_check.earlier_result(tmp_path / "gpu-y", "GPU; torch 1; ") == {}


def test_parts_that_run_again_replace_their_rows_alone(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    check = {"kernel": "rope", "case": "1", "dtype": "float16", "backend": "triton", "tolerance": 1.0}
    for step, error in (("kernel checks", 2.0), ("families", 0.5)):
        log.write(step, "(ready)", "ready")
        log.write(step, "case", "row", part="checks", row=check | {"error": error, "ok": error < 1})
        log.write(step, "hangs", "fault", message="nothing came")
    earlier = assemble(log.lines(), HERE, tiny=True)
    assert [(row["cases"], len(row["wrong"])) for row in earlier["checks"]] == [(1, 1), (1, 0)]
    again = Log(tmp_path / "again.jsonl")
    again.write("kernel checks", "(ready)", "ready")
    again.write("kernel checks", "case", "row", part="checks", row=check | {"error": 0.25, "ok": True})
    result = assemble(again.lines(), HERE, tiny=True, earlier=earlier)
    assert {row["step"]: row["error"] for row in result["checks"]} == {"families": 0.5, "kernel checks": 0.25}
    assert "2 of 2 are within tolerance" in markdown(result)
    assert result["faults"] == ["families, hangs: nothing came"]


def test_a_package_that_is_missing_ends_it_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "NEEDED", ("xxhash", "no_such_package"))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cpu", "--tiny", "--out", str(tmp_path)])
    assert gpu_check.main() == 2
    assert "no_such_package (No module" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_made_costs_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path / "log.jsonl")
    log.write("ceilings", "copy", "row", part="ceilings", row={"device_copy_gb_s": 1.0})
    monkeypatch.setattr(gpu_check, "markdown", lambda result: 1 / 0)
    gpu_check.write(log, HERE, tmp_path / "gpu-x", False, {})
    assert json.loads((tmp_path / "gpu-x.json").read_text())["ceilings"]["device_copy_gb_s"] == 1.0


def test_a_profile_names_kernels_and_counts_gaps_of_the_stream_that_computes() -> None:
    events = [Event(0.0, 1.0, "gemm", 7), Event(0.5, 1.5, "Memcpy HtoD", 8), Event(1.02, 2.0, "rope", 7)]
    events += [Event(3.0, 4.0, "gemm", 7), Event(2.5, 3.5, "load_kv", 9)]
    row, *named = rows_of(events, 5.0)
    assert row == pytest.approx(
        {"kernels": 4, "copies": 1, "busy_ms": 3.5, "wall_ms": 5.0, "busy_share": 0.7, "gaps": 1, "gap_ms": 1.0}
    )
    assert named[0] == {"kernel": "gemm", "count": 2, "ms": pytest.approx(2.0)}
    assert {one["kernel"] for one in named} == {"gemm", "rope", "load_kv", "Memcpy HtoD"}
    assert rows_of([], 1.0)[0]["busy_ms"] == 0.0


def test_a_profile_and_the_targets_are_reported() -> None:
    where = {"step": "llama-3.1-8b", "case": "", "process": 0, "event": "row"}
    profile = {"length": 4096, "case": "full", "kernels": 197, "copies": 3, "busy_ms": 14.5, "wall_ms": 20.0}
    kernel = {"length": 4096, "case": "full", "kernel": "inverse_kernel", "count": 31, "ms": 5.0}
    times = [{"length": 4096, "case": c, "seconds": s} for c, s in (("full", 0.1), ("query 0.15", 0.025))]
    lines = [{**where, "part": "profiles", "row": row} for row in ({**profile, "busy_share": 0.725}, kernel)]
    lines += [{**where, "case": row["case"], "part": "times", "row": row} for row in times]
    report = markdown(assemble(lines, HERE, tiny=False))
    assert "| 4096 | full | 197 | 3 | 14.5 | 20 | 0.725 |" in report
    assert "| inverse_kernel | 31 | 5 |" in report
    assert "| the default at .15 over full prefill | 3 | 4 | yes |" in report


@pytest.mark.parametrize("device", ["nvidia-h100-80gb-hbm3", "nvidia-h200"])
def test_the_committed_page_is_that_of_the_committed_rows(device: str) -> None:
    path = ROOT / "benchmarks" / "results" / f"gpu-{device}.json"
    assert markdown(json.loads(path.read_text())) == path.with_suffix(".md").read_text()


def test_a_pack_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack, info = tmp_path / "pack", "cacheblend_probe-1.0.dist-info"
    cache = tmp_path / "unpacked" / "triton"
    (pack / "wheels").mkdir(parents=True)
    with zipfile.ZipFile(pack / "wheels" / "cacheblend_probe-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("cacheblend_probe.py", "answer = 42\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: cacheblend-probe\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (tmp_path / "kernel.cubin").write_bytes(b"code")
    with tarfile.open(pack / "triton.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "kernel.cubin", "KEY/kernel.cubin")
    manifest = {"versions": {}, "files": {}}
    (pack / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    gpu_check.unpack(pack, tmp_path / "unpacked")
    assert importlib.import_module("cacheblend_probe").answer == 42
    assert (cache / "KEY" / "kernel.cubin").read_bytes() == b"code"
    assert os.environ["TRITON_CACHE_DIR"] == str(cache)
    (pack / "manifest.json").write_text(json.dumps({**manifest, "files": {"triton.tar.xz": "0"}}))
    with pytest.raises(SystemExit, match="damaged"):
        gpu_check.unpack(pack, tmp_path / "unpacked")
