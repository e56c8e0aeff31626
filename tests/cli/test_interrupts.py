"""Ctrl-C at any moment of a start ends the command with exit code 130 and one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from cacheblend_cli.cli.main import run

PROGRAM = """
import os, signal, sys
from cacheblend_cli.cli.main import main

at, count = int(sys.argv.pop(1)), 0

def on_event(event, arguments):
    global count
    if event == "import":
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGINT)

def first_output(text):
    os.write(1, str(count).encode())
    os._exit(0)

if not at:
    sys.stdout.write = sys.stderr.write = first_output
sys.addaudithook(on_event)
main()
"""
"""Interrupt the command at import number `at`; with 0, print the number of imports before its first output."""


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "store"))
    (tmp_path / "a.md").write_text("Mara leads billing.\n")
    assert run(["precompute", "a.md", "-q"]) == 0


def started(at: int, command: list[str]) -> subprocess.CompletedProcess[str]:
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in a shell's background have it ignored
    line = [sys.executable, "-c", PROGRAM, str(at), *command]
    return subprocess.run(line, capture_output=True, text=True, timeout=100, preexec_fn=default)


@pytest.mark.parametrize(
    ("command", "num_moments"),
    [(["ask", "Who leads billing?"], 20), (["doctor", "--json"], 5), (["precompute", "a.md", "--force", "-q"], 5)],
)
def test_every_moment_of_a_start_can_be_interrupted(command: list[str], num_moments: int) -> None:
    num_imports = int(started(0, command).stdout)
    assert num_imports > 1000, "the command ends before torch is imported"
    moments = [1 + (num_imports - 1) * i // (num_moments - 1) for i in range(num_moments)]
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        for moment, done in zip(moments, pool.map(started, moments, [command] * num_moments), strict=True):
            assert (done.returncode, done.stdout) == (130, ""), (moment, done.stderr)
            [line] = done.stderr.splitlines()
            assert line.startswith("interrupted"), moment


def test_an_ignored_interrupt_stays_ignored() -> None:
    """A shell without job control starts background commands so."""
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from cacheblend_cli.cli.main import handle_interrupts\n"
        "handle_interrupts(); print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "True\n"
