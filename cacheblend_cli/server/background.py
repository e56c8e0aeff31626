"""Start, query and stop engines in the background. Imports neither torch nor numpy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_store.private_files import InsecurePath, locked, open_file, read_bytes

from cacheblend_cli.client import Connection
from cacheblend_cli.errors import CacheBlendError, ExitCode, NotFoundError, UsageError
from cacheblend_cli.model.host_memory import resident_memory
from cacheblend_cli.registry import EngineRecord, records, register
from cacheblend_cli.server.binding import bind_unix
from cacheblend_cli.settings import Settings
from cacheblend_cli.sockets import folder_of, make_folder, socket_of, sockets_of

RUNS = " answers at "
"""Text in the log of every engine that has started."""
_LEFT = "started by a command for the next ones"  # first line of the log of such an engine
_START_S = 300.0
_POLL_S = 0.05
_LOG_BYTES = 64 << 20
_REPLY_S = 10.0  # to wait for the status of a listening engine
_QUICK_S = 1.0  # the same for a list of engines, of which some may be loading
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
            process = _spawn(path, ["serve", "--unix-socket", str(path), *flags], idle_exit_s, bound.fileno())
            register(path, settings, process.pid)  # `stop` finds it before it can register itself
            return process


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
    except OSError as error:
        raise UsageError(
            f"an engine cannot start: {error.filename}: {error.strerror}", "free some space there"
        ) from error


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


@dataclass(frozen=True)
class RunningEngine:
    """An engine of this user. record: None if it could not register itself. status: None without a reply in time."""

    socket: Path
    record: EngineRecord | None
    status: dict[str, Any] | None
    listens: bool

    @classmethod
    def at(cls, path: Path, record: EngineRecord | None = None, timeout_s: float = _REPLY_S) -> RunningEngine:
        status = ask_status(path, timeout_s)
        if status is not None and record is not None and record.pid != status["pid"]:  # of a later one at this path
            return cls(path, record, None, False)
        return cls(path, record, status, status is not None or Connection.is_open(path))

    @property
    def pid(self) -> int | None:
        return self.record.pid if self.record else self.status["pid"] if self.status else None

    @property
    def is_own(self) -> bool:
        """Return whether a command started the engine for itself, on a private socket only."""
        return self.status is not None and bool(self.status["own"])

    @property
    def state(self) -> str:
        """Return "busy" or "idle"; without a reply "loading", "not responding", "ending" or "store gone"."""
        if self.status is not None:
            return "busy" if self.status["running"] + self.status["waiting"] else "idle"
        if self.record is not None and not self.listens:
            return "ending" if os.path.exists(self.record.store) else "store gone"
        with suppress(OSError):
            if time.time() - self.socket.stat().st_mtime < _START_S:
                return "loading"
        return "not responding"

    @property
    def facts(self) -> dict[str, Any]:
        """Return the status; without one, what the engine registered."""
        known = {name: getattr(self.record, name, None) for name in ("pid", "version", "model", "store")}
        memory = resident_memory(self.pid) if self.pid else None
        return {"state": self.state, **known, "socket": str(self.socket), "memory_bytes": memory, **(self.status or {})}

    def stop(self) -> None:
        """Ask the engine to end; without a reply, send SIGTERM. Raises CacheBlendError if its process is unknown."""
        if self.status is not None and (connection := Connection.to(self.socket, _QUICK_S)) is not None:
            with connection, suppress(CacheBlendError):
                list(connection.request("stop"))
                return
        if self.record is not None and self.record.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.record.pid, signal.SIGTERM)
            if self.state == "loading":  # what it leaves must not look like a start that failed
                for suffix in (".sock", ".log"):
                    self.socket.with_suffix(suffix).unlink(missing_ok=True)
        elif self.pid is None:
            raise CacheBlendError(f"the engine at {self.socket} does not respond", "try again when its model is loaded")


def engines(settings: Settings, *, everywhere: bool, timeout_s: float = _QUICK_S) -> list[RunningEngine]:
    """Return the engines over the store of the settings; everywhere: and this user's other registered ones."""
    folder = folder_of(settings)
    places: list[tuple[Path, EngineRecord | None]] = [(Path(record.socket), record) for record in records()]
    places = [(path, record) for path, record in places if everywhere or path.parent == folder]
    known = {path for path, _ in places}
    places += [(path, None) for path in sockets_of(settings) if path not in known]
    found = [RunningEngine.at(path, record, timeout_s) for path, record in places]
    return [engine for engine in found if engine.record is not None or engine.listens]


def end_own(settings: Settings, grace_s: float) -> None:
    """End the engine with these settings if a command started it: an explicit server takes its place."""
    engine = RunningEngine.at(socket_of(settings))
    if engine.is_own:
        end([engine], grace_s)


def end_idle() -> None:
    """End this user's idle engines that commands started, over all stores."""
    others = [record for record in records() if record.pid != os.getpid()]
    found = [RunningEngine.at(Path(record.socket), record, _IDLE_REPLY_S) for record in others]
    with suppress(CacheBlendError):
        end([engine for engine in found if engine.is_own and engine.state == "idle"], 0.0)


def running(settings: Settings) -> list[dict[str, Any]]:
    """Return the status of every engine over the store. Raises NotFoundError if none runs."""
    found = [e.status for e in engines(settings, everywhere=False, timeout_s=_REPLY_S) if e.status is not None]
    if not found:
        raise _nothing_runs(settings)
    return found


def stop_all(settings: Settings, grace_s: float, *, everywhere: bool = False) -> list[RunningEngine]:
    """Stop every engine over the store, or everywhere of this user. Raises NotFoundError if none runs, and errors of
    `end`."""
    if not (found := engines(settings, everywhere=everywhere)):
        raise _nothing_runs(settings)
    end(found, grace_s)
    return found


def end(found: Sequence[RunningEngine], grace_s: float) -> None:
    """Stop engines and wait until their processes have exited. grace_s: time for running answers to finish. Raises
    CacheBlendError if a process does not exit within grace_s plus a margin."""
    for engine in found:
        engine.stop()
    deadline = time.monotonic() + grace_s + _END_S
    for pid in (engine.pid for engine in found if engine.pid is not None):
        while _is_alive(pid):
            if time.monotonic() >= deadline:
                raise CacheBlendError(
                    f"the engine with process id {pid} has not exited within {grace_s + _END_S:.0f} seconds",
                    f"wait for it, or kill it: kill -9 {pid}",
                )
            time.sleep(_POLL_S)


def _nothing_runs(settings: Settings) -> NotFoundError:
    return NotFoundError(f"no engine runs over {settings.store_path}", "start one: cacheblend serve --background")


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
