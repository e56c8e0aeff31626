"""Commands that a script or CI runs leave no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import PAGES, ROOT

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")


def processes_of(home: str) -> list[str]:
    """Return the command lines of the processes that have this home."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"HOME={home}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def command(*arguments: str, stdin: str = "", stderr: int = subprocess.PIPE) -> None:
    line = [sys.executable, "-c", "from cacheblend_cli.cli.main import main; main()", *arguments]
    done = subprocess.run(line, input=stdin, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_commands_of_a_script_and_of_ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(str(ROOT / part) for part in ("", "documents", "store", "kernels"))
    )
    monkeypatch.setenv("CACHEBLEND_MAX_TOKENS", "4")
    for name in ("CACHEBLEND_KEEP_ALIVE", "CI"):
        monkeypatch.delenv(name, raising=False)
    Path("docs").mkdir()
    Path("docs/page.md").write_text(PAGES[0])
    with subprocess.Popen(["sleep", "60"]) as other:
        assert processes_of(os.environ["HOME"]) == ["sleep 60 "]
        other.kill()
    command("precompute", "docs")
    command("search", "billing")
    command("ask", "who leads billing?")
    command("chat", stdin="who leads billing?\n")
    command("doctor")
    terminal, end = os.openpty()
    monkeypatch.setenv("CI", "true")
    command("ask", "who leads billing?", stderr=end)  # some runners give jobs a terminal
    os.close(end)
    os.close(terminal)
    assert processes_of(os.environ["HOME"]) == []
