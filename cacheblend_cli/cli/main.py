"""The `cacheblend` command. Imports little until Ctrl-C is handled."""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import threading
from collections.abc import MutableMapping
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from cacheblend_cli.errors import ExitCode, UsageError

_END_BAR = "\r\x1b[2K\x1b[?25h"  # erases the line and shows the cursor
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPIN_COUNT, QUIET_SPIN_COUNT = "1000", "300000"
"""Spins of an OpenMP thread at a barrier before it sleeps: beside busy programs, and otherwise (libgomp's default, with
which a spinning thread takes the core from the thread it waits for). On an idle machine, waking threads costs a fifth
of a token's time (benchmarks/README.md)."""


def run(arguments: list[str] | None = None) -> int:
    """Run a command (default: sys.argv) and return its exit code."""
    try:
        from cacheblend_cli.cli.app import app

        code = app(arguments, prog_name="cacheblend", standalone_mode=False)
        if code == ExitCode.INTERRUPTED:  # the parser caught the Ctrl-C
            raise KeyboardInterrupt
        sys.stdout.flush()  # notice a closed pipe before exit
    except BaseException as error:
        code = _failed(error)
    from cacheblend_cli.cli.output import Output

    Output().end_status()
    return code if isinstance(code, int) else 0


def main() -> None:
    handle_interrupts()
    try:
        open_closed_streams()
        ensure_home()
        limit_spinning()
        leave(run())
    except KeyboardInterrupt:
        _end()


def leave(code: int) -> NoReturn:
    """Wait for threads, run the exit handlers and end the process as Python does, but let the system free the memory.
    Python frees it object by object, which takes a tenth of a second with torch."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # run() has reported it; it may be closed
            stream.flush()
    os._exit(code)


def handle_interrupts() -> None:
    """Set the handler of this process, unless it ignores SIGINT, as in the background of a shell."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or end the process while a module is imported.

    An extension module that is being imported may ignore an exception, replace it or abort, as torch and numpy do.
    Ending the process during an import loses no data.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _end()
        frame = frame.f_back
    raise KeyboardInterrupt


def _end() -> NoReturn:
    """Print one line and end the process at once, with no clean-up by modules that are half imported. Writes past
    sys.stderr, which the interrupted code may be writing to."""
    shown = getattr(sys.modules.get("cacheblend_cli.cli.output"), "Output", None)
    on_bar = getattr(shown, "_bar_shown", False)
    with suppress(OSError):
        os.write(2, f"{_END_BAR if on_bar else ''}interrupted\n".encode())
    os._exit(ExitCode.INTERRUPTED)


class _ClosedStdout(io.StringIO):
    """Standard output closed by the parent process: writing to it is an error."""

    def write(self, text: str) -> int:
        raise UsageError("standard output is closed", "send it to a terminal, a pipe, a file or /dev/null")


def open_closed_streams() -> None:
    """Open standard streams that the parent process closed on /dev/null. Otherwise the next opened file, possibly the
    store, would get the descriptor that messages are written to."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        os.open(os.devnull, os.O_WRONLY)  # takes descriptor 1
        sys.stdout = _ClosedStdout()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def ensure_home() -> None:
    """Set HOME to a nonexistent directory for accounts without one (containers with a numeric user)."""
    if not os.path.isabs(os.path.expanduser("~")):
        os.environ["HOME"] = "/nonexistent"


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set a short spin count if other programs need the CPUs, unless the user set one of VARIABLES. An engine that this
    process starts keeps the count: it would take this process for a busy program. Call before torch loads libgomp,
    which reads it once."""
    if not any(name in environment for name in VARIABLES):
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT if _cpus_are_short() else QUIET_SPIN_COUNT


def _cpus_are_short(stat: str = "/proc/stat") -> bool:
    """Return whether other processes compete for this process's CPUs; True also if unknown, or under a CPU quota."""
    try:
        others = min(_running_threads(stat) for _ in range(3)) - 1  # ignore short-lived threads
        own, count = len(os.sched_getaffinity(0)), os.cpu_count() or 1
        if others < 0 or (own < count and others) or _has_quota():
            return True
        return others + own > count
    except (OSError, IndexError, ValueError, AttributeError):
        return True


def _has_quota(limit: str = "/sys/fs/cgroup/cpu.max") -> bool:
    """Return whether the control group has a CPU quota."""
    try:
        with open(limit, encoding="ascii") as line:
            return not line.read().startswith("max")
    except OSError:
        return False


def _running_threads(stat: str) -> int:
    """Return the number of runnable threads, including this one."""
    with open(stat, encoding="ascii") as lines:
        return int(next((line for line in lines if line.startswith("procs_running")), "").split()[1])


def _failed(error: BaseException) -> int:
    import typer

    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, SystemExit):
        if isinstance(error.__context__, BrokenPipeError):  # the parser exits like this on a closed pipe
            error = error.__context__
        else:
            return error.code if isinstance(error.code, int) else 1
    if isinstance(error, typer.Abort):
        error = KeyboardInterrupt()
    from cacheblend_cli.cli.exits import report
    from cacheblend_cli.cli.output import Output

    return report(error, Output())
