"""A running engine and the command line: the same answers and output, without torch; whatever becomes of the engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from asking import PAGES, Cli, Said
from cacheblend_store import ChunkStore

from cacheblend_cli.server import place
from cacheblend_cli.server.background import ask_status
from cacheblend_cli.settings import Settings

ROOT = Path(__file__).parents[2]
ASK = ("ask", "who leads billing? Jonas")


def process(*arguments: str, code: str = "sys.exit(run(sys.argv[1:]))") -> Said:
    """A command in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "store", ROOT / "kernels")))}
    program = f"import sys; from cacheblend_cli.cli.main import run; {code}"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=env, capture_output=True, text=True, timeout=100
    )
    return Said(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    "flags",
    [["--ids"], ["--explain", "--verify"], ["--chunks", ""], ["--mode", "full"], ["--dry-run"], ["--logprobs", "2"]],
)
def test_the_same_answer_and_json(cli: Cli, server: Any, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert stat.S_IMODE(place.socket_of(server.host.settings).stat().st_mode) == 0o600
    for folder in (Path.cwd(), Path("docs").absolute()):
        monkeypatch.chdir(folder)
        warm, cold = cli(*ASK, "--json", *flags), cli(*ASK, "--json", "--local", *flags)
        assert (warm.code, cold.code) == (0, 0), warm.err + cold.err
        ours, theirs = json.loads(warm.out), json.loads(cold.out)
        assert [name for name in ours if name != "hot_tokens"] == list(theirs)
        for name in ("answer", "finish_reason", "prompt_tokens", "prompt_ids", "generated_ids", "notes"):
            assert ours.get(name) == theirs.get(name)
        for chunks in (ours["chunks"], theirs["chunks"]):  # what is in the engine's pool already is not computed again
            for chunk in chunks:
                chunk.pop("recomputed", None), chunk.pop("status")
        assert ours["chunks"] == theirs["chunks"]
    assert server.host.service.stats().finished == (0 if "--dry-run" in flags else 2)


def test_the_summary_says_who_answered(cli: Cli, server: Any) -> None:
    warm, cold = cli(*ASK), cli(*ASK, "--local")
    assert warm.out == cold.out
    assert f"by the engine of process {os.getpid()}" in warm.last
    assert "by the engine" not in cold.last
    assert [line for line in warm.err.splitlines() if "searching" in line] == [
        line for line in cold.err.splitlines() if "searching" in line
    ]
    other = cli(*ASK, "--system", "Be kind.", "--chunks", "")
    assert "by the engine" not in other.last  # that engine has another prompt


def test_the_same_errors(cli: Cli, server: Any) -> None:
    for flags in (
        ["--selector", "magic"],
        ["--chunks", "ffff"],
        ["--check-layer", "9", "--selector", "hkvd"],
        ["--top-p", "2"],
    ):
        warm, cold = cli(*ASK, *flags), cli(*ASK, "--local", *flags)
        assert warm.code == cold.code != 0
        assert warm.err.splitlines()[-2:] == cold.err.splitlines()[-2:]


def test_the_client_imports_nothing_heavy(cli: Cli, server: Any) -> None:
    heavy = "('torch', 'numpy', 'transformers', 'pydantic', 'rich', 'asyncio', 'http')"
    done = process(
        *ASK, code=f"code = run(sys.argv[1:]); print((code, [m for m in {heavy} if m in sys.modules]), file=sys.stderr)"
    )
    assert done.last == "(0, [])", done.err
    assert "by the engine" in done.err


def test_another_model_prompt_or_version_is_another_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(model="handbook", store=str(tmp_path / "store"))
    ours = place.socket_of(settings)
    other = {
        "model": str(tmp_path),
        "system": "Be kind.",
        "dtype": "bfloat16",
        "kv_pool_dtype": "float8_e4m3",
        "threads": 3,
    }
    same = {
        "ratio": 0.5,
        "temperature": 1.0,
        "top_k": 2,
        "salt": "x",
        "seed": 1,
        "store": str(tmp_path / "." / "store"),
    }
    assert all(place.socket_of(replace(settings, **{name: value})) != ours for name, value in other.items())
    assert all(place.socket_of(replace(settings, **{name: value})) == ours for name, value in same.items())
    monkeypatch.setattr(place, "__version__", "99")
    assert place.socket_of(settings) != ours


def test_a_long_path_has_its_socket_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(model="handbook", store=str(tmp_path / ("deep" * 30) / "store"))
    for base in ("/run/user/7", str(tmp_path / ("deep" * 30))):
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        path = place.socket_of(settings)
        assert len(os.fsencode(path)) < 107
        assert path.parent not in (settings.store_path, Path(base))
    place.make_folder(tmp_path / "own" / "folder")
    assert stat.S_IMODE((tmp_path / "own" / "folder").stat().st_mode) == 0o700


def test_a_client_that_leaves_ends_its_answer(cli: Cli, server: Any) -> None:
    from dataclasses import asdict

    from cacheblend_cli.cli.warm import Flags
    from cacheblend_cli.server.client import Connection
    from cacheblend_cli.settings import resolve

    resolved = resolve({"max_tokens": 800, "temperature": 3.0, "seed": 1})
    connection = Connection.to(place.socket_of(server.host.settings))
    assert connection is not None
    request = {"op": "ask", "question": "who?", "keys": [], "scope": None, **asdict(Flags())}
    with connection:
        next(connection.request({**request, "settings": asdict(resolved.settings), "origin": dict(resolved.origin)}))
    while not (stats := server.host.service.stats()).cancelled:
        assert not stats.finished
    assert stats.cancelled == 1


def test_an_engine_ends_when_nobody_asks(start: Any, cli: Cli) -> None:
    server = start(idle_exit_s=0.4)
    path = place.socket_of(server.host.settings)
    while path.exists():
        pass
    assert server.host.draining
    assert "by the engine" not in cli(*ASK).last


def test_an_engine_in_the_background(cli: Cli) -> None:
    started = process("serve", "--background", "--port", "0", "--json")
    assert started.code == 0, started.err
    pid = json.loads(started.out)["pid"]
    assert f"by the engine of process {pid}" in cli(*ASK).last
    assert [
        json.loads(cli(*flags).out)["pid"]
        for flags in (["serve", "--status", "--json"], ["serve", "--background", "--json"])
    ] == [pid, pid]
    taken = cli("serve", "--port", "0")
    assert (taken.code, "already" in taken.err) == (2, True)
    assert cli("serve", "--stop").code == 0
    assert cli("serve", "--status").code == cli("serve", "--stop").code == 3
    assert list(Path("store0").glob("*.sock")) == []


def test_a_killed_engine_does_not_matter(cli: Cli) -> None:
    """Killed while it computes and stores what came with a question; the next one starts over the socket it left."""
    for number in range(2):
        told = json.loads(process("serve", "--background", "--port", "0", "--json").out)
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
        while ask_status(path) is not None:
            pass
        assert path.exists()
        asked = cli(*ASK)
        assert (asked.code, "by the engine" in asked.err) == (0, False), asked.err
        assert cli("chunks", "verify").code == 0
    with ChunkStore.open("store0") as store:
        assert len(list(store.chunks())) > len(PAGES)


def test_what_cannot_be_served_is_told(cli: Cli) -> None:
    for flags, words in (
        (["--host", "0.0.0.0"], "--api-key"),
        (["--api-key", "short"], "at least 8"),
        (["--unix-socket", "/nowhere/s.sock"], "cannot listen"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--stop", "--status"], "together"),
    ):
        said = cli("serve", "--port", "0", *flags)
        assert (said.code in (2, 3), words in said.err) == (True, True), said.err
