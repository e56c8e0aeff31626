"""A chunk whose KV was evicted: listed, found, cited, computed when it is asked for, and stored again where there is
room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cacheblend_store import ChunkStore

Cli = Callable[..., Any]


def kv(cli: Cli) -> dict[str, str]:
    return {r["id"]: r["kv"] for r in cli("chunks", "ls", "--json").records}


def evict(path: Path, *ids: str) -> None:
    with ChunkStore.open(path, mode="write") as store:
        store.evict_chunks(bytes.fromhex(name) for name in ids)


def test_an_evicted_chunk_is_listed_found_cited_and_computed(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    before = cli("ask", "alpha lead", "--json", "--max-tokens", "4").records[0]
    found = cli("search", "alpha lead", "-q").out
    evict(tmp_path / "store", *stored)
    assert set(kv(cli).values()) == {"evicted"}
    assert "evicted" in cli("chunks", "ls").out
    assert cli("search", "alpha lead", "-q").out == found
    plan = cli("ask", "alpha lead", "--dry-run", "--json").records[0]
    assert {c["status"] for c in plan["chunks"]} == {"computed"}
    after = cli("ask", "alpha lead", "--json", "--max-tokens", "4").records[0]
    assert [c["id"] for c in after["chunks"]] == [c["id"] for c in before["chunks"]]
    assert {c["status"] for c in after["chunks"]} == {"computed"}
    used = {c["id"] for c in after["chunks"]}
    assert {name for name, state in kv(cli).items() if state == "stored"} == used
    again = cli("ask", "alpha lead", "--json", "--max-tokens", "4").records[0]
    assert [c["status"] for c in again["chunks"]] == [c["status"] for c in before["chunks"]]
    assert again["answer"] == before["answer"]
    assert cli("chunks", "verify").code == 0


def test_an_evicted_prefix_is_computed(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    whole = cli("ask", "who?", "--chunks", stored[0], "--json", "--max-tokens", "4").records[0]
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        store.evict_chunks(m.key for m in store.chunks(prefixes=True) if m.context == "prefix")
    assert (
        cli("ask", "who?", "--chunks", stored[0], "--json", "--max-tokens", "4").records[0]["answer"] == whole["answer"]
    )


def test_what_a_question_computes_evicts_nothing_the_question_uses(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    """With room for one chunk less than it asks about: the answer stands, a note says what is not stored."""
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        wanted = sum(m.num_bytes for m in store.chunks(prefixes=True) if m.id in stored[:2] or m.context == "prefix")
        store.evict_chunks(bytes.fromhex(name) for name in stored[1:])
        store.set_max_bytes(wanted - 1)
    asked = cli("ask", "who?", "--chunks", ",".join(stored[:2]), "--max-tokens", "2")
    assert asked.code == 0
    assert "quota" in asked.err
    assert {name for name, state in kv(cli).items() if state == "stored"} == {stored[0]}


def test_prune_frees_kv_and_says_so(cli: Cli, stored: list[str]) -> None:
    would = cli("chunks", "prune", "--to-size", "0", "--dry-run")
    assert f"{len(stored) + 1} chunks" in would.err
    assert cli("chunks", "prune", "--to-size", "0", "--json").records[0]["removed"] == 0
    assert set(kv(cli).values()) == {"evicted"}
    assert cli("chunks", "stats", "--json").records[0]["without_kv"] == len(stored)


def test_a_push_takes_the_text_along(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    evict(tmp_path / "store", stored[0])
    (tmp_path / "usb").mkdir()
    usb = f"file://{tmp_path / 'usb'}"
    assert cli("chunks", "push", usb).code == 0
    other = ("--store", str(tmp_path / "other"))
    assert cli("chunks", "pull", usb, *other).code == 0
    assert {r["id"]: r["kv"] for r in cli("chunks", "ls", "--json", *other).records} == {
        name: "none" if name == stored[0] else "stored" for name in stored
    }
