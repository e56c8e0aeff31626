"""/ready says 503 while the store's file is gone or cut, and 200 when it is back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

PAGE = "the lead of billing is Mara and she works in Bergen"


def readiness(server: Any) -> tuple[int, str]:
    reply = server.client.get("/ready")
    return reply.status_code, reply.json()["status"]


def search_status(server: Any) -> int:
    return int(server.client.post("/v1/search", json={"query": "billing"}).status_code)


@pytest.mark.parametrize("moved", ["file", "folder"])
def test_a_store_that_is_moved_away_and_back(server: Any, moved: str) -> None:
    server.client.put("/v1/documents/a", json={"text": PAGE})
    folder: Path = server.state.store.path
    place = folder / "data.mdb" if moved == "file" else folder
    assert readiness(server) == (200, "ready")
    place.rename(aside := place.with_name("aside"))
    assert readiness(server) == (503, "store unavailable")
    assert search_status(server) == 503
    aside.rename(place)
    assert readiness(server) == (200, "ready")
    assert search_status(server) == 200


def test_a_store_that_is_restored_from_a_copy(server: Any) -> None:
    server.client.put("/v1/documents/a", json={"text": PAGE})
    file: Path = server.state.store.path / "data.mdb"
    shutil.copy(file, copy := file.with_name("copy"))
    file.unlink()
    assert readiness(server) == (503, "store unavailable")
    copy.rename(file)
    assert readiness(server) == (200, "ready")
    assert search_status(server) == 200


@pytest.mark.parametrize("num_bytes", [0, 3 * 4096], ids=["empty", "short"])
def test_a_store_that_is_truncated(server: Any, num_bytes: int) -> None:
    server.client.put("/v1/documents/a", json={"text": PAGE})
    file: Path = server.state.store.path / "data.mdb"
    before = file.read_bytes()
    os.truncate(file, num_bytes)
    assert readiness(server) == (503, "store unavailable")
    assert search_status(server) == 503
    with open(file, "r+b") as stream:
        stream.write(before)
    assert readiness(server) == (200, "ready")
    assert search_status(server) == 200


def test_another_file_in_place_of_the_store(server: Any) -> None:
    file: Path = server.state.store.path / "data.mdb"
    file.rename(aside := file.with_name("aside"))
    file.write_bytes(b"no store " * 10_000)
    assert readiness(server) == (503, "store unavailable")
    aside.replace(file)
    assert readiness(server) == (200, "ready")


def test_the_state_of_the_server_comes_first(server: Any) -> None:
    (server.state.store.path / "data.mdb").rename(aside := server.state.store.path / "aside")
    server.state.draining = True
    assert readiness(server) == (503, "stopping")
    server.state.draining = False
    aside.rename(server.state.store.path / "data.mdb")
