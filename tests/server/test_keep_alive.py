"""Engines that `ask` and `chat` leave running for the next questions."""

from __future__ import annotations

import errno
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from command_line import ASK, Cli, CommandResult

from cacheblend_cli.cli import options
from cacheblend_cli.errors import CacheBlendError, NotFoundError
from cacheblend_cli.model import host_memory
from cacheblend_cli.registry import records
from cacheblend_cli.server import background
from cacheblend_cli.settings import Settings, resolve
from cacheblend_cli.sockets import socket_of

SERVE = ("serve", "--background", "--port", "0", "--json")
QUICK = ("ask", "who leads billing? Jonas", "--max-tokens", "2")


@pytest.fixture
def terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cli]:
    """Run commands whose stderr is a terminal, as a person does. Engines that are left end with the test."""
    for name in ("CACHEBLEND_KEEP_ALIVE", "CI", "SUDO_UID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(os, "getppid", lambda: 2)

    def call(*arguments: str, **named: Any) -> CommandResult:
        with monkeypatch.context() as patch:
            patch.setattr(sys.stderr, "isatty", lambda: True)
            return cli(*arguments, **named)

    yield call
    with suppress(NotFoundError):
        background.stop_all(resolve({}).settings, 1.0)


Spawned = list[tuple[float, list[str]]]


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> Spawned:
    """The (seconds, flags) of the engines that commands would leave running."""
    started: Spawned = []

    def spawn(settings: Settings, idle_exit_s: float, flags: list[str]) -> object:
        started.append((idle_exit_s, flags))
        return object()

    monkeypatch.setattr(background, "spawn_own", spawn)
    return started


def pid_of(answered: CommandResult) -> int:
    """Process id of the engine that answered."""
    return int(answered.err.split("by the engine of process ")[1].split()[0])


def test_the_second_question_is_answered_by_the_engine_that_the_first_one_left(terminal: Cli, forked: None) -> None:
    ids = ("--ids", "--json", "--ratio", "0.3")
    cold = terminal(*ASK, *ids)
    assert "by the engine" not in cold.err
    assert "stays loaded for 5 min" in cold.err
    warm = terminal(*ASK)  # waits while it loads
    assert pid_of(warm) != os.getpid()
    assert "stays loaded" not in warm.err
    again = terminal(*ASK, *ids)
    assert json.loads(again.out)["generated_ids"] == json.loads(cold.out)["generated_ids"]
    [status] = terminal("serve", "--status", "--json").records
    assert (status["pid"], status["finished"]) == (pid_of(warm), 2)
    assert [record.socket for record in records()] == [status["socket"]]
    assert terminal("serve", "--stop").code == 0
    assert terminal("serve", "--status").code == 3
    assert records() == []


def test_an_engine_with_other_settings_of_its_own_is_replaced(
    terminal: Cli, forked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal(*QUICK)
    first = pid_of(terminal(*ASK))
    monkeypatch.setenv("CACHEBLEND_KV_POOL_DTYPE", "float8_e4m3")
    assert "by the engine" not in terminal(*ASK).err
    assert pid_of(terminal(*ASK)) not in (first, os.getpid())
    monkeypatch.setenv("CACHEBLEND_CHUNK_TOKENS", "100")
    assert terminal("ask", *QUICK[1:], "--dry-run").code == 0


def test_a_real_terminal_gets_an_engine_and_a_pipe_none(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command twice; its answer goes into a pipe, as in $(...)."""
    for name in ("CACHEBLEND_KEEP_ALIVE", "CI", "SUDO_UID"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-c", "from cacheblend_cli.cli.main import main; main()", *QUICK]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run: Callable[..., Any] = lambda **named: subprocess.run(  # noqa: E731
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True, **named
    )
    piped = run(stderr=subprocess.PIPE)
    assert cli("serve", "--status").code == 3
    assert b"stays loaded" not in piped.stderr
    master, slave = pty.openpty()
    try:
        answered = run(stderr=slave)
        os.close(slave)
        assert answered.stdout == piped.stdout
        assert b"cacheblend stop" in os.read(master, 4096)
        [status] = background.running(resolve({}).settings)
        assert status["url"].startswith("unix:")
    finally:
        os.close(master)
        background.stop_all(resolve({}).settings, 1.0)


@pytest.mark.parametrize(
    ("variables", "flags", "seconds"),
    [
        ({}, [], 300.0),
        ({}, ["--batch", "-"], 300.0),
        ({}, ["--local"], None),
        ({}, ["--dry-run"], None),
        ({}, ["--model", "/nowhere"], None),
        ({"CI": "true"}, [], None),
        ({"CI": "true", "CACHEBLEND_KEEP_ALIVE": "90s"}, [], 90.0),
        ({"CACHEBLEND_KEEP_ALIVE": "0"}, [], None),
        ({"SUDO_UID": "1000"}, [], None),
    ],
)
def test_when_an_engine_stays(
    terminal: Cli, spawned: Spawned, monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str], flags: list[str], seconds: float | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    question = [] if "--batch" in flags else [QUICK[1]]
    terminal("ask", *question, *QUICK[2:], *flags, stdin='{"question": "who leads billing?"}\n')
    assert [seconds for seconds, _ in spawned] == ([] if seconds is None else [seconds])


def test_no_engine_stays_without_a_person(
    cli: Cli, terminal: Cli, spawned: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli(*QUICK).code == 0  # stderr is a pipe
    monkeypatch.setattr(os, "getppid", lambda: 1)  # a container's entry point
    assert terminal(*QUICK).code == 0
    assert spawned == []


def test_an_interrupted_question_leaves_no_engine(
    terminal: Cli, spawned: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cacheblend_cli.cli.ask.show_answer", interrupt)
    assert terminal(*QUICK).code == 130
    assert spawned == []


def test_chat_leaves_an_engine_at_its_end(terminal: Cli, spawned: Spawned) -> None:
    talk = terminal("chat", "--max-tokens", "2", stdin="who leads billing?\nwho keeps a parrot?\n")
    assert talk.code == 0
    assert len(spawned) == 1
    assert terminal("chat", stdin="/docs\n").code == 0  # asks nothing
    assert len(spawned) == 1


def test_the_engine_has_the_flags_of_the_question(terminal: Cli, spawned: Spawned) -> None:
    flags = ("--system", "Be kind.", "--dtype", "float32", "--top-k", "1", "--chunks", "")
    answered = terminal(*QUICK, *flags)
    assert answered.code == 0, answered.err
    assert spawned == [(300.0, ["--dtype=float32", "--system=Be kind."])]


def test_the_note_is_shown_once_a_day(terminal: Cli, spawned: Spawned, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "stays loaded" not in terminal(*QUICK, "-q").err
    assert [terminal(*QUICK).err.count("stays loaded") for _ in range(2)] == [1, 0]

    class Tomorrow:
        today = staticmethod(lambda: "2100-01-01")

    monkeypatch.setattr("cacheblend_cli.cli.options.date", Tomorrow)
    assert "stays loaded" in terminal(*QUICK).err


def test_two_commands_at_once_start_one_engine(terminal: Cli, forked: None) -> None:
    settings = resolve({}).settings
    first, second = (background.spawn_own(settings, 60.0, []) for _ in range(2))
    assert first is not None
    assert second is None
    assert pid_of(terminal(*ASK)) == first.pid


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), CacheBlendError("cannot listen", "choose another")]
)
def test_an_engine_that_cannot_be_started_fails_no_answer(
    terminal: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def cannot(*_: Any) -> None:
        raise error

    monkeypatch.setattr(background, "bind_unix", cannot)
    answered = terminal(*QUICK)
    assert answered.code == 0
    assert "stays loaded" not in answered.err


def test_an_engine_that_fails_to_load_is_not_started_again(terminal: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the hour. A log of `serve --background` does not count."""
    spawn, started = subprocess.Popen, list[Any]()

    def broken(command: list[str], **named: Any) -> Any:
        started.append(spawn(["sh", "-c", "echo error: it is broken; exit 1"], **named))
        return started[-1]

    monkeypatch.setattr(background.subprocess, "Popen", broken)
    assert "stays loaded" in terminal(*QUICK).err
    started[0].wait()
    waited = terminal(*ASK, "--max-tokens", "2")
    assert (waited.code, "by the engine" in waited.err, "it is broken" in waited.err) == (0, False, True)
    assert len(started) == 1
    log = socket_of(resolve({}).settings).with_suffix(".log")
    os.utime(log, (0, 0))
    assert terminal(*QUICK).code == 0
    assert len(started) == 2
    started[1].wait()
    log.write_text("error: cannot listen on port 1\n")
    assert terminal(*QUICK).code == 0
    assert len(started) == 3
    started[2].wait()


@contextmanager
def memory(folder: Path, available: int, *, pressure: str = "0.00") -> Iterator[None]:
    """A machine with this many bytes of available memory."""
    (folder / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available >> 10} kB\n")
    (folder / "pressure").write_text(f"some avg10={pressure} avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "MEMINFO", folder / "meminfo")
        patch.setattr(host_memory, "PRESSURE", folder / "pressure")
        yield


def test_no_engine_stays_if_memory_is_short(terminal: Cli, spawned: Spawned, tmp_path: Path) -> None:
    with memory(tmp_path, 200 << 20):  # this process takes more
        assert terminal(*QUICK).code == 0
    with memory(tmp_path, 8 << 30, pressure="35.10"):
        assert terminal(*QUICK).code == 0
    assert spawned == []
    with memory(tmp_path, 8 << 30):
        assert terminal(*QUICK).code == 0
    assert len(spawned) == 1


def test_an_idle_engine_ends_if_memory_becomes_short(start: Any, tmp_path: Path) -> None:
    with memory(tmp_path, 8 << 30):
        left, explicit = start(yields_memory=True), start()
        assert left.ask().status_code == 200
        (tmp_path / "meminfo").write_text("MemTotal: 1 kB\nMemAvailable: 1024 kB\n")
        left.thread.join(20)
        assert not left.thread.is_alive()
        assert explicit.ask().status_code == 200


def test_a_large_model_takes_the_place_of_idle_engines_that_commands_left(
    terminal: Cli, forked: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of an explicit server."""
    monkeypatch.setattr(sys, "argv", ["cacheblend", *SERVE])
    [explicit] = terminal(*SERVE).records
    settings, other = (resolve({"system": text}).settings for text in ("Be kind.", "Be brief."))
    size = sum(file.stat().st_size for file in model.iterdir())
    monkeypatch.setattr(background, "_IDLE_REPLY_S", 10.0)
    background.start_own(settings, 60.0, ["--system=Be kind."])
    for room, num_running in ((8, 2), (3, 1)):
        with memory(tmp_path, room * size):
            options.make_room(other)
        assert len(background.running(settings)) == num_running
    assert background.running(settings)[0]["pid"] == explicit["pid"]


def test_an_explicit_server_takes_the_place_of_an_engine_that_a_command_left(
    terminal: Cli, forked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert terminal(*QUICK).code == 0
    left = pid_of(terminal(*ASK))
    monkeypatch.setattr(sys, "argv", ["cacheblend", *SERVE])
    [started] = terminal(*SERVE).records
    assert started["pid"] != left
    assert started["url"].startswith("http://127.0.0.1:")
    assert [status["pid"] for status in background.running(resolve({}).settings)] == [started["pid"]]
