"""Hundreds of connections that send nothing, too little or too slowly: others are answered meanwhile, and all of them
are closed."""

from __future__ import annotations

import resource
import socket
import time
from contextlib import ExitStack
from typing import Any

import pytest
from ledger import Ledger

from cacheblend_cli.server.http_server import ConnectionLimits

_HEAD = b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_BEGUN = {
    "idle": b"",
    "slow headers": b"POST /v1/search HTTP/1.1\r\nHost: loc",
    "slow body": _HEAD + b'Content-Length: 1000\r\n\r\n{"que',
    "slow chunks": _HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\n{",
}


@pytest.mark.torture
def test_slow_and_idle_connections_by_the_hundred(start: Any) -> None:
    """400 connections, a trickle of a byte a round on each; a question is answered between the rounds."""
    server = start(connections=ConnectionLimits(connections=500, headers_s=3, body_s=3))
    address = server.client.base_url
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answered = 0
    with ExitStack() as stack:
        slow = []
        for sent in list(_BEGUN.values()) * 100:
            slow.append(stack.enter_context(socket.create_connection((address.host, address.port), timeout=20)))
            slow[-1].sendall(sent)
        assert server.ask().status_code == 200
        left, until = list(slow), time.monotonic() + 120
        while left and time.monotonic() < until:
            for connection in list(left):
                try:
                    connection.sendall(b" ")
                    connection.setblocking(False)
                    if connection.recv(65536) == b"":
                        left.remove(connection)
                except BlockingIOError:
                    connection.settimeout(20)
                except OSError:  # closed by the server
                    left.remove(connection)
            assert server.ask().status_code == 200
            answered += 1
    assert left == []
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 200
    Ledger().add(
        "slow and idle connections",
        connections=len(slow),
        left_open=len(left),
        answered_meanwhile=answered,
        grown_mib=round(grown, 1),
    )
