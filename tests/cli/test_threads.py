"""How threads wait: set before torch loads where CPUs are short, and the user's own variables win."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cacheblend_cli.cli import main
from cacheblend_cli.cli.main import QUIET_SPIN_COUNT, SPIN_COUNT, VARIABLES, _cpus_are_short, limit_spinning


def test_the_entry_point_sets_a_short_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # put back afterwards, whatever the command sets
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["cacheblend", "--version"])
    monkeypatch.setattr(main, "_cpus_are_short", lambda: True)
    monkeypatch.setattr(main, "leave", sys.exit)
    with pytest.raises(SystemExit):
        main.main()
    assert os.environ["GOMP_SPINCOUNT"] == SPIN_COUNT


def test_a_quiet_machine_keeps_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "_cpus_are_short", lambda: False)
    environment: dict[str, str] = {}
    limit_spinning(environment)
    assert environment == {"GOMP_SPINCOUNT": QUIET_SPIN_COUNT}  # also of the engines that this process starts


@pytest.mark.parametrize(("running", "short"), [(1, False), (2, True), (9, True)])
def test_cpus_are_short_where_others_run_on_them(
    running: int, short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(main, "_has_quota", lambda: False)
    (tmp_path / "stat").write_text(f"cpu  1 2 3 4\nctxt 5\nprocs_running {running}\nprocs_blocked 0\n")
    assert _cpus_are_short(str(tmp_path / "stat")) is short
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert _cpus_are_short(str(tmp_path / "stat")) is short, "the others may run on this one"


@pytest.mark.parametrize(("text", "short"), [("max 100000\n", False), ("200000 100000\n", True), (None, False)])
def test_cpus_are_short_under_a_quota(text: str | None, short: bool, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert main._has_quota(str(tmp_path / "cpu.max")) is short


@pytest.mark.parametrize("text", ["", "procs_running 0\n", "cpu 1\n", "procs_running many\n", "procs_running\n"])
def test_a_system_that_does_not_say_counts_as_busy(text: str, tmp_path: Path) -> None:
    assert _cpus_are_short(str(tmp_path / "none"))
    (tmp_path / "stat").write_text(text)
    assert _cpus_are_short(str(tmp_path / "stat"))


@pytest.mark.parametrize("name", VARIABLES)
def test_the_users_own_variable_wins(name: str) -> None:
    environment = {name: "1"}
    limit_spinning(environment)
    assert environment == {name: "1"}


def test_torchs_libgomp_reads_it_when_it_is_loaded() -> None:
    """The variable is set in a process that runs already; OMP_DISPLAY_ENV makes the library tell what it took."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.submodule_search_locations
    library = Path(torch.submodule_search_locations[0]) / "lib/libgomp.so.1"
    if not library.exists():
        pytest.skip("torch came without libgomp")
    code = "import ctypes; from cacheblend_cli.cli import main; main._cpus_are_short = lambda: True; "
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES} | {"OMP_DISPLAY_ENV": "VERBOSE"}
    for limit, count in (("main.limit_spinning(); ", SPIN_COUNT), ("", QUIET_SPIN_COUNT)):
        command = [sys.executable, "-c", f"{code}{limit}ctypes.CDLL({str(library)!r})"]
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert f"GOMP_SPINCOUNT = '{count}'" in told.stderr
