"""Clients that send too slowly, hold connections or do not read, and the end of a server with answers in progress."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from uvicorn.server import ServerState

from cacheblend_cli.engine import async_engine
from cacheblend_cli.server import http_server
from cacheblend_cli.server.http_server import ConnectionLimits, LimitedProtocol
from cacheblend_cli.sockets import socket_of

HEAD = b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LONG = {"messages": [{"role": "user", "content": "who?"}], "max_tokens": 900, "ignore_eos": True, "stream": True}


def connect(server: Any) -> socket.socket:
    address = server.client.base_url
    connection = socket.create_connection((address.host, address.port), timeout=20)
    return connection


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def status_of(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


@pytest.fixture
def told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client has a third of the time to receive the error of a cancelled answer."""
    monkeypatch.setattr(http_server, "_ERROR_S", http_server._ERROR_S / 3)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


def test_what_is_sent_too_slowly_is_cut_off(start: Any, log: Any) -> None:
    server = start(connections=ConnectionLimits(headers_s=0.3, body_s=0.3))
    begun = (b"", b"POST /v1/sea", HEAD, HEAD + b"Content-Length: 100\r\n\r\n{")
    with ExitStack() as stack:
        kept, others = stack.enter_context(connect(server)), list[socket.socket]()
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in kept.recv(65536)
        kept.sendall(b"GET /hea")  # a second request on a kept connection
        for sent in begun:
            others.append(stack.enter_context(connect(server)))
            others[-1].sendall(sent)
        for connection, sent in zip(others, begun, strict=True):
            assert read_all(connection) == b"", sent
        assert b"HTTP/1.1" not in read_all(kept)
    assert server.client.get("/health").status_code == 200
    assert log.records == []


def test_a_server_that_was_held_up_closes_nobody() -> None:
    """What a client sent while the event loop stood still could not be read: its deadline moves by as much."""

    class Transport(asyncio.Transport):
        closed = False

        def close(self) -> None:
            self.closed = True

        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return None

    async def closed_after(seconds: float, late: float) -> bool:
        limits, config = ConnectionLimits(headers_s=10), uvicorn.Config(Starlette(), ws="none", log_config=None)
        config.load()
        protocol = LimitedProtocol(limits, config=config, server_state=ServerState(), app_state={})
        transport = Transport()
        protocol.connection_made(transport)
        protocol.check(time.monotonic() + seconds, late)
        return transport.closed

    assert asyncio.run(closed_after(11, 0))
    assert not asyncio.run(closed_after(11, 5))
    assert asyncio.run(closed_after(16, 5))


def test_connections_are_capped(start: Any) -> None:
    server = start(connections=ConnectionLimits(connections=3))
    held = [connect(server) for _ in range(2)]  # and the client's own
    with connect(server) as one_more:
        reply = read_all(one_more)
        assert (status_of(reply), b"too_many_connections" in reply) == (503, True)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(server.socket)), base_url="http://localhost") as client:
        assert client.get("/health").status_code == 200  # this machine's user is not kept out by strangers
    for connection in held:
        connection.close()
    while status_of(reply) == 503:
        with connect(server) as again:
            again.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            reply = read_all(again)
    assert status_of(reply) == 200


def test_two_lengths_are_refused(start: Any) -> None:
    """Where a proxy believes the one and the server the other, a second request hides in the body of the first."""
    with connect(start()) as connection:
        body = b"2\r\n{}\r\n0\r\n\r\n"
        head = HEAD + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(body)
        connection.sendall(head + body + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        reply = read_all(connection)
    assert status_of(reply) == 400
    assert b"ambiguous_length" in reply
    assert reply.count(b"HTTP/1.1") == 1


def test_large_bodies_share_a_budget(start: Any) -> None:
    server = start(max_body=10_000)
    held = []
    for _ in range(8):
        connection = connect(server)
        connection.sendall(HEAD + b"Content-Length: 9999\r\n\r\n" + b" " * 9990)
        held.append(connection)
    while server.state.body_bytes < 8 * 9990:
        server.client.get("/health")
    assert server.client.post("/v1/search", json={"query": "a" * 9000}).status_code == 503
    for connection in held:
        connection.close()
    while server.state.body_bytes:
        server.client.get("/health")
    assert server.client.post("/v1/search", json={"query": "a" * 9000}).status_code == 200


def test_a_server_that_stops_is_not_ready(server: Any) -> None:
    release = threading.Event()
    with server.client.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 400}) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.state.engine.service.between_steps(
            lambda: release.wait(30)
        )  # the answer ends after what is asked of the server
        server.end()
        with httpx.Client(base_url=server.client.base_url) as other:  # a connection of its own
            while (ready := other.get("/ready")).status_code != 503:
                pass
            assert ready.json()["status"] == "stopping"
            refused = other.post("/v1/chat/completions", json=LONG)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        release.set()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason": "length"' in rest[-2]


@pytest.mark.parametrize("stuck", [False, True])
def test_streams_end_with_their_error(start: Any, stuck: bool, log: Any, told_soon: None) -> None:
    """Also where the engine is in a step that does not end."""
    server = start(grace_s=0.2)
    release = threading.Event()
    try:
        with server.client.stream("POST", "/v1/chat/completions", json=LONG) as reply:
            lines = reply.iter_lines()
            next(lines)
            if stuck:
                server.state.engine.service.between_steps(lambda: release.wait(30))
            server.end()
            rest = [line for line in lines if line]
    finally:
        release.set()
    assert rest[-1] == "data: [DONE]"
    error = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "stopping")
    [told] = log.records
    assert told.levelname == "WARNING"


def test_what_waits_for_the_engine_ends_with_an_error(start: Any, log: Any, told_soon: None) -> None:
    server = start(grace_s=0.2)
    release, replies = threading.Event(), []
    server.state.engine.service.between_steps(lambda: release.wait(30))
    asking = threading.Thread(target=lambda: replies.append(server.ask()))
    asking.start()
    while not server.state.active:
        server.client.get("/health")
    server.end()
    asking.join(20)
    release.set()
    assert [(r.status_code, r.json()["error"]["code"]) for r in replies] == [(503, "stopping")]
    assert len(log.records) == 1


def test_a_step_that_does_not_end_is_not_ready(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.client.get("/ready").json() == {"status": "ready"}
    monkeypatch.setattr(async_engine, "STUCK_S", 0.05)
    release = threading.Event()
    done = server.state.engine.service.between_steps(lambda: release.wait(30))
    while (reply := server.client.get("/ready")).status_code != 503:
        pass
    assert reply.json() == {"status": "stuck"}
    release.set()
    done.result(30)
    while server.client.get("/ready").status_code != 200:
        pass


def test_a_client_that_does_not_read_is_cut_off(start: Any, log: Any) -> None:
    server = start(grace_s=0.2)
    body = json.dumps({**LONG, "n": 8, "logprobs": True, "top_logprobs": 20}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect((server.client.base_url.host, server.client.base_url.port))
        head = HEAD.replace(b"/v1/search", b"/v1/chat/completions") + b"Content-Length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        other = {
            **LONG,
            "max_tokens": 60,
            "stream": False,
        }  # side by side: the eight have about as many tokens each when it ends
        assert server.client.post("/v1/chat/completions", json=other).status_code == 200
        server.end()
        server.thread.join(20)
        assert not server.thread.is_alive()
    assert [record.levelname for record in log.records if record.name == "cacheblend"] == ["WARNING"]
    assert not any(record.exc_info for record in log.records)  # uvicorn may say that it cut the connection


def test_nonsense_on_the_command_lines_socket_is_not_logged(server: Any, log: Any) -> None:
    for body in (b"[" * 100_000, b"nonsense", b"{}", b"[]"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(socket_of(server.state.settings)))
            connection.sendall(b"POST /engine/ask HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert read_all(connection).startswith(b"HTTP/1.1 ")
    assert log.records == []
