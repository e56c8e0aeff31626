"""Engines of this user: listed and stopped by `ps` and `stop`, and what becomes of one whose store goes away."""

from __future__ import annotations

import errno
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_line import ASK, ROOT, Cli

from cacheblend_cli import registry, sockets
from cacheblend_cli.client import Connection, EngineLost
from cacheblend_cli.server import background
from cacheblend_cli.server.background import RunningEngine, ask_status, start_own
from cacheblend_cli.server.binding import bind_unix
from cacheblend_cli.settings import resolve
from cacheblend_cli.types import AskRequest
from cacheblend_cli.version import __version__

ENGINE = f"process {os.getpid()}"  # in the summary of what this process's engine answered
RECORDS = Path("cacheblend-" + str(os.getuid())) / "engines"


def started() -> int:
    """Start the engine of the settings and return its process id."""
    return int(background.start(resolve({}).settings, 3600, ["serve", "--port", "0"])["pid"])


def listed(cli: Cli) -> dict[int, dict[str, Any]]:
    """Return the records of `ps` by process id."""
    return {record["pid"]: record for record in cli("ps", "--json").records}


def test_engines_over_two_stores(cli: Cli, forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("ps").out == cli("ps", "--json").out == ""
    first = started()
    here = os.environ["CACHEBLEND_STORE"]
    monkeypatch.setenv("CACHEBLEND_STORE", "other")
    monkeypatch.setenv("CACHEBLEND_SYSTEM", "Be kind.")
    second = started()
    found = listed(cli)
    assert {pid: Path(found[pid]["store"]).name for pid in (first, second)} == {first: "store0", second: "other"}
    facts = found[second]
    assert (facts["state"], facts["idle_exit_s"], facts["own"]) == ("idle", 3600, False)
    assert facts["memory_bytes"] > 1 << 20
    table = cli("ps").out.splitlines()
    assert [line.split()[0] for line in table[1:]] == [str(first), str(second)]
    assert cli("stop").out.split() == ["stopped", "tiny", "over", "other", "(process", f"{second})"]
    nothing = cli("stop")
    assert (nothing.code, nothing.out, "stop --all" in nothing.err) == (0, "", True)
    assert cli("serve", "--stop").code == 3  # of a script that wants to know
    assert list(listed(cli)) == [first]
    [stopped] = cli("stop", "--all", "--json").records
    assert stopped == {"pid": first, "model": "tiny", "store": os.path.realpath(here), "stopped": True}
    assert (cli("ps").out, cli("stop", "--all").code) == ("", 0)
    assert list((Path(os.environ["XDG_RUNTIME_DIR"]) / RECORDS).iterdir()) == []


def test_an_engine_that_a_question_started_says_so(cli: Cli, forked: None) -> None:
    start_own(resolve({}).settings, 90, [])
    [facts] = listed(cli).values()
    assert (facts["own"], facts["idle_exit_s"]) == (True, 90)
    assert cli("stop").code == 0


def test_an_engine_outlives_the_terminal_it_was_started_in(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(str(ROOT / part) for part in ("", "documents", "store", "kernels"))
    )
    code = "from cacheblend_cli.cli.main import main; main()"
    shell, terminal = pty.fork()
    if shell == 0:
        line = '"$0" -c "$1" serve --background --port 0; echo "code $?."; sleep 60'
        os.execvp("sh", ["sh", "-c", line, sys.executable, code])
    shown = b""
    while b"code " not in shown or not shown.rstrip().endswith(b"."):
        shown += os.read(terminal, 1024)
    assert b"code 0." in shown, shown
    os.close(terminal)  # hangs up
    assert os.waitstatus_to_exitcode(os.waitpid(shell, 0)[1]) == -signal.SIGHUP
    [facts] = listed(cli).values()
    assert facts["state"] == "idle"
    assert cli("stop").code == 0


@pytest.mark.parametrize("what", ["moved", "removed", "replaced", "moved and replaced"])
def test_a_store_that_goes_away_ends_its_engine(cli: Cli, forked: None, what: str) -> None:
    """And nothing is answered from the store that is at its path now."""
    pid, store = started(), Path("store0")
    Path("new").mkdir()
    Path("new/page.md").write_text("the lead of billing is Otto and he works in Oslo\n")
    assert cli("precompute", "new", "-q", "--store", "other").code == 0
    if what == "removed" or what == "replaced":
        shutil.rmtree(store)
    else:
        store.rename("moved")
    if "replaced" in what:
        Path("other").rename(store)
    os.waitpid(pid, 0)
    assert listed(cli) == {}
    asked = {"moved": "moved", "moved and replaced": "moved"}.get(what, "store0")
    answer = cli(*ASK, "--json", "--store", asked)
    sources = {chunk["source"] for chunk in answer.records[0]["chunks"]} if answer.code == 0 else None
    expected = {"removed": None, "replaced": {"new/page.md"}}.get(what, {"docs/0.md", "docs/1.md"})
    assert sources == expected, answer.err


def test_a_moved_socket(cli: Cli, server: Any) -> None:
    """It moved with its store, and answers nothing. The server goes on for the clients of its address."""
    store, path = Path(server.state.store.path), sockets.socket_of(server.state.settings)
    if path.parent.resolve() != store.resolve():
        pytest.skip("the path of the store is too long for a socket")
    question = AskRequest.of(resolve({}), "who leads billing?").wire
    store.rename("moved")
    moved = Path("moved").absolute() / path.name
    for route in ("ask", "plan", "search"):
        connection = Connection.to(moved)
        assert connection is not None
        with connection, pytest.raises(EngineLost):
            list(connection.request(route, question))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(moved)), base_url="http://localhost") as client:
        assert client.post("/v1/search", json={"query": "billing"}).status_code == 503
    assert ask_status(moved) is not None
    Path("moved").rename(store)
    assert ENGINE in cli(*ASK).last


@pytest.fixture
def registered(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is registered as the engine of the settings."""
    settings = resolve({}).settings
    with subprocess.Popen(["sleep", "60"]) as child, monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: child.pid)
        registry.register(sockets.socket_of(settings), settings)
        patch.undo()
        yield child
        child.kill()


def test_an_engine_that_loads_is_listed_and_stopped(cli: Cli, registered: subprocess.Popen[bytes]) -> None:
    path = sockets.socket_of(resolve({}).settings)
    log = path.with_suffix(".log")
    sockets.make_folder(path.parent)
    with bind_unix(path):
        facts = listed(cli)[registered.pid]
        assert (facts["state"], facts["model"], Path(facts["store"]).name) == ("loading", "tiny", "store0")
        assert cli("search", "billing").code == 0  # does not wait for it
        log.touch()
        assert cli("stop").code == 0
    assert registered.poll() is not None
    assert [path.exists(), log.exists()] == [False, False]
    assert listed(cli) == {}


def test_a_process_that_took_an_engines_id_is_left_alone(cli: Cli, registered: subprocess.Popen[bytes]) -> None:
    [file] = (Path(os.environ["XDG_RUNTIME_DIR"]) / RECORDS).iterdir()
    record = json.loads(file.read_bytes())
    file.write_text(json.dumps({**record, "process": f"{record['process']}1"}))
    assert cli("stop", "--all").code == 0
    assert registered.poll() is None
    assert not file.exists()


def test_an_engine_that_has_not_registered_itself_yet_is_stopped(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `stop` right after the question that left it."""
    spawn = subprocess.Popen
    monkeypatch.setattr(background.subprocess, "Popen", lambda command, **named: spawn(["sleep", "60"], **named))
    settings = resolve({}).settings
    process = background.spawn_own(settings, 60.0, [])
    assert process is not None
    try:
        assert listed(cli)[process.pid]["state"] == "loading"
        assert cli("stop", "--all", "--store", "other").code == 0
        assert process.poll() is not None
        assert listed(cli) == {}
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "content",
    ['{"pid": 2000000000, "process": "", "socket": "/s", "store": "/s", "model": "m", "version": "1"}', "[" * 60_000],
)
def test_a_damaged_file_of_the_registry_is_no_engine(cli: Cli, content: str) -> None:
    folder = Path(os.environ["XDG_RUNTIME_DIR"]) / RECORDS
    sockets.make_folder(folder)
    (folder / "1.json").write_text(content)
    assert listed(cli) == {}
    assert cli("stop", "--all").code == 0


def test_a_disk_without_room_for_an_engines_files(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(background, "locked", full)
    refused, folder = cli("serve", "--background", "--port", "0"), sockets.folder_of(resolve({}).settings)
    assert (refused.code, "No space" in refused.err, str(folder) in refused.err) == (2, True, True)


def test_an_engine_of_another_version_is_named(cli: Cli, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket has another name, and the same routes to see and stop it."""
    path = sockets.socket_of(server.state.settings)
    path.rename(path.with_name("engine-0123456789ab.sock"))
    monkeypatch.setattr("cacheblend_cli.server.warm_socket.__version__", "0.0.1")
    assert ENGINE not in cli(*ASK).last
    assert "version 0.0.1" in cli("ps").out


STATUS = {
    "pid": 7,
    "model": "m",
    "store": "/s",
    "memory_bytes": 1 << 20,
    "version": __version__,
    "running": 0,
    "waiting": 0,
}


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ({"idle_s": 42, "idle_exit_s": 300}, ("idle 42 s", "in 4.3 min")),
        ({"idle_s": 42, "idle_exit_s": 0}, ("idle 42 s", "stopped")),
        ({"idle_s": 0, "idle_exit_s": 300, "running": 2, "waiting": 1}, ("answering 3", "in 5.0 min")),
        ({"idle_s": 9, "idle_exit_s": 9, "computing": True, "missing": 31}, ("computing, 31 chunks left",)),
        ({"idle_s": 9, "version": "0.2.15.dev"}, ("idle 9.0 s, version 0.2.15.dev: not used",)),
        (None, ("not responding",)),
    ],
)
def test_what_an_engine_does(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, status: dict[str, Any] | None, shown: tuple[str, ...]
) -> None:
    engine = RunningEngine(Path("/s/x.sock"), None, status and STATUS | status, True)
    monkeypatch.setattr("cacheblend_cli.cli.engine_list.engines", lambda settings, everywhere: [engine])
    row = cli("ps").out.splitlines()[1]
    assert all(text in row for text in shown), row


@pytest.mark.parametrize("broken", ["a file", "a link", "unreadable"])
def test_where_no_engine_can_register(
    cli: Cli, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Those beside the store are still found."""
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
    own, target = run / f"cacheblend-{os.getuid()}", tmp_path / "target"
    target.mkdir()
    if broken == "unreadable":
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(run / ("x" * 300)))  # its stat is an error, also for root
    else:
        own.write_text("") if broken == "a file" else own.symlink_to(target)
    registry.register(sockets.socket_of(server.state.settings), server.state.settings)()
    assert list(listed(cli)) == [os.getpid()]
    assert list(target.iterdir()) == []
