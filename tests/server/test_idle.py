"""A server that is idle computes the KV that is missing: by itself, at low priority, and not at any price."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cacheblend_store import ChunkStore
from command_line import Cli

from cacheblend_cli.client import Client
from cacheblend_cli.collect.missing import MissingChunks
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.server import idle, power
from cacheblend_cli.server.background import ask_status
from cacheblend_cli.sockets import socket_of
from cacheblend_cli.types import SearchParams

StartServer = Callable[..., Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Idle at once, on mains."""
    for name, seconds in (("IDLE_S", 0.0), ("LOOK_S", 0.01), ("BETWEEN_S", 0.0)):
        monkeypatch.setattr(idle, name, seconds)
    monkeypatch.setattr(power, "SUPPLIES", tmp_path / "supplies")


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    for name in "ab":
        lines = (f"{name}{i}: Mara leads billing in Bergen, {i} doors from the harbor." for i in range(20))
        (tmp_path / "docs" / f"{name}.txt").write_text("\n\n".join(lines) + "\n")
    return tmp_path / "docs"


def store_texts(server: Any, docs: Path) -> None:
    """Store records and texts alone, as precompute does before it computes."""
    options = PrecomputeOptions(chunk_tokens=40, max_bytes=1)
    server.state.engine.precompute(server.state.store, [str(docs)], options, lambda event: None)


def keys_without_kv(store: ChunkStore) -> list[bytes]:
    return [manifest.key for manifest in store.chunks() if not manifest.has_kv]


def until(is_so: Callable[[], bool], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def status_of(server: Any) -> dict[str, Any]:
    status = ask_status(socket_of(server.state.settings))
    assert status is not None
    return status


def client_of(server: Any) -> Client:
    client = Client.of(server.state.settings)
    assert client is not None
    return client


def supply(folder: Path, **facts: str) -> None:
    folder.mkdir(parents=True)
    for name, text in facts.items():
        (folder / name).write_text(f"{text}\n")


def on_battery(folder: Path) -> None:
    supply(folder / "AC", type="Mains", online="0")
    supply(folder / "BAT0", type="Battery", status="Discharging")


def test_an_idle_server_computes_what_is_missing(
    start: StartServer, docs: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    nice, plain = set[int](), MissingChunks.compute

    def watched(missing: MissingChunks, *args: Any) -> int:
        nice.add(os.getpriority(os.PRIO_PROCESS, 0))
        return plain(missing, *args)

    monkeypatch.setattr(MissingChunks, "compute", watched)
    caplog.set_level(logging.INFO, "cacheblend")
    server = start()
    store_texts(server, docs)
    num_chunks = len(list(server.state.store.chunks()))
    until(lambda: not keys_without_kv(server.state.store) and not status_of(server)["computing"])
    assert status_of(server)["missing"] == 0
    assert nice == {idle.NICE}
    assert server.ask().status_code == 200
    until(lambda: len(caplog.messages) >= 2)
    assert [str(num_chunks) in message for message in caplog.messages] == [True, True]


def test_what_searches_find_is_computed_first(start: StartServer, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "IDLE_S", 1e9)
    monkeypatch.setattr("cacheblend_cli.collect.missing.pack_tokens", lambda device: 1)
    server, found = start(), set[str]()
    store_texts(server, docs)
    hits = server.client.post("/v1/search", json={"query": "b17", "k": 1}).json()["data"]
    found |= {hit["id"] for hit in hits}
    found |= {hit.id for hit in client_of(server).search("a3", SearchParams(k=1, by="words"))[0].hits}
    assert {key.hex() for key in server.state.found} == found
    computed = list[bytes]()
    plain = ChunkStore.put_chunks

    def watched(store: ChunkStore, chunks: Any, *args: Any, **options: Any) -> Any:
        given = list(chunks)
        computed.extend(manifest.key for manifest, _ in given if manifest.context != "prefix")
        return plain(store, given, *args, **options)

    monkeypatch.setattr(ChunkStore, "put_chunks", watched)
    monkeypatch.setattr(idle, "IDLE_S", 0.0)
    until(lambda: not keys_without_kv(server.state.store))
    assert {key.hex() for key in computed[: len(found)]} == found


def test_finish_keeps_the_server_until_the_work_is_done(start: StartServer, docs: Path) -> None:
    server = start(idle_exit_s=0.3)
    store_texts(server, docs)
    assert client_of(server).finish("other") is None
    client_of(server).finish()
    server.thread.join(60)
    assert not server.thread.is_alive()
    assert keys_without_kv(server.state.store) == []


def test_nothing_is_computed_on_battery_unless_asked(start: StartServer, docs: Path) -> None:
    on_battery(power.SUPPLIES)
    server = start()
    store_texts(server, docs)
    missing = client_of(server).finish()
    assert missing == len(keys_without_kv(server.state.store)) > 0
    assert client_of(server).finish(on_battery=True) == missing
    until(lambda: not keys_without_kv(server.state.store))


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ([], False),
        ([{"type": "Mains", "online": "1"}, {"type": "Battery", "status": "Discharging"}], False),
        ([{"type": "Mains", "online": "0"}, {"type": "Battery", "status": "Discharging"}], True),
        ([{"type": "Mains", "online": "0"}, {"type": "Battery", "status": "Full"}], False),
        ([{"type": "Battery", "status": "Discharging"}], False),  # of a mouse
    ],
)
def test_power_supplies(supplies: list[dict[str, str]], expected: bool) -> None:
    for number, facts in enumerate(supplies):
        supply(power.SUPPLIES / str(number), **facts)
    assert power.on_battery() == expected


def test_an_error_is_logged_once_and_the_server_answers(
    start: StartServer, docs: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = list[int]()

    def full(*_: Any) -> int:
        tries.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(idle, "REST_S", 0.0)
    monkeypatch.setattr(MissingChunks, "compute", full)
    server = start()
    store_texts(server, docs)
    until(lambda: len(tries) > 2)
    assert server.ask().status_code == 200
    assert sum("No space left" in message for message in caplog.messages) == 1


def test_keys_are_collected_in_the_order_given(start: StartServer, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "IDLE_S", 1e9)
    server = start()
    store_texts(server, docs)
    keys, client = keys_without_kv(server.state.store)[::-1], client_of(server)
    codec = next(manifest.codec for manifest in server.state.store.chunks())
    collected = list(client.collect(keys[:3], codec))
    assert collected == [(key, "new", "computed") for key in keys[:3]]
    assert {key for key in keys if server.state.store.has_kv(key)} == set(keys[:3])
    assert list(client.collect(keys[:4], codec)) == [(keys[3], "new", "computed")]
    assert len(list(client.collect(keys[:2], codec, again=True))) == 2


@pytest.mark.parametrize("what", ["salt", "codec", "key"])
def test_chunks_of_another_collection_are_refused(
    start: StartServer, docs: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(idle, "IDLE_S", 1e9)
    server = start()
    store_texts(server, docs)
    [key, *_], codec = keys_without_kv(server.state.store), next(m.codec for m in server.state.store.chunks())
    collect = partial(client_of(server).collect, [bytes(32) if what == "key" else key])
    with pytest.raises(CacheBlendError):
        list(collect("float16" if what == "codec" else codec, "other" if what == "salt" else ""))
    assert not server.state.store.has_kv(key)


def test_precompute_leaves_the_rest_to_the_server(start: StartServer, cli: Cli, tmp_path: Path) -> None:
    server = start()
    (tmp_path / "docs" / "new.md").write_text("# Parrots\n\nJonas feeds the parrot at noon.\n")
    told = cli("precompute", "docs", "--background")
    assert told.code == 0, told.err
    assert f"process {os.getpid()}" in told.last
    assert len(list(server.state.store.chunks())) == 3
    until(lambda: not keys_without_kv(server.state.store))


def test_precompute_does_not_leave_chunks_of_another_salt_to_the_server(start: StartServer, cli: Cli) -> None:
    start()
    told = cli("precompute", "docs", "--background", "--salt", "other")
    assert told.code == 2, told.err
    assert "without --background" in told.err
