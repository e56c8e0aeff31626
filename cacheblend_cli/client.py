"""HTTP client of a running engine, over the Unix socket beside its store. Imports neither torch nor numpy."""

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
_DATA = b"data: "


class EngineLost(CacheBlendError):
    """The engine ended in the middle of an answer."""


class Connection:
    """One request to a running engine, and the events of its reply. Closing it before the end cancels the request."""

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

    def request(self, what: str, body: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Send a request now: POST /engine/`what`. Returns the events of its reply up to the last one; reading them raises the
        error that the engine reports, and EngineLost."""
        payload = json.dumps(body or {}).encode()
        head = (
            f"POST /engine/{what} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        try:
            self._socket.sendall(head.encode() + payload)
        except OSError as error:
            raise lost() from error
        return self._events()

    def _events(self) -> Iterator[dict[str, Any]]:
        """The reply to an HTTP/1.0 request ends with the connection. (http.client takes as long to import as a warm answer does.)"""
        try:
            if b" 200 " in self._file.readline():
                for line in self._file:
                    if not line.startswith(_DATA):
                        continue
                    event = json.loads(line.removeprefix(_DATA))
                    if event["event"] == "failed":
                        raise failure(event)
                    yield event
                    if event.get("end"):
                        return
        except (OSError, ValueError, KeyError) as error:
            raise lost() from error
        raise lost()


def lost() -> EngineLost:
    return EngineLost("the engine ended before the answer did", "ask again, or with --local")


def failure(event: dict[str, Any]) -> CacheBlendError:
    """The error that the engine reports."""
    kind = PromptTooLong if event.get("kind") == PromptTooLong.__name__ else CacheBlendError
    error = kind(event["message"], event["hint"])
    error.exit_code = ExitCode(event["exit_code"])
    return error


def named(value: Any) -> Any:
    """JSON objects as objects with attributes."""
    if isinstance(value, dict):
        return SimpleNamespace(**{key: named(item) for key, item in value.items()})
    return [named(item) for item in value] if isinstance(value, list) else value
