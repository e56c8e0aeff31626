"""A process for untrusted input ends with its work's cancellation, and with the process that started it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cacheblend_documents.limited_process import LimitedProcess, _receive, _send

from cacheblend_cli.cancellation import Cancellation, Cancelled

WAIT_S = 60.0
MODULE = """
import os, re, sys
from cacheblend_documents.limited_process import limits, serve

def answer(message):
    if message.startswith(b"until "):
        open(message[6:], "w").close()
        open(message[6:]).close()
    elif message == b"print":
        os.write(1, bytes([0, 0, 0, 0, 0, 0, 0, 1, 1]))  # would be an empty answer
        print("and this", sys.stdin.read())
    elif message != b"short":
        open(message, "w").close()  # a FIFO: the test waits for it
        with limits(90, 1 << 34):
            re.match("(a*)*b", "a" * 64)  # in C code
    return message

serve(answer)
"""
CALLER = """
import os, sys
from cacheblend_documents.limited_process import LimitedProcess
process = LimitedProcess("limited_module")
process.ask(b"short")
print(process._process.pid, flush=True)
process.ask(os.fsencode(sys.argv[1]))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "limited_module.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return "limited_module"


@pytest.fixture
def began(tmp_path: Path) -> Path:
    """A FIFO: reading it waits until the process works."""
    os.mkfifo(path := tmp_path / "began")
    return path


def test_what_the_process_prints_is_no_answer(module: str) -> None:
    process = LimitedProcess(module)
    assert process.ask(b"print") == b"print"
    assert process.ask(b"short") == b"short"
    process.close()


def test_a_cancellation_kills_the_process_that_works(module: str, began: Path) -> None:
    process, cancellation, errors = LimitedProcess(module), Cancellation(), list[BaseException]()
    assert process.ask(b"short", cancellation) == b"short"

    def ask() -> None:
        try:
            process.ask(os.fsencode(began), cancellation)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    began.read_bytes()
    cancellation.cancel()
    thread.join(WAIT_S)
    assert [type(error) for error in errors] == [Cancelled]
    with pytest.raises(Cancelled):
        process.ask(b"short", cancellation)
    assert process.ask(b"short", Cancellation()) == process.ask(b"short") == b"short"
    process.close()


def test_a_message_that_arrives_during_work_is_answered_next(module: str, began: Path) -> None:
    """The kernel's signal for data may come after the data was read, so it has to mean nothing."""
    process = LimitedProcess(module)
    process.ask(b"short")
    assert process._process is not None
    stdin, stdout = process._process.stdin, process._process.stdout
    assert stdin is not None
    assert stdout is not None
    _send(stdin, b"until " + os.fsencode(began))
    began.read_bytes()
    _send(stdin, b"short")
    began.write_bytes(b"")
    assert [_receive(stdout)[1:] for _ in range(2)] == [b"until " + os.fsencode(began), b"short"]
    process.close()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_ends_with_its_caller(module: str, began: Path, number: signal.Signals) -> None:
    """Though it works for minutes: nothing else would end it before."""
    assert module
    with subprocess.Popen([sys.executable, "-c", CALLER, began], stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        handle = os.pidfd_open(int(caller.stdout.readline()))
        began.read_bytes()
        caller.send_signal(number)
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    assert ended.poll(WAIT_S * 1000)
    os.close(handle)
