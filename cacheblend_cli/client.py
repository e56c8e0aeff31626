"""Client of a running engine: HTTP over the Unix socket next to its store. Imports neither torch nor numpy."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_store.conversion import convert

from cacheblend_cli.errors import CacheBlendError, ExitCode, NotFoundError, PromptTooLong, UsageError
from cacheblend_cli.settings import DEFAULTS, Resolved, Settings
from cacheblend_cli.settings.identity import left_engine_settings
from cacheblend_cli.sockets import PROTOCOL, socket_of
from cacheblend_cli.types import (
    EVENTS,
    Answer,
    AnswerEvent,
    AskPlan,
    AskRequest,
    CompletedAnswer,
    Piece,
    SearchParams,
    ask_request,
    overridden,
)

if TYPE_CHECKING:
    from cacheblend_cli.corpus.search import SearchResult

SETTINGS = "engine_settings"
"""Field of /engine/ask and /engine/plan: `left_engine_settings` of the client, or null."""
_CONNECT_S = 2.0
_VERSION_S = 0.5  # for the protocol version: an engine that is loading does not reply
_DATA = b"data: "


class EngineLost(CacheBlendError):
    """The engine ended in the middle of an answer, or was left by a command with other settings."""


class Connection:
    """One request to a running engine and the events of its reply. Closing it early cancels the request."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._file = connected, connected.makefile("rb")

    @classmethod
    def to(cls, path: Path, timeout_s: float | None = None) -> Connection | None:
        """Connect. Return None if no engine of this user listens, as with a stale socket or a link to one of others.

        timeout_s: for each read, None for no limit.
        """
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.settimeout(_CONNECT_S)
        try:
            info = os.lstat(path)
            if info.st_uid != os.geteuid() or not stat.S_ISSOCK(info.st_mode):
                raise OSError("not a socket of this user")
            connected.connect(os.fspath(path))
            if hasattr(socket, "SO_PEERCRED") and _peer_of(connected) != os.geteuid():
                raise OSError("another user listens")
        except OSError:
            connected.close()
            return None
        connected.settimeout(timeout_s)
        return cls(connected)

    @classmethod
    def is_open(cls, path: Path) -> bool:
        """Return whether an engine of this user listens."""
        if (connection := cls.to(path)) is None:
            return False
        with connection:
            return True

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._file.close()
            self._socket.close()

    def request(self, what: str, body: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Send a request immediately: POST /engine/`what`. Return the events of its reply.

        Reading the events raises errors reported by the engine, and EngineLost.
        """
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
        """Yield the events of an HTTP/1.0 reply, which ends with the connection.

        Does not use http.client, because importing it takes as long as a warm answer.
        """
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


def _peer_of(connected: socket.socket) -> int:
    """Return the user id of the process that listens at the other end. Linux only."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


class Client:
    """Client of a running engine (`cacheblend serve`) of this user, over one store, with one model.

    Thread-safe: each call opens its own connection. Raises the engine's errors, and EngineLost if it ends before the
    answer.
    """

    def __init__(self, path: Path, resolved: Resolved = DEFAULTS, settings: str | None = None) -> None:
        """path: socket of the engine. resolved: settings for requests. settings: `left_engine_settings` of questions;
        None for any."""
        self._path, self._resolved, self._settings = path, resolved, settings

    @classmethod
    def connect(cls, **settings: Any) -> Client:
        """Find the engine with these settings (store, model, ...; see `cacheblend config show`).

        Raises NotFoundError if none is running.
        """
        resolved = overridden(DEFAULTS, settings)
        if (found := cls.of(resolved.settings)) is None:
            raise NotFoundError(
                "no engine runs over this store with this model and settings",
                "start one: cacheblend serve --background",
            )
        return cls(found._path, resolved)

    @classmethod
    def of(cls, settings: Settings) -> Client | None:
        """Return a client of the engine with this store, model and settings, None if none is running."""
        path = socket_of(settings)
        return cls(path, settings=left_engine_settings(settings)) if Connection.is_open(path) else None

    def request(self, question: str, *, chunks: Sequence[str] = (), **about: Any) -> AskRequest:
        """Build a request. chunks: complete ids. about: documents, search, history, ..., see `Engine.request`."""
        try:
            keys = tuple(map(bytes.fromhex, chunks))
        except ValueError as error:
            raise UsageError("a chunk id is not hexadecimal", "list the ids: cacheblend chunks ls") from error
        return ask_request(self._resolved, question, keys, **about)

    def ask(self, question: str | AskRequest, **about: Any) -> Answer:
        """Return the answer. about: see `request`."""
        ask = question if isinstance(question, AskRequest) else self.request(question, **about)
        return next(event for event in self.events(ask) if isinstance(event, CompletedAnswer)).answer

    def stream(self, question: str | AskRequest, **about: Any) -> Iterator[str]:
        """Yield pieces of the answer as they are generated. Leaving the loop early cancels the request."""
        ask = question if isinstance(question, AskRequest) else self.request(question, **about)
        for event in self.events(ask):
            if isinstance(event, Piece) and not event.reasoning:
                yield event.text

    def events(self, ask: AskRequest) -> Iterator[AnswerEvent]:
        """Send a request immediately. Return its events, CompletedAnswer last. Closing the iterator cancels it."""
        connection = self._connected()
        received = connection.request("ask", {**ask.wire, SETTINGS: self._settings})

        def events() -> Iterator[AnswerEvent]:
            with connection:
                yield from (convert(event, EVENTS[event["event"]]) for event in received)

        return events()

    def plan(self, ask: AskRequest) -> tuple[AskPlan, list[str]]:
        """Return the plan of a request without running it, and the document names of its chunks."""
        with self._connected() as connection:
            [event] = connection.request("plan", {**ask.wire, SETTINGS: self._settings})
        return convert(event["plan"], AskPlan), convert(event["names"], list[str])

    def search(self, query: str, params: SearchParams) -> tuple[SearchResult, list[str], int]:
        """Return (result, messages for the user, process id of the engine)."""
        from cacheblend_cli.corpus.search import SearchResult

        with self._connected() as connection:
            [event] = connection.request("search", AskRequest(query, search=params).wire)
        return convert(event["found"], SearchResult), event["notes"], event["pid"]

    def collect(
        self,
        keys: Iterable[bytes],
        codec: str,
        salt: str = "",
        day: date | None = None,
        *,
        again: bool = False,
    ) -> Iterator[tuple[bytes, str, str]]:
        """Compute the KV of stored chunks of one collection in this order. Yield the key, the status and how it was
        computed ("computed" or "fetched") of each once it is durable. Closing the iterator cancels the rest.

        again: compute chunks that have KV, too; otherwise they are left out.
        """
        names = [key.hex() for key in keys]
        body = {"keys": names, "codec": codec, "salt": salt, "day": day and day.isoformat(), "again": again}
        with self._connected() as connection:
            for event in connection.request("collect", body):
                if event["event"] == "collected":
                    yield bytes.fromhex(event["key"]), event["status"], event["how"]

    def finish(self, salt: str = "", *, on_battery: bool = False) -> int | None:
        """Let the engine compute missing chunks while it is idle, and stay until then. Return their number, None if it
        does not compute them, as those of another salt. on_battery: also while a battery powers this machine."""
        with self._connected() as connection:
            [event] = connection.request("finish", {"salt": salt, "on_battery": on_battery})
        missing: int | None = event["missing"]
        return missing

    @property
    def speaks_this_version(self) -> bool:
        """Return whether the engine has the same protocol version, and has loaded its model."""
        with suppress(CacheBlendError), self._connected(_VERSION_S) as connection:
            [status] = connection.request("status")
            return bool(status.get("protocol") == PROTOCOL)
        return False

    def _connected(self, timeout_s: float | None = None) -> Connection:
        if (connection := Connection.to(self._path, timeout_s)) is None:
            raise lost()
        return connection


def lost() -> EngineLost:
    return EngineLost("the engine ended before the answer was complete", "ask again, or use --local")


def failure(event: dict[str, Any]) -> CacheBlendError:
    """Return the error in an engine's event."""
    kind = PromptTooLong if event.get("kind") == PromptTooLong.__name__ else CacheBlendError
    error = kind(event["message"], event["hint"])
    error.exit_code = ExitCode(event["exit_code"])
    return error
