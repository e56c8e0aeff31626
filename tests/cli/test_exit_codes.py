"""Errors of libraries below, and the exit code and next step each becomes."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from command_line import Cli

from cacheblend_cli.cli.exits import report
from cacheblend_cli.cli.main import run
from cacheblend_cli.cli.output import Output


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), 5, "fewer chunks"),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nmore"), 5, "cacheblend doctor"),
        (PermissionError(13, "Permission denied", "model.safetensors"), 2, "model.safetensors"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 1, "mat1 and mat2"),
    ],
)
def test_library_errors_get_exit_codes_and_hints(
    error: Exception, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(error, Output()) == code
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_closed_streams(tmp_path: Path) -> None:
    """They are opened, else the first file would get the number that messages go to. A result that cannot be written is
    an error."""
    cacheblend = f"{sys.executable} -c 'from cacheblend_cli.cli.main import main; main()'"
    for command, code in (
        ("ask - <&-", 2),
        ("config show >&-", 2),
        ("--version >&-", 2),
        ("--help >&-", 2),
        ("chunks ls --store nowhere 2>&-", 3),
    ):
        done = subprocess.run(["bash", "-c", f"{cacheblend} {command}"], cwd=tmp_path, capture_output=True, timeout=60)
        assert done.returncode == code, done.stderr
        assert b"internal error" not in done.stderr
        assert (b"error: standard output is closed" in done.stderr) == (">&-" in command and "2>" not in command)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
@pytest.mark.parametrize("command", ["config show", "config show --json", "--version", "--help"])
def test_a_full_device(command: str, tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = with_buffer(command, tmp_path, full.fileno())
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[0] == b"error: writing failed: No space left on device"
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_messages_that_a_full_disk_does_not_take() -> None:
    """An engine's log may be on it."""
    with suppress(OSError), open("/dev/full", "w") as full:  # raised when it is closed
        Output(err=full).note("one")
        noted = True
    assert noted


@pytest.mark.parametrize("command", ["config show", "config show --json", "--version", "--help"])
def test_a_reader_that_has_gone(command: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = with_buffer(command, tmp_path, writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def with_buffer(command: str, folder: Path, stdout: int) -> subprocess.CompletedProcess[bytes]:
    """Run a command. stdout keeps what it could not write, unless PYTHONUNBUFFERED is set."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    line = [sys.executable, "-c", "from cacheblend_cli.cli.main import main; main()", *command.split()]
    return subprocess.run(line, cwd=folder, env=environment, stdout=stdout, stderr=subprocess.PIPE, timeout=60)


def test_a_command_ends_with_its_threads_and_exit_handlers_and_frees_no_memory(tmp_path: Path) -> None:
    code = """
import atexit, sys, threading
from cacheblend_cli.cli.main import main

class Large:
    def __del__(self):
        print("freed")

held = Large()
atexit.register(print, "exit handler")
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
main()
"""
    command = [sys.executable, "-c", code, "chunks", "ls", "--store", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()) == (3, ["thread", "exit handler"])


def test_a_question_without_quotes(cli: Cli) -> None:
    asked = cli("ask", "who", "leads")
    assert asked.code == 2
    assert "quotes" in asked.err


def test_a_deleted_working_directory_is_not_an_internal_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    assert run(["chunks", "ls"]) == 3


def test_an_account_without_a_home(tmp_path: Path) -> None:
    """As in a container that runs as a number: settings are read, and a store has to be named."""
    bare = {k: v for k, v in os.environ.items() if not k.startswith(("HOME", "XDG_", "CACHEBLEND_"))}
    code = "import pwd; pwd.getpwuid = {}.__getitem__\nfrom cacheblend_cli.cli.main import main; main()"
    for arguments, status in ((["config", "show"], 0), (["chunks", "ls"], 3), (["chunks", "ls", "--store", "~x/y"], 2)):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, timeout=60)
        assert done.returncode == status, done.stderr
        assert b"internal error" not in done.stderr
    assert list(tmp_path.iterdir()) == []
