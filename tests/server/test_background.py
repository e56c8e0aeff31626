"""Engines in the background: started by `serve --background`, stopped, and killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from cacheblend_store import ChunkStore, StorePermission
from command_line import ASK, PAGES, Cli, process

from cacheblend_cli.cli.units import parse_size
from cacheblend_cli.server import background
from cacheblend_cli.server.background import ask_status


def test_an_engine_in_the_background(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a new store."""
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "new"))
    refused = process("serve", "--background", "--port", "0", "--model", "/nowhere")
    assert refused.code == 3
    started = process("serve", "--background", "--port", "0", "--json")
    assert started.code == 0, started.err
    pid = json.loads(started.out)["pid"]
    assert cli("precompute", "docs", "-q").code == 0
    assert f"process {pid}" in cli(*ASK).last
    assert [
        json.loads(cli(*flags).out)["pid"]
        for flags in (["serve", "--status", "--json"], ["serve", "--background", "--json"])
    ] == [pid, pid]
    taken = cli("serve", "--port", "0")
    assert taken.code == 2
    assert cli("serve", "--stop").code == 0
    assert cli("serve", "--status").code == cli("serve", "--stop").code == 3
    assert list(Path("new").glob("*.sock")) == []


def in_background(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Status of the engine that `serve --background` starts."""
    arguments = ("serve", "--background", "--port", "0", "--json")
    monkeypatch.setattr(sys, "argv", ["cacheblend", *arguments])
    started = cli(*arguments)
    assert started.code == 0, started.err
    return dict(json.loads(started.out))


def test_an_engine_over_a_read_only_store(cli: Cli, forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, access = ChunkStore.open, os.access

    def read_only(path: Path, *, mode: str, **others: Any) -> ChunkStore:
        if mode == "write":
            raise StorePermission(f"the store at {path} is read-only for this user", "use a store of your own")
        return opened(path, mode="read", **others)

    monkeypatch.setattr(ChunkStore, "open", read_only)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    url = in_background(cli, monkeypatch)["url"]
    asked = {"messages": [{"role": "user", "content": "who?"}], "documents": [{"text": "Mara leads billing."}]}
    answered = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60)
    assert [c["status"] for c in answered.json()["blend"]["chunks"]] == ["computed"]
    assert httpx.put(f"{url}/v1/documents/a", json={"text": "Mara leads billing."}, timeout=60).status_code == 503
    again = cli("serve", "--background", "--port", "1", "--json")
    assert json.loads(again.out)["url"] == url
    assert "already running" in again.err
    assert cli("serve", "--stop").code == 0


def test_stop_does_not_wait_for_a_zombie(server: Any, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has reaped it
    monkeypatch.setattr(os, "waitpid", not_ours)
    monkeypatch.setattr("cacheblend_cli.server.warm_socket.os.getpid", lambda: child.pid)
    assert cli("serve", "--stop").code == 0
    monkeypatch.undo()
    assert child.wait() == 0


def not_ours(*_: Any) -> Any:
    raise ChildProcessError


def test_stop_gives_up_on_an_engine_that_does_not_end(server: Any, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process serves and goes on after it was told to stop."""
    monkeypatch.setattr(background, "_END_S", 0.0)
    stuck = cli("serve", "--stop", "--grace", "0")
    assert (stuck.code, str(os.getpid()) in stuck.err, "kill" in stuck.err) == (1, True, True)


def test_a_killed_engine_does_not_matter(cli: Cli, forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it computes and stores what came with a question; the next one starts over the socket it left."""
    for number in range(2):
        told = in_background(cli, monkeypatch)
        address = urlsplit(told["url"])
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": "who?"}],
                "documents": [{"text": f"page {i} {number}"} for i in range(12)],
            }
        )
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall((head + body).encode())
            if number:
                connection.recv(1)  # it has answered, and stores the chunks' KV now or has done so
            os.kill(told["pid"], signal.SIGKILL)
        path = Path(told["socket"])
        assert os.waitstatus_to_exitcode(os.waitpid(told["pid"], 0)[1]) == -signal.SIGKILL
        assert ask_status(path) is None
        assert path.exists()
        assert cli("ps").out == ""
        asked = cli(*ASK)
        assert (asked.code, f"process {told['pid']}" in asked.err) == (0, False), asked.err
        assert cli("chunks", "verify").code == 0
    with ChunkStore.open("store0") as store:
        assert len(list(store.chunks())) > len(PAGES)


def test_serve_says_what_memory_it_may_grow_to(cli: Cli) -> None:
    """And stays below it."""
    program = "import sys; from cacheblend_cli.cli.main import main; main()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, "serve", "--port", "0", "--swap-space", "0.5"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stderr is not None
            lines = [next(serving.stderr) for _ in range(3)]
            said = re.fullmatch(
                r"memory: (.+) now, at most about (.+): KV takes up to (.+) as it .* 512.0 MiB more .*\n", lines[0]
            )
            assert said, lines
            now, most, pool = (parse_size(size, "") for size in said.groups())
            # swap space and room to work; the sum is said to a tenth of a GiB
            assert abs(most - (now + pool + (1 << 30))) < 0.06 * (1 << 30)
            assert lines[1].startswith("chats are answered from 2 documents; --no-retrieve for chats without")
            url = lines[2].split(" answers at ")[1].split("/v1")[0]
            for n in range(3):
                body = {"messages": [{"role": "user", "content": f"{n} who leads billing? " * 50}], "max_tokens": 4}
                assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
            status = Path(f"/proc/{serving.pid}/status").read_text()
            peak = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10
            assert now * 0.9 < peak < most
        finally:
            serving.terminate()
