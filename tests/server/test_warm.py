"""A running engine and the command line: the same answers and output, without torch, even if the engine ends."""

from __future__ import annotations

import ast
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from children import Child
from command_line import ASK, Cli, process

from cacheblend_cli import client, sockets
from cacheblend_cli.client import Client, Connection, EngineLost
from cacheblend_cli.errors import UsageError
from cacheblend_cli.server.background import ask_status
from cacheblend_cli.server.binding import bind_tcp, bind_unix
from cacheblend_cli.settings import Settings, resolve
from cacheblend_cli.types import AskRequest

MOST_FILES = 79  # of this project, imported by a client
ENGINE = f"process {os.getpid()}"  # in the summary of what this process's engine answered


@pytest.mark.parametrize(
    "flags",
    [["--ids"], ["--explain", "--verify"], ["--chunks", ""], ["--mode", "full"], ["--dry-run"], ["--logprobs", "2"]],
)
def test_the_same_answer_and_json(cli: Cli, server: Any, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert stat.S_IMODE(sockets.socket_of(server.state.settings).stat().st_mode) == 0o600
    for folder in (Path.cwd(), Path("docs").absolute()):
        monkeypatch.chdir(folder)
        warm, cold = cli(*ASK, "--json", *flags), cli(*ASK, "--json", "--local", *flags)
        assert (warm.code, cold.code) == (0, 0), warm.err + cold.err
        ours, theirs = json.loads(warm.out), json.loads(cold.out)
        assert [name for name in ours if name != "prefix_cache_tokens"] == list(theirs)
        for name in ("answer", "finish_reason", "prompt_tokens", "prompt_ids", "generated_ids", "notes"):
            assert ours.get(name) == theirs.get(name)
        for chunks in (ours["chunks"], theirs["chunks"]):  # what is in the engine's pool already is not computed again
            for chunk in chunks:
                chunk.pop("recomputed", None), chunk.pop("status")
        assert ours["chunks"] == theirs["chunks"]
    assert server.state.engine.service.stats().finished == (0 if "--dry-run" in flags else 2)


def test_a_second_server_names_the_first_one(cli: Cli, server: Any) -> None:
    result = cli("serve")
    assert result.code == 2
    assert server.url.removesuffix("/v1") in result.err


def test_a_piped_document_is_sent_along(cli: Cli, server: Any) -> None:
    asked = ("ask", "who keeps the harbor?", "--json", "--ids")
    warm, cold = cli(*asked, stdin="Jonas keeps it.\n"), cli(*asked, "--local", stdin="Jonas keeps it.\n")
    assert (warm.code, cold.code) == (0, 0), warm.err + cold.err
    assert server.state.engine.service.stats().finished == 1
    for name in ("answer", "prompt_ids"):
        assert warm.records[0][name] == cold.records[0][name]
    assert {c["source"] for r in (warm, cold) for c in r.records[0]["chunks"]} == {"stdin"}
    refused = cli("ask", "who?", stdin="word and " * 4000)
    assert (refused.code, "cacheblend precompute FILE" in refused.err) == (2, True)


def test_only_the_socket_beside_the_store_takes_commands(server: Any) -> None:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(server.socket)), base_url="http://localhost") as public:
        for client in (server.client, public):
            assert client.post("/engine/stop", json={}).status_code == 404
    assert ask_status(sockets.socket_of(server.state.settings)) is not None


def test_the_summary_says_who_answered(cli: Cli, server: Any) -> None:
    warm, cold = cli(*ASK), cli(*ASK, "--local")
    assert warm.out == cold.out
    assert ENGINE in warm.last
    assert ENGINE not in cold.last
    assert [line for line in warm.err.splitlines() if "searching" in line] == [
        line for line in cold.err.splitlines() if "searching" in line
    ]
    auto = cli(*ASK, "--ratio", "auto", "--explain")
    assert (auto.code, "auto:" in auto.err) == (0, True)
    assert ENGINE in auto.err
    other = cli(*ASK, "--system", "Be kind.", "--chunks", "")
    assert ENGINE not in other.last  # that engine has another prompt


def test_a_page_and_a_form_come_from_the_engine(cli: Cli, server: Any, tmp_path: Path) -> None:
    for flags in (["--html", "a.html"], ["--html", "b.html", "--explain"]):
        warm, cold = cli(*ASK, *flags), cli(*ASK, *flags[:1], "cold.html", *flags[2:], "--local")
        assert (ENGINE in warm.err, ENGINE in cold.err) == (True, False), warm.err
        assert ("layers" in warm.err) == ("layers" in cold.err) == ("--explain" in flags)
        page = (tmp_path / flags[1]).read_text()
        assert all(word in page for word in ("who leads billing?", "<mark class=", "docs/0.md"))
    pytest.importorskip("llguidance")
    (tmp_path / "form.json").write_text('{"enum": ["ja", "nein"]}')
    for flags in (["--regex", "(ja|nein)"], ["--json-schema", "form.json"]):
        warm, cold = cli(*ASK, *flags), cli(*ASK, *flags, "--local")
        assert warm.out == cold.out
        assert warm.out.strip().strip('"') in ("ja", "nein")
        assert ENGINE in warm.last
    assert cli(*ASK, "--regex", "(").code == 2


def test_a_batch_is_answered_by_the_engine(cli: Cli, server: Any, tmp_path: Path) -> None:
    rows = [{"question": f"who leads billing? Jonas {i}"} for i in range(5)]
    rows[2]["chunks"] = ["ffff"]  # type: ignore[assignment]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch = ("ask", "--batch", "q.jsonl", "--json", "--ids", "--concurrency", "2")
    warm, cold = cli(*batch, "--resume", "kept.jsonl"), cli(*batch, "--local")
    assert (warm.code, cold.code) == (3, 3)
    ours, theirs = ([json.loads(line) for line in said.out.splitlines()] for said in (warm, cold))
    assert [r["question"] for r in ours] == [row["question"] for row in rows]
    assert [r.get("generated_ids") for r in ours] == [r.get("generated_ids") for r in theirs]
    assert "error" in ours[2]
    assert server.state.engine.service.stats().finished == 4
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 4
    assert "4 answers in" in warm.err
    plans = cli(*batch[:3], "--dry-run", "--json")
    assert (plans.code, len(plans.out.splitlines())) == (3, 5)


def test_what_an_engine_leaves_of_a_batch_is_answered_here(
    cli: Cli, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cacheblend_cli.cli.engines import WarmEngine
    from cacheblend_cli.client import lost

    rows = [{"question": f"who leads billing? Jonas {i}"} for i in range(4)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events, asked = WarmEngine.events, []

    def twice(engine: WarmEngine, inquiry: Any) -> Any:
        asked.append(inquiry)
        if len(asked) > 2:
            raise lost()
        return events(engine, inquiry)

    monkeypatch.setattr(WarmEngine, "events", twice)
    done = cli("ask", "--batch", "q.jsonl", "--json", "--concurrency", "1")
    assert done.code == 0, done.err
    assert [json.loads(line)["question"] for line in done.out.splitlines()] == [row["question"] for row in rows]
    assert server.state.engine.service.stats().finished == 2


def test_a_search_by_an_engine_over_the_store(cli: Cli, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_MODEL", "another")  # what is found depends on no model
    for flags in (["--json"], ["-q"], []):
        warm, cold = cli("search", "parrot", *flags), cli("search", "parrot", "--local", *flags)
        assert (warm.code, warm.out) == (cold.code, cold.out) == (0, cold.out), warm.err
        assert (ENGINE in warm.err, ENGINE in cold.err) == ("-q" not in flags, False)
    for words in (["zebra"], ["parrot", "--search", "magic"], ["parrot", "--source", "docs/0.md"]):
        warm, cold = cli("search", *words), cli("search", *words, "--local")
        assert warm.code == cold.code != 0
        assert warm.err == cold.err
    monkeypatch.setattr(sockets, "PROTOCOL", 0)
    monkeypatch.setattr("cacheblend_cli.client.PROTOCOL", 0)
    assert ENGINE not in cli("search", "parrot").err


def test_the_same_errors(cli: Cli, server: Any) -> None:
    for flags in (
        ["--selector", "magic"],
        ["--chunks", "ffff"],
        ["--regex", "("],
        ["--top-p", "2"],
    ):
        warm, cold = cli(*ASK, *flags), cli(*ASK, "--local", *flags)
        assert warm.code == cold.code != 0
        assert warm.err.splitlines()[-2:] == cold.err.splitlines()[-2:]


def test_the_client_imports_nothing_heavy(cli: Cli, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHUNK_TOKENS", "THREADS"):  # imported to be checked
        monkeypatch.delenv(f"CACHEBLEND_{name}")
    heavy = {
        "torch", "numpy", "transformers", "pydantic", "rich", "asyncio", "http", "obstore", "cryptography", "email", "tomllib",
        "importlib.metadata", "cacheblend_cli.corpus.search", "cacheblend_cli.engine",
    }  # fmt: skip
    found = "sum(m.startswith('cacheblend') for m in sys.modules), [m for m in sys.modules if m in " + f"{heavy}]"
    for command in (ASK, ("ps",)):
        done = process(*command, code=f"code = run(sys.argv[1:]); print([code, {found}], file=sys.stderr)")
        code, ours, loaded = ast.literal_eval(done.last)
        assert (code, loaded) == (0, []), done.err
        assert ours <= MOST_FILES
        assert ENGINE in done.err or str(os.getpid()) in done.out


def test_another_model_prompt_or_version_is_another_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(model="handbook", store=str(tmp_path / "store"))
    ours = sockets.socket_of(settings)
    other = {
        "model": str(tmp_path),
        "system": "Be kind.",
        "dtype": "bfloat16",
        "weight_dtype": "int8",
        "lora": "adapter",
    }
    same = {
        "ratio": 0.5,
        "temperature": 1.0,
        "top_k": 2,
        "salt": "x",
        "seed": 1,
        "threads": 3,  # of the engine, which `ask` does not set
        "swap_space": 1.0,
        "store": str(tmp_path / "." / "store"),
    }
    assert all(sockets.socket_of(replace(settings, **{name: value})) != ours for name, value in other.items())
    assert all(sockets.socket_of(replace(settings, **{name: value})) == ours for name, value in same.items())
    adapted = replace(settings, lora="adapter")
    there = sockets.socket_of(adapted)
    monkeypatch.chdir(tmp_path)
    assert sockets.socket_of(adapted) != there  # another directory of that name
    assert sockets.socket_of(replace(settings, lora=str(tmp_path / "adapter"))) == sockets.socket_of(adapted)
    monkeypatch.setattr(sockets, "__version__", "99")
    assert sockets.socket_of(settings) != ours


def test_an_address_is_taken_while_the_model_loads(tmp_path: Path) -> None:
    """An engine begins to answer only then. Another one that is started meanwhile does not take its place."""
    with bind_tcp("127.0.0.1", 0) as tcp, bind_unix(tmp_path / "s.sock"):
        port = tcp.getsockname()[1]
        with pytest.raises(UsageError, match=str(port)):
            bind_tcp("127.0.0.1", port)
        with pytest.raises(UsageError, match=r"s\.sock"):
            bind_unix(tmp_path / "s.sock")


def test_an_address_is_taken_before_torch_is_imported(cli: Cli) -> None:
    """Commands find an engine that is starting, and wait for it instead of loading the model, too."""
    seen = "lambda *_: sys.exit(print([m for m in ('torch', 'numpy', 'uvicorn') if m in sys.modules]))"
    begun = process("serve", code=f"from cacheblend_cli.cli import serve; serve._bind = {seen}; run(sys.argv[1:])")
    assert begun.out == "[]\n", begun.err


def test_a_server_that_ends_leaves_the_socket_of_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with bind_unix(path):
        first = sockets.SocketFile(path)
    with bind_unix(path):
        second = sockets.SocketFile(path)
        first.remove()
        assert path.is_socket()
        second.remove()
    assert not path.exists()


def test_what_is_not_answered_when_a_server_ends_is_told_so(
    start: Any, cli: Cli, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(grace_s=0)
    body = {"messages": [{"role": "user", "content": "who?"}], "max_tokens": 900, "ignore_eos": True}
    resolved, connection = resolve({"max_tokens": 900}), Connection.to(sockets.socket_of(server.state.settings))
    assert connection is not None
    with ThreadPoolExecutor(2) as pool, connection:
        whole = pool.submit(server.client.post, "/v1/chat/completions", json=body)
        streamed = pool.submit(server.client.post, "/v1/chat/completions", json=body | {"stream": True})
        events = connection.request("ask", AskRequest.of(resolved, "who?").wire)
        while server.state.engine.service.stats().running < 3:
            pass
        server.end()
        assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "stopping")
        stream = streamed.result()
        assert '"stopping"' in stream.text
        assert stream.status_code == 503 or "[DONE]" in stream.text  # before its first token, or behind it
        with pytest.raises(EngineLost):
            list(events)
    assert "Traceback" not in caplog.text


def test_a_server_that_ends_takes_no_more_questions_of_commands(cli: Cli, server: Any) -> None:
    """Also while another client's answer is finished."""
    path = sockets.socket_of(server.state.settings)
    body = {"messages": [{"role": "user", "content": "who?"}], "max_tokens": 800, "stream": True, "ignore_eos": True}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.end()
        while path.exists():
            pass
        assert server.state.engine.service.stats().running == 1
        assert ENGINE not in cli(*ASK).last
        server.state.engine.close()


def test_a_long_path_has_its_socket_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(model="handbook", store=str(tmp_path / ("deep" * 30) / "store"))
    for base in ("/run/user/7", str(tmp_path / ("deep" * 30))):
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        path = sockets.socket_of(settings)
        assert len(os.fsencode(path)) < 107
        assert path.parent not in (settings.store_path, Path(base))
    sockets.make_folder(tmp_path / "own" / "folder")
    assert stat.S_IMODE((tmp_path / "own" / "folder").stat().st_mode) == 0o700


def test_a_store_that_cannot_be_written_has_its_socket_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(model="handbook", store=str(tmp_path))
    assert sockets.folder_of(settings) == tmp_path
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert sockets.folder_of(settings) != tmp_path


def test_a_client_that_leaves_ends_its_answer(cli: Cli, server: Any) -> None:
    resolved = resolve({"max_tokens": 800, "temperature": 3.0, "seed": 1})
    connection = Connection.to(sockets.socket_of(server.state.settings))
    assert connection is not None
    with connection:
        next(connection.request("ask", AskRequest.of(resolved, "who?").wire))
    while not (stats := server.state.engine.service.stats()).cancelled:
        assert not stats.finished
    assert stats.cancelled == 1


def test_an_engine_ends_when_nobody_asks(start: Any, cli: Cli) -> None:
    server = start(idle_exit_s=0.4)
    path = sockets.socket_of(server.state.settings)
    while path.exists():
        pass
    assert server.state.draining
    assert ENGINE not in cli(*ASK).last


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_socket_folder_is_this_users_alone(tmp_path: Path, mode: int) -> None:
    own = tmp_path / f"cacheblend-{os.getuid()}"
    own.mkdir()
    own.chmod(mode)
    sockets.make_folder(own / "folder")
    assert not own.stat().st_mode & 0o022
    if os.getuid() == 0:  # only root gives files away
        os.chown(own, 12345, 12345)
        with pytest.raises(UsageError, match="belongs to another user"):
            sockets.make_folder(own / "folder")
        os.chown(own, 0, 0)
    (own / "link").symlink_to(tmp_path)
    with pytest.raises(UsageError):
        sockets.make_folder(own / "link")


def test_a_question_goes_only_to_a_process_of_this_user(
    cli: Cli, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not through a link to the socket of another one, nor to what listens at a socket of ours."""
    path = sockets.socket_of(server.state.settings)
    assert ENGINE in cli(*ASK).last
    path.rename(tmp_path / "elsewhere.sock")
    path.symlink_to(tmp_path / "elsewhere.sock")
    assert Connection.to(path) is None
    assert ENGINE not in cli(*ASK).last
    path.unlink()
    (tmp_path / "elsewhere.sock").rename(path)
    assert Connection.is_open(path)
    monkeypatch.setattr(client, "_peer_of", lambda connected: os.geteuid() + 1)
    assert Connection.to(path) is None
    assert ENGINE not in cli(*ASK).last


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_the_user_of_the_process_at_the_other_end_is_known(tmp_path: Path) -> None:
    path = tmp_path / "their.sock"

    def listen(acknowledge: Callable[[], None]) -> None:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(os.fspath(path))  # the file is this user's
            os.setuid(12345)
            bound.listen()
            acknowledge()
            time.sleep(60)

    child = Child(listen)
    try:
        child.until(1)
        with socket.socket(socket.AF_UNIX) as connected:
            connected.connect(os.fspath(path))
            assert client._peer_of(connected) == 12345
        assert Connection.to(path) is None
    finally:
        child.kill()


@pytest.mark.parametrize("name", ["lock", "log"])
def test_a_log_or_lock_of_an_engine_that_is_a_link_is_refused(cli: Cli, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path = sockets.socket_of(resolve({}).settings)
    sockets.make_folder(path.parent)
    path.with_suffix(f".{name}").symlink_to(victim)
    result = cli("serve", "--background", "--port", "0")
    assert result.code == 2
    assert f".{name} is a symbolic link" in result.err
    assert victim.read_text() == "mine"


def test_what_cannot_be_served_is_told(cli: Cli) -> None:
    for flags, words in (
        (["--host", "0.0.0.0"], "--api-key"),
        (["--api-key", "short"], "8"),
        (["--unix-socket", "/nowhere/s.sock"], "/nowhere/s.sock"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--stop", "--status"], "--stop"),
    ):
        said = cli("serve", "--port", "0", *flags)
        assert (said.code in (2, 3), words in said.err) == (True, True), said.err


@pytest.mark.parametrize("said", ["", 'data: {"event": "piece", "text": "Mara"}\n\n'])
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_an_engine_that_is_killed_in_mid_answer(cli: Cli, model: Path, said: str, flags: list[str]) -> None:
    """Where nothing was printed yet the question is answered here, else the command fails."""
    path = sockets.socket_of(resolve({}).settings)

    def serve(bound: socket.socket) -> None:
        bound.accept()[0].close()  # of one that looks whether anybody listens
        with bound.accept()[0] as connection, connection.makefile("rb") as request:
            head = list(iter(request.readline, b"\r\n"))
            [length] = [int(line.split()[1]) for line in head if line.lower().startswith(b"content-length")]
            request.read(length)
            connection.sendall(("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + said).encode())

    sockets.make_folder(path.parent)
    with bind_unix(path) as bound, ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve, bound)
        asked = cli(*ASK, *flags)
        served.result(60)
        path.unlink()
    assert asked.code == (1 if said and not flags else 0), asked.err
    if asked.code:
        assert asked.out == "Mara"


def test_precompute_computes_with_the_engines_weights(
    cli: Cli, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected, collect = list[bytes](), Client.collect

    def watched(*given: Any, **others: Any) -> Iterator[tuple[bytes, str, str]]:
        for done in collect(*given, **others):
            collected.append(done[0])
            yield done

    monkeypatch.setattr(Client, "collect", watched)
    for name in "ab":
        (tmp_path / "docs" / f"{name}.md").write_text(f"# Parrots\n\nJonas feeds the parrot {name} at noon.\n")

    def kv() -> dict[bytes, tuple[bytes, ...]]:
        return {m.key: m.blob_digests for m in server.state.store.chunks()}

    told = cli("precompute", "docs", "--json")
    assert [r["id"] for r in told.records if r["status"] == "new"] == [key.hex() for key in collected]
    by_engine = kv()
    assert len(collected) == 2
    assert cli("precompute", "docs", "--force", "--threads", "1").code == 0
    assert len(collected) == 2, "with flags of its own it computes itself"
    assert kv() == by_engine
    server.state.store.evict_chunks(collected)
    server.end()
    server.thread.join(20)
    assert cli("precompute", "docs").code == 0
    assert kv() == by_engine
