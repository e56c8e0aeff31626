"""Start, query and stop engines in the background. Imports neither torch nor numpy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cacheblend_store.private_files import InsecurePath, locked, open_file, read_bytes

from cacheblend_cli.client import Connection
from cacheblend_cli.errors import CacheBlendError, ExitCode, NotFoundError, UsageError
from cacheblend_cli.server.binding import bind_unix
from cacheblend_cli.settings import Settings
from cacheblend_cli.sockets import make_folder, registered_engines, socket_of, sockets_of

RUNS = " answers at "
"""Text in the log of every engine that has started."""
_LEFT = "started by a command for the next ones"  # first line of the log of such an engine
_START_S = 300.0
_POLL_S = 0.05
_LOG_BYTES = 64 << 20
_REPLY_S = 10.0  # to wait for the status of a listening engine
_END_S = 15.0  # after the grace period, to close the store and free memory
_IDLE_REPLY_S = 1.0  # to wait for the status of an idle engine
_RETRY_S = 3600.0  # after a failed start


def start(settings: Settings, idle_exit_s: float, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run `cacheblend serve` in a new session. Return the engine's status once it responds. arguments: command line; by
    default this command's without --background. Raises CacheBlendError with the engine's message and exit code if it
    exits before that."""
    if arguments is None:
        arguments = [argument for argument in sys.argv[1:] if argument not in ("--background", "--json")]
    path = socket_of(settings)
    with _starting(path):
        return ask_status(path) or _started(path, _spawn(path, arguments, idle_exit_s))


def start_own(settings: Settings, idle_exit_s: float, flags: Sequence[str]) -> None:
    """Start the engine with these settings like `spawn_own`, unless it is running, and return once it responds. Raises
    CacheBlendError like `start`."""
    _started(socket_of(settings), spawn_own(settings, idle_exit_s, flags))


def spawn_own(settings: Settings, idle_exit_s: float, flags: Sequence[str]) -> subprocess.Popen[bytes] | None:
    """Start the engine with these settings on its private socket only, and do not wait for it: requests wait in the
    socket, which it inherits. flags: flags of `serve` for these settings. Return None if it is running or loading.
    Raises CacheBlendError, OSError."""
    path = socket_of(settings)
    with _starting(path):
        if Connection.is_open(path):
            return None
        with bind_unix(path) as bound:
            return _spawn(path, ["serve", "--unix-socket", str(path), *flags], idle_exit_s, bound.fileno())


def is_own(status: dict[str, Any]) -> bool:
    """Return whether a command started the engine for itself, on a private socket only."""
    return bool(status["url"] == f"unix:{status['socket']}")


def start_error(settings: Settings) -> str:
    """Return how the last `spawn_own` with these settings failed; "" if it succeeded, or was more than an hour ago."""
    log = socket_of(settings).with_suffix(".log")
    lines = [] if listens(settings) else _lines(log)
    if lines[:1] != [_LEFT] or RUNS in "\n".join(lines) or time.time() - log.stat().st_mtime > _RETRY_S:
        return ""
    return _failure(lines, log).message


def listens(settings: Settings) -> bool:
    """Return whether the engine with these settings is running or loading its model; requests wait for that."""
    return Connection.is_open(socket_of(settings))


@contextmanager
def _starting(path: Path) -> Iterator[None]:
    """Hold the lock of starting the engine at a socket: a second command at the same time finds the first one's."""
    make_folder(path.parent)
    try:
        with locked(path.with_suffix(".lock")):
            yield
    except InsecurePath as error:  # a link or a file of another user
        raise UsageError(f"{error.filename} {error.strerror}", "remove it") from error


def _spawn(
    path: Path, arguments: Sequence[str], idle_exit_s: float, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    if not any(a.partition("=")[0] == "--idle-exit" for a in arguments):
        arguments = [*arguments, "--idle-exit", str(idle_exit_s)]
    command = [sys.executable, "-P", "-c", "from cacheblend_cli.cli.main import main; main()", *arguments]
    log = open_file(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    with os.fdopen(log, "wb", 0) as stream:
        if stdin != subprocess.DEVNULL:
            stream.write(f"{_LEFT}\n".encode())
        return subprocess.Popen(
            command, stdin=stdin, stdout=stream, stderr=stream, start_new_session=True, close_fds=True
        )


def _started(path: Path, process: subprocess.Popen[bytes] | None) -> dict[str, Any]:
    """Wait until the engine responds and return its status. process: None if another one started it."""
    log, deadline = path.with_suffix(".log"), time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if (reply := ask_status(path)) is not None:
            return reply
        code = process.poll() if process is not None else None if Connection.is_open(path) else ExitCode.INTERNAL
        if code is not None:
            error = _failure(_lines(log), log)
            with suppress(ValueError):  # killed by a signal
                error.exit_code = ExitCode(code)
            raise error
        time.sleep(_POLL_S)
    if process is not None:
        process.terminate()
    raise CacheBlendError(f"the engine did not answer within {_START_S:.0f} seconds", f"see {log}")


def _lines(log: Path) -> list[str]:
    with suppress(OSError):
        return read_bytes(log, _LOG_BYTES).decode(errors="replace").strip().splitlines()
    return []


def _failure(log_lines: Sequence[str], log: Path) -> CacheBlendError:
    """Return the error in the log of an engine that has ended."""
    reply = dict(line.partition(": ")[::2] for line in reversed(log_lines))  # the first line of each kind
    return CacheBlendError(reply.get("error", "the engine exited during start-up"), reply.get("hint", f"see {log}"))


def ask_status(path: Path, timeout_s: float = _REPLY_S) -> dict[str, Any] | None:
    """Return the status of the engine at a socket, None if none responds in time."""
    connection = Connection.to(path, timeout_s)
    if connection is None:
        return None
    with connection:
        try:
            return {k: v for k, v in next(connection.request("status")).items() if k not in ("event", "end")}
        except CacheBlendError:
            return None


def end_own(settings: Settings, grace_s: float) -> None:
    """End the engine with these settings if a command started it: an explicit server takes its place."""
    if (reply := ask_status(socket_of(settings))) is not None and is_own(reply):
        _stop(reply, grace_s)


def end_idle(settings: Settings) -> None:
    """End this user's idle engines that commands started, over all stores, except the one with these settings."""
    for path in registered_engines():
        reply = None if path == socket_of(settings) else ask_status(path, _IDLE_REPLY_S)
        if reply is not None and is_own(reply) and not reply["running"] + reply["waiting"]:
            with suppress(CacheBlendError):
                _stop(reply, 0.0)


def running(settings: Settings) -> list[dict[str, Any]]:
    """Return the status of every engine over the store. Raises NotFoundError if none runs."""
    found = [reply for path in sockets_of(settings) if (reply := ask_status(path)) is not None]
    if not found:
        raise NotFoundError(f"no engine runs over {settings.store_path}", "start one: cacheblend serve --background")
    return found


def stop_all(settings: Settings, grace_s: float) -> list[int]:
    """Stop every engine over the store and wait until its process has exited. Return the process ids. grace_s: time for
    running answers to finish. Raises NotFoundError if none runs, CacheBlendError if a process does not exit within
    grace_s plus a margin."""
    return [_stop(reply, grace_s) for reply in running(settings)]


def _stop(status: dict[str, Any], grace_s: float) -> int:
    """Stop the engine with this status and wait until its process has exited. Return the process id."""
    pid, deadline = status["pid"], time.monotonic() + grace_s + _END_S
    connection = Connection.to(Path(status["socket"]), _REPLY_S)
    if connection is not None:
        with connection, suppress(CacheBlendError):  # it may exit without a reply
            list(connection.request("stop"))
    while _is_alive(pid):
        if time.monotonic() >= deadline:
            raise CacheBlendError(
                f"the engine with process id {pid} has not exited within {grace_s + _END_S:.0f} seconds",
                f"wait for it, or kill it: kill -9 {pid}",
            )
        time.sleep(_POLL_S)
    return int(pid)


def _is_alive(pid: int) -> bool:
    """Return whether the process still runs. Reaps a child of this process; a zombie counts as exited."""
    try:
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return False
    except ChildProcessError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with suppress(OSError):  # a system without /proc
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    return True
