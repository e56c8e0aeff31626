"""Engines in the background: started, asked how they are, ended. Imports neither torch nor numpy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cacheblend_cli.errors import CacheBlendError, NotFoundError
from cacheblend_cli.server.client import Connection
from cacheblend_cli.server.place import make_folder, socket_of, sockets_of
from cacheblend_cli.settings import Settings

_START_S = 300.0
_LOOK_S = 0.05


def start(settings: Settings, idle_exit_s: float) -> dict[str, Any]:
    """Run the same command without --background in a session of its own; what it tells of itself, once it answers.

    Raises CacheBlendError with what it said when it ends before.
    """
    path = socket_of(settings)
    make_folder(path.parent)
    return ask_status(path) or _started(path, path.with_suffix(".log"), idle_exit_s)


def _started(path: Path, log: Path, idle_exit_s: float) -> dict[str, Any]:
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--background", "--json")]
    if not any(a.partition("=")[0] == "--idle-exit" for a in arguments):
        arguments += ["--idle-exit", str(idle_exit_s)]
    command = [sys.executable, "-c", "from cacheblend_cli.cli.main import main; main()", *arguments]
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True, close_fds=True
        )
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if (told := ask_status(path)) is not None:
            return told
        if process.poll() is not None:
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            told = dict(line.partition(": ")[::2] for line in reversed(said))  # the first of each kind
            raise CacheBlendError(told.get("error", "it ended at once"), told.get("hint", f"see {log}"))
        time.sleep(_LOOK_S)
    process.terminate()
    raise CacheBlendError(f"the engine did not answer within {_START_S:.0f} seconds", f"see {log}")


def ask_status(path: Path) -> dict[str, Any] | None:
    """What the engine tells of itself; None when none listens, or it ends."""
    connection = Connection.to(path)
    if connection is None:
        return None
    with connection:
        try:
            return {k: v for k, v in next(connection.request({"op": "status"})).items() if k not in ("event", "end")}
        except CacheBlendError:
            return None


def running(settings: Settings) -> list[dict[str, Any]]:
    """What every engine over the store tells of itself. Raises NotFoundError when none runs."""
    found = [told for path in sockets_of(settings) if (told := ask_status(path)) is not None]
    if not found:
        raise NotFoundError(f"no engine runs over {settings.store_path}", "start one: cacheblend serve --background")
    return found


def stop_all(settings: Settings) -> list[int]:
    """End every engine over the store, and wait for it; their process ids. Raises NotFoundError when none runs."""
    ended = []
    for told in running(settings):
        connection = Connection.to(Path(told["socket"]))
        if connection is not None:
            with connection:
                list(connection.request({"op": "stop"}))
        while _is_alive(told["pid"]):
            time.sleep(_LOOK_S)
        ended.append(told["pid"])
    return ended


def _is_alive(pid: int) -> bool:
    """A child of ours that has ended is reaped."""
    try:
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return False
    except ChildProcessError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
