"""Fixtures: a server in this process, on a free port and a socket, over a store and a random model of its own."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn.server
from cacheblend_store import ChunkStore
from cacheblend_store.tier import SharedTier
from checkpoints import write_checkpoint
from command_line import Cli, cli_in

from cacheblend_cli.cli.main import run as run_command
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.events import Limits
from cacheblend_cli.server import background
from cacheblend_cli.server.app import make_app
from cacheblend_cli.server.auth import LOOPBACK
from cacheblend_cli.server.binding import bind_tcp, bind_unix
from cacheblend_cli.server.http_server import ConnectionLimits
from cacheblend_cli.server.http_server import Server as HttpServer
from cacheblend_cli.server.server_state import ServerState
from cacheblend_cli.server.tenants import Keyring
from cacheblend_cli.server.warm_socket import WarmSocket
from cacheblend_cli.settings import DEFAULTS, Settings
from cacheblend_cli.sockets import SocketFile, make_folder, socket_of
from cacheblend_cli.types import SamplingParams, overridden

# uvicorn looks every .1 s whether it is to end and whether connections have closed: three looks for each server that
# ends
uvicorn.server.asyncio = SimpleNamespace(  # type: ignore[attr-defined]
    **{**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(min(seconds, 0.005))}
)
KEYS = ("plain-key-0000", "ada:ada-key-000000", "bob:bob-key-000000")


@dataclass
class Server:
    """url: of /v1. client: at the server's root, without a key."""

    url: str
    socket: Path
    state: ServerState
    client: httpx.Client
    end: Callable[[], None]
    thread: threading.Thread

    def ask(self, key: str = "", **body: Any) -> httpx.Response:
        body.setdefault("messages", [{"role": "user", "content": "who works in Bergen?"}])
        body.setdefault("max_tokens", 4)
        return self.client.post("/v1/chat/completions", json=body, headers=bearer(key))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "tiny"
    write_checkpoint(path, "qwen2", max_position_embeddings=1024)
    return path


@pytest.fixture(scope="session")
def engine(model: Path) -> Engine:
    return Engine.load(EngineConfig(model=str(model), threads=1))


StartServer = Callable[..., Server]


@contextmanager
def servers(engine: Engine, model: Path, folder: Path) -> Iterator[StartServer]:
    """A function that starts servers over stores in the folder; they end with the `with`."""
    running: list[tuple[Any, ...]] = []

    def run(
        keys: tuple[str, ...] = (),
        limits: Limits | None = None,
        *,
        idle_exit_s: float = 0,
        grace_s: float = 5,
        connections: ConnectionLimits | None = None,
        tier: SharedTier | None = None,
        retrieve: bool = False,
        yields_memory: bool = False,
        **of_host: Any,
    ) -> Server:
        number = len(running)
        store = ChunkStore.open(folder / f"store{number}", mode="write")
        if tier is not None:
            store.share(tier)
        settings = Settings(
            model=str(model),
            store=str(store.path),
            chunk_tokens=40,
            max_tokens=8,
            search="words",
            threads=1,
            retrieve=retrieve,
        )
        own = Engine(engine.runtime, overridden(DEFAULTS, {"chunk_tokens": 40}))
        own.use(store, limits or Limits())
        keyring, sampling = Keyring(keys, ""), SamplingParams(max_tokens=8)
        names = LOOPBACK if keyring.is_open else None
        state = ServerState(own, store, settings, sampling, keyring, names, **of_host)
        tcp, warm_path, unix = bind_tcp("127.0.0.1", 0), socket_of(settings), folder / f"http{number}.sock"
        make_folder(warm_path.parent)
        url = f"http://127.0.0.1:{tcp.getsockname()[1]}"
        serving = HttpServer(
            make_app(state),
            state,
            WarmSocket(state, bind_unix(warm_path), SocketFile(warm_path, store.path), url),
            grace_s=grace_s,
            idle_exit_s=idle_exit_s,
            yields_memory=yields_memory,
            limits=connections,
        )
        loop = asyncio.new_event_loop()
        sockets: list[socket.socket] = [tcp, bind_unix(unix)]
        thread = threading.Thread(target=lambda: loop.run_until_complete(serving.serve(sockets)), daemon=True)
        thread.start()
        client = httpx.Client(base_url=url, timeout=30, transport=httpx.HTTPTransport(retries=20))
        assert client.get("/health").status_code == 200
        running.append((lambda: loop.call_soon_threadsafe(serving.end), thread, loop, state, store, client))
        return Server(f"{url}/v1", unix, state, client, running[-1][0], thread)

    yield run
    for end, thread, loop, state, store, client in running:
        client.close()
        with suppress(RuntimeError):  # it has ended by itself
            end()
        thread.join(20)
        state.pools.close(2)
        state.engine.close()
        store.close()
        assert not thread.is_alive()
        loop.close()


@pytest.fixture
def start(engine: Engine, model: Path, tmp_path: Path) -> Iterator[StartServer]:
    with servers(engine, model, tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def shared(engine: Engine, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a module's tests of requests that are refused."""
    with servers(engine, model, tmp_path_factory.mktemp("shared")) as start:
        yield start()


@pytest.fixture
def server(start: StartServer) -> Server:
    return start()


@pytest.fixture
def cli(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return cli_in(tmp_path, model, monkeypatch, capsys)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in the background are forks of this process, which has imported torch."""
    monkeypatch.setattr(background, "subprocess", SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL))


class Forked:
    def __init__(self, command: list[str], *, stdin: int, stdout: Any, **_: Any) -> None:
        self.pid, self.returncode = os.fork(), 0
        if self.pid == 0:
            code = 1
            gc.freeze()  # what this process has left, such as event loops, would close files that are new here
            try:
                os.setsid()
                null = os.open(os.devnull, os.O_RDONLY) if stdin == subprocess.DEVNULL else stdin
                for number, end in enumerate(("r", "w", "w")):
                    os.dup2(stdout.fileno() if number else null, number)
                    setattr(sys, ("stdin", "stdout", "stderr")[number], os.fdopen(number, end))
                logging.getLogger().handlers.clear()  # pytest's, whose files are closed now
                os.closerange(3, 1024)
                code = run_command(command[4:])
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode if pid else None
