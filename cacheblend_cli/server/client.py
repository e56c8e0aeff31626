"""The other end of an engine's socket: what a warm `ask` uses. Imports neither torch nor numpy."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cacheblend_cli.errors import CacheBlendError, ExitCode, PromptTooLong

_CONNECT_S = 2.0


class EngineLost(CacheBlendError):
    """The engine ended in the middle of an answer."""


class Connection:
    """One request to a running engine, and what it tells until its end. Closing it before the end cancels the request."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._file = connected, connected.makefile("rb")

    @classmethod
    def to(cls, path: Path, timeout_s: float | None = None) -> Connection | None:
        """Connect. None where no engine of this user listens, as behind a stale socket. timeout_s: for each read, None for no
        limit."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.settimeout(_CONNECT_S)
        try:
            if os.lstat(path).st_uid != os.getuid():
                raise OSError("somebody else's socket")
            connected.connect(os.fspath(path))
        except OSError:
            connected.close()
            return None
        connected.settimeout(timeout_s)
        return cls(connected)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._file.close()
            self._socket.close()

    def request(self, what: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Send it now; events until the one that says "end". They raise what the engine failed of, and EngineLost."""
        try:
            self._socket.sendall(json.dumps(what).encode() + b"\n")
        except OSError as error:
            raise lost() from error
        return self._events()

    def _events(self) -> Iterator[dict[str, Any]]:
        try:
            for line in self._file:
                event = json.loads(line)
                if event["event"] == "failed":
                    raise failure(event)
                yield event
                if event.get("end"):
                    return
        except (OSError, ValueError) as error:
            raise lost() from error
        raise lost()


def lost() -> EngineLost:
    return EngineLost(
        "the engine ended before the answer did", "ask again; without an engine the question is answered here"
    )


def failure(event: dict[str, Any]) -> CacheBlendError:
    """The error that the engine tells of."""
    kind = PromptTooLong if event.get("kind") == PromptTooLong.__name__ else CacheBlendError
    error = kind(event["message"], event["hint"])
    error.exit_code = ExitCode(event["exit_code"])
    return error


def named(value: Any) -> Any:
    """Dicts as objects with attributes, as the engine's own are."""
    if isinstance(value, dict):
        return SimpleNamespace(**{key: named(item) for key, item in value.items()})
    return [named(item) for item in value] if isinstance(value, list) else value
