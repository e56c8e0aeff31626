"""benchmarks/gpu_check.py: every line that needs no GPU runs, and it says what it left out and what went wrong."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import math
import re
import sys
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from children import Ended, outcomes

ROOT = Path(__file__).parent.parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import gpu.speeds  # noqa: E402
import gpu.steps  # noqa: E402
import gpu_check  # noqa: E402
from gpu.log import (  # noqa: E402
    Budget,
    Log,
    assemble,
)
from gpu.report import markdown  # noqa: E402
from gpu.steps import Step  # noqa: E402
from gpu.timing import summed  # noqa: E402

OURS = ("cacheblend_cli", "cacheblend_kernels", "cacheblend_store", "gpu", "gpu_check", "kernel_references")


def run(out: Path, *more: str, lacking: Sequence[str] = ()) -> tuple[int, dict[str, Any], str, str]:
    """Exit code, the JSON, stdout, stderr of the check and its steps in a fork, which has torch and transformers.

    lacking: packages that our modules, which are imported anew, do not import there.
    """

    def work(_: Any) -> tuple[int, str, str]:
        torch.set_num_threads(1)
        for name in [name for name in sys.modules if name.partition(".")[0] in (*OURS, *lacking)]:
            del sys.modules[name]
        sys.modules.update(dict.fromkeys(lacking))  # type: ignore[arg-type]
        check, steps = (importlib.import_module(name) for name in ("gpu_check", "gpu.steps"))

        def run_child(command: list[str], *limits: Any) -> tuple[int, str]:
            sys.argv[1:] = command[3:]
            return steps.main(), ""

        check.run_child, steps.stands = run_child, lambda: None
        sys.argv[1:] = ["--device", "cpu", "--tiny", "--out", str(out), *more]
        with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
            code = check.main()
        return code, stdout.getvalue(), stderr.getvalue()

    importlib.import_module("transformers")
    [(_, told)] = outcomes(work, [None], timeout=300)
    assert not isinstance(told, Ended), told
    code, stdout, stderr = told
    return code, json.loads(out.with_suffix(".json").read_text()), stdout, stderr


def not_needed() -> list[str]:
    """Modules of the packages that the tool depends on and the check says it does without."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    names = {re.split(r"[^\w-]", package)[0].replace("-", "_") for package in packages}
    return sorted(names - {*gpu_check.NEEDED, *gpu_check.LARGE, "huggingface_hub", "httpx2"})


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """Runs stages in this process, which has torch already. Returns the JSON."""

    def run_child(command: list[str], *limits: Any) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", command[2:])
        return gpu.steps.main(), ""

    def run_here(*more: str) -> dict[str, Any]:
        command = ["gpu_check.py", "--device", "cpu", "--tiny", "--out", str(tmp_path / "all"), *more]
        monkeypatch.setattr(sys, "argv", command)
        assert gpu_check.main() == 0, capsys.readouterr().err
        return dict(json.loads((tmp_path / "all.json").read_text()))

    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(gpu.steps, "stands", lambda: None)
    monkeypatch.setattr(gpu_check, "run_child", run_child)
    return run_here


def test_the_first_two_stages_run_on_a_cpu(tmp_path: Path, here: Callable[..., dict[str, Any]]) -> None:
    """The first one with no package but those that are looked for."""
    more = ("--store-dir", str(tmp_path), "--processes", "1")
    code, result, stdout, stderr = run(tmp_path / "all", "--stages", "1", *more, lacking=not_needed())
    assert (code, result["faults"]) == (0, []), stderr
    assert result["skipped"] == [f"compute-sanitizer, {tool}: no GPU" for tool in ("memcheck", "racecheck")]
    assert stdout.strip() == (tmp_path / "all.md").read_text().strip()
    result = here("--stages", "2", "--resume", *more)
    assert not list(tmp_path.glob("cacheblend-gpu-*"))  # nothing stays but the result's files
    kernels = {row["kernel"] for row in result["checks"]}
    assert kernels >= {
        "prefill_attention",
        "decode_attention",
        "rope",
        "rope_and_cache",
        "load_kv",
        "kv_deviation",
    }
    assert all(row["ok"] for row in result["checks"])
    small, model = result["end_to_end"]
    few, rest = (96, 160), (*(f"blend {r:.2f}" for r in (0, 0.05, 0.1, 0.2, 1)),)
    assert [(r["length"], r["case"]) for r in small["times"]] == [
        (n, case) for n in few for case in ("full", "blend 0.15", "query 0.15", "transformers")
    ]
    first = ("full", "blend 0.15", "query 0.15", "query 0.15 uncorrected", "blend 0.15 in the pool", "transformers")
    assert [(r["length"], r["case"]) for r in model["times"]] == [
        *((n, case) for n in few for case in first),
        *((n, case) for n in few for case in ("query 0.05", *rest)),
    ]
    for row in model["times"]:
        case = row["case"].split()
        assert row["seconds"] > 0
        assert row["floor_s"] > 0
        assert ("load_gb_s" in row) == (case[0] in ("blend", "query") and "pool" not in case)
        chosen = math.ceil(float(case[1]) * (row["length"] - 24)) if len(case) > 1 else 0
        assert row["chosen"] == chosen  # prefix and suffix aside
        assert ("speedup" in row) == (row["case"] != "full")
    assert [(r["length"], r["case"]) for r in model["decode"]] == [(n, c) for n in few for c in ("eager", "graphs")]
    assert all(r["tokens_like_eager"] == 1 for r in model["decode"] if r["case"] == "graphs")
    assert len(model["checks"]) == 8
    assert all(row["error"] <= 1e-5 for row in model["checks"])
    assert "blend 0.15" in (tmp_path / "all.md").read_text()


def test_what_does_not_fit_its_time_is_left_out_and_said(tmp_path: Path) -> None:
    code, result, _, stderr = run(tmp_path / "none", "--budget", "0", "--processes", "1")
    assert code == 0
    assert "kernel checks 1/1: no time was left" in result["skipped"]
    assert "left out" in stderr
    assert "Left out:" in (tmp_path / "none.md").read_text()


CHILD = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
import gpu.steps
from gpu.log import Log
from gpu.log import Budget

def rows(case):
    yield "kernels", {{"kernel": "k", "case": case, "seconds": 1.0}}
    if case == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if case in ("raises", "spoils"):
        raise RuntimeError("CUDA error: misaligned address")
    if case == "hangs" and not {quick}:
        time.sleep(600)

class Context(gpu.steps.Context):
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

gpu.steps.stands()
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
gpu.steps.cases_of = cases
log, folder = Log(Path(arguments["--log"])), Path(arguments["--folder"])
sys.exit(gpu.steps.run_step(Context(arguments["--step"], None, True, folder, log, Budget(60))))
"""

CASES = ("first", "dies", "raises", "spoils", "hangs", "last")


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Runs a step whose cases go wrong in every way (quick: none hangs); what the log then holds."""
    monkeypatch.setattr(gpu_check, "STEPS", (str(tmp_path / "steps.py"),))
    log = Log(tmp_path / "log.jsonl")
    arguments = argparse.Namespace(device="cpu", tiny=False)

    def follow(seconds: float = 60, quick: bool = False) -> list[dict[str, Any]]:
        code = CHILD.format(benchmarks=str(ROOT / "benchmarks"), cases=CASES, quick=quick)
        (tmp_path / "steps.py").write_text(code)
        gpu_check.follow(Step("step", quiet_s=2.0), arguments, log, Budget(seconds), tmp_path)
        return log.lines()

    return follow


def test_a_case_that_raises_dies_or_hangs_leaves_the_next_its_turn(
    followed: Callable[..., list[dict[str, Any]]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = assemble(followed(), tiny=True)
    assert [row["case"] for row in result["kernels"]] == list(CASES)
    assert result["faults"] == [
        "step, dies: the process ended with -9",
        *(f"step, {case}: RuntimeError: CUDA error: misaligned address" for case in ("raises", "spoils")),
        "step, hangs: nothing came for 2 s",
    ]
    assert (
        len((tmp_path / "processes").read_text().split()) == 4
    )  # what raises and leaves a device that works needs no new one
    assert "in rows" in capfd.readouterr().err.rpartition("Current thread")[2]  # where the one that hung stood


def test_a_preparation_that_fails_ends_the_step(followed: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    for case in CASES:
        log.write("step", case, "done")
    (tmp_path / "broken").touch()
    assert assemble(followed(), tiny=True)["faults"] == ["step: RuntimeError: no memory for the next inputs"]
    assert len((tmp_path / "processes").read_text().split()) == 1


def test_what_was_cut_off_or_left_out_is_done_again(
    followed: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    log = Log(tmp_path / "log.jsonl")
    for case, end in (
        ("first", "done"),
        ("dies", "fault"),
        ("raises", "done"),
        ("spoils", "done"),
        ("hangs", "skipped"),
    ):
        log.write("step", case, "start")
        log.write("step", case, "row", part="kernels", row={"kernel": "old", "case": case})
        log.write("step", case, end, message="")
    log.write("step", "last", "start")
    log.write("step", "last", "row", part="kernels", row={"kernel": "old", "case": "last"})
    with open(log.path, "a") as file:
        file.write('{"step": "step", "case": "la')
    log.reopen()
    assert log.over("step") == {"first", "dies", "raises", "spoils"}
    result = assemble(followed(quick=True), tiny=True)
    kernels = {row["case"]: row["kernel"] for row in result["kernels"]}
    assert kernels == {"first": "old", "dies": "old", "raises": "old", "spoils": "old", "hangs": "k", "last": "k"}


def test_a_case_that_had_no_time_left_has_its_turn_in_a_run_that_goes_on(
    followed: Callable[..., list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.0)
    log = Log(tmp_path / "log.jsonl")
    for case in CASES[:4]:
        log.write("step", case, "done")
    result = assemble(followed(1.0), tiny=True)
    assert (result["faults"], result["skipped"][0]) == ([], "step, hangs: no time was left")
    log.reopen()
    assert log.over("step") == set(CASES[:4])


def test_what_failed_or_was_wrong_has_another_turn_where_that_is_asked_for(tmp_path: Path) -> None:
    rows = {
        "right": {"ok": True},
        "wrong": {"ok": False},
        "raised": {"message": "RuntimeError"},
        "speed": {"seconds": 1.0},
    }
    log = Log(tmp_path / "log.jsonl")
    for case, row in rows.items():
        log.write("step", case, "row", part="checks", row=row)
        log.write("step", case, "done")
    log.write("step", "failed", "fault", message="RuntimeError")
    log.reopen()
    assert log.over("step") == {*rows, "failed"}
    log.reopen(again=True)
    assert log.over("step") == {"right", "speed"}


def test_inputs_that_cannot_be_made_cost_their_family_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = gpu.speeds.works

    def works(family: str, *more: Any) -> Any:
        if family == gpu.speeds.FAMILIES[1]:
            raise RuntimeError("out of memory")
        return made(family, *more)

    monkeypatch.setattr(gpu.speeds, "works", works)
    log = Log(tmp_path / "log.jsonl")
    context = gpu.steps.Context("kernel speeds", torch.device("cpu"), True, tmp_path, log, Budget(60))
    names = [name for name, _ in gpu.steps.speed_cases(context)]
    assert any(name.startswith("act_and_mul") for name in names)
    assert assemble(log.lines(), tiny=True)["faults"] == [
        "kernel speeds: decode_attention: RuntimeError: out of memory"
    ]


def test_a_package_that_is_missing_ends_it_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some.jsonl").write_text("of an earlier run\n")
    monkeypatch.setattr(gpu_check, "NEEDED", ("xxhash", "no_such_package"))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cpu", "--tiny", "--out", str(tmp_path / "some")])
    assert gpu_check.main() == 2
    assert "no_such_package (No module" in capsys.readouterr().err
    assert (tmp_path / "some.jsonl").read_text() == "of an earlier run\n"


def test_a_report_that_cannot_be_made_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[str] = []
    reports = iter((RuntimeError("no such row"), {"checks": []}, {"checks": []}))

    def write(*of_it: Any) -> dict[str, Any]:
        if isinstance(report := next(reports), Exception):
            raise report
        return report

    monkeypatch.setattr(gpu_check, "stage_steps", lambda *of_it: [Step("first"), Step("second")])
    monkeypatch.setattr(gpu_check, "follow", lambda step, *more: followed.append(step.name))
    monkeypatch.setattr(gpu_check, "write", write)
    monkeypatch.setattr(gpu_check, "summary", lambda *of_it: 0)
    argv = ["gpu_check.py", "--device", "cpu", "--tiny", "--stages", "1", "--out", str(tmp_path / "some")]
    monkeypatch.setattr(sys, "argv", argv)
    assert gpu_check.main() == 0
    assert followed == ["first", "second"]


def test_a_resumed_run_measures_nothing_twice(here: Callable[..., dict[str, Any]]) -> None:
    first = here("--stages", "3")
    assert len(first["kernels"]) == 29
    assert first["assumed"] == []
    second = here("--stages", "3", "--resume")
    assert {**second, "seconds": 0} == {**first, "seconds": 0}


def test_a_ceiling_that_is_not_there_is_assumed_and_said() -> None:
    lines = [
        {"step": "ceilings", "case": "matmul_tflop_s", "event": "fault", "message": "RuntimeError: out of memory"},
        {
            "step": "ceilings",
            "case": "device_copy_gb_s",
            "event": "row",
            "part": "ceilings",
            "row": {"device_copy_gb_s": 4000.0},
        },
    ]
    environment = {"hardware": {"device": "GPU", "cpu": "CPU", "cores": 1, "memory_gib": 1}, "versions": {}}
    lines.append({"step": "ceilings", "case": "environment", "event": "row", "part": "environment", "row": environment})
    result = assemble(lines, tiny=False) | {"seconds": 1.0}
    assert result["ceilings"] == {"device_copy_gb_s": 4000.0, "matmul_tflop_s": 790.0, "host_to_device_gb_s": 55.0}
    assert result["assumed"] == ["matmul_tflop_s", "host_to_device_gb_s"]
    assert "| matmul_tflop_s | 790 | not measured: an H200's |" in markdown(result)


def test_a_profile_stands_with_its_model() -> None:
    told = {"model": "m", "dtype": "d", "backend": "b", "warm_up_s": 1.0, "precompute": {"tokens": 1, "seconds": 1.0}}
    profile = {"length": 4096, "case": "full", "kernels": 197, "copies": 3, "busy_ms": 14.5, "wall_ms": 20.0}
    lines = [
        {"step": "m", "case": "preparation", "event": "row", "part": "model", "row": told},
        {"step": "m", "case": "N=4096 full, profiled", "event": "row", "part": "profiles", "row": profile},
    ]
    result = assemble(lines, tiny=False) | {"seconds": 1.0}
    assert "| 4096 | full | 197 | 3 | 14.5 | 20 |" in markdown(result)


def test_busy_time_counts_what_overlaps_once() -> None:
    events = [("gemm", 0.0, 1000.0), ("Memcpy HtoD", 500.0, 1500.0), ("rope", 2000.0, 2500.0), ("gemm", 2100.0, 2200.0)]
    assert summed(events) == {"kernels": 3, "copies": 1, "busy_ms": 2.0}


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
    with pytest.raises(SystemExit, match="wheels"):
        gpu_check.install(tmp_path / "site", tmp_path / "elsewhere")
