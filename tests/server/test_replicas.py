"""Replicas behind a proxy: the session's header, and configs/haproxy.cfg with two servers where HAProxy is
installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

HEADER = "X-Session-ID"
CONFIG = Path(__file__).parents[2] / "configs" / "haproxy.cfg"
PAGES = [[{"text": f"page {i}: the lead of billing is Mara"}] for i in range(6)]


def test_a_reply_names_its_session_by_the_first_document(server: Any) -> None:
    first = server.ask(documents=PAGES[0]).headers[HEADER]
    assert server.ask(documents=PAGES[0] + PAGES[1]).headers[HEADER] == first
    assert server.ask(documents=PAGES[1]).headers[HEADER] != first
    assert server.ask(documents=PAGES[0], stream=True).headers[HEADER] == first
    assert HEADER not in server.ask().headers  # no chunk


def test_a_session_that_the_client_names_stays(server: Any) -> None:
    def session(name: str) -> str:
        body = {"prompt": "who leads billing?", "documents": PAGES[0], "max_tokens": 1}
        return str(server.client.post("/v1/completions", json=body, headers={HEADER: name}).headers[HEADER])

    own = session("")
    assert session("user-7") == "user-7"
    assert session("x" * 1000) == own


def test_the_pools_usage_is_a_ratio(server: Any) -> None:
    server.ask()
    [line] = [
        line for line in server.state.metrics.text().decode().splitlines() if line.startswith("cacheblend_pool_usage")
    ]
    name, value = line.split()
    assert name == "cacheblend_pool_usage_ratio"
    assert 0 <= float(value) <= 1


@pytest.fixture
def proxy(start: Any, tmp_path: Path) -> Iterator[tuple[httpx.Client, list[Any]]]:
    """A client of HAProxy in front of two servers with stores of their own."""
    program = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("haproxy is not installed")
    replicas = [start(grace_s=0), start(grace_s=0)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    servers = {
        f"CACHEBLEND_REPLICA_{n}": r.client.base_url.netloc.decode() for n, r in zip("AB", replicas, strict=True)
    }
    process = subprocess.Popen([program, "-f", str(CONFIG)], env={"CACHEBLEND_PROXY": address} | servers)
    client = httpx.Client(base_url=f"http://{address}", timeout=30, transport=httpx.HTTPTransport(retries=8))
    try:
        assert client.get("/ready").status_code == 200
        yield client, replicas
    finally:
        client.close()
        process.terminate()
        process.wait(20)


def test_a_session_stays_with_its_replica_and_moves_when_that_ends(proxy: tuple[httpx.Client, list[Any]]) -> None:
    client, replicas = proxy

    def ask(number: int, session: str | None = None) -> tuple[int, str]:
        """Which replica answered, and the session's name."""
        before = [r.state.engine.service.stats().finished for r in replicas]
        body = {"messages": [{"role": "user", "content": "who?"}], "documents": PAGES[number], "max_tokens": 2}
        reply = client.post("/v1/chat/completions", json=body, headers={HEADER: session} if session else {})
        assert reply.status_code == 200
        after = [r.state.engine.service.stats().finished for r in replicas]
        [served] = [i for i in (0, 1) if after[i] > before[i]]
        return served, reply.headers[HEADER]

    sessions = [ask(number)[1] for number in range(len(PAGES))]
    homes = [ask(number, session)[0] for number, session in enumerate(sessions)]
    assert {0, 1} == set(homes)
    assert homes == [ask(number, session)[0] for number, session in enumerate(sessions)]
    replicas[0].end()
    replicas[0].thread.join(20)
    assert [1] * len(PAGES) == [ask(number, session)[0] for number, session in enumerate(sessions)]
