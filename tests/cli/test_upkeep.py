"""chunks stats, verify, prune, compact; the quota of precompute; sizes as people write them."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from cacheblend_store import ChunkStore, StoreNoSpace
from cacheblend_store.lmdb_file.environment import Environment
from checkpoints import write_checkpoint

from cacheblend_cli.cli.units import format_size, parse_age, parse_size
from cacheblend_cli.errors import UsageError

Cli = Callable[..., Any]


def damage(path: Path, key: str) -> None:
    """Flip a bit of one blob, as a bad sector would, behind the back of the digests."""
    data = (path / "data.mdb").read_bytes()
    with ChunkStore.open(path) as store, store.read() as reader:
        manifest = reader.manifest(bytes.fromhex(key))
        assert manifest is not None
        blob = bytes(reader.layer(manifest, 1)["k"])
    at = data.index(blob) + len(blob) // 2
    with (path / "data.mdb").open("r+b") as stream:
        stream.seek(at)
        stream.write(bytes([data[at] ^ 1]))


def test_a_store_has_one_size_wherever_it_is_told(cli: Cli, docs: Path) -> None:
    """The size of the chunks: a passage shared by two documents counts once, the prompt's prefix separately."""
    for name in ("gamma", "delta"):
        (docs / f"{name}.md").write_text("The same page of the lead in Bergen.\n")

    def sizes(text: str) -> list[str]:
        return re.findall(r"([\d.]+ [KM]iB)(?: of KV|\n|$)", text)

    planned = cli("precompute", "docs", "--chunk-tokens", "40", "--dry-run")
    done = cli("precompute", "docs", "--chunk-tokens", "40")
    again = cli("precompute", "docs", "--chunk-tokens", "40", "--json")
    listed = cli("chunks", "ls", "--json").records
    assert len(again.records) == len(listed) + 1
    told = cli("chunks", "stats")
    size = format_size(sum(r["bytes"] for r in listed))
    assert {sizes(text)[0] for text in (planned.out, done.err, again.err, cli("chunks", "ls").err, told.out)} == {size}
    assert f" {size} " in told.out.splitlines()[-1], "the table has it, too"
    assert f"{len(listed)} chunks of 4 documents" in told.out
    [facts] = cli("chunks", "stats", "--json").records
    assert cli("precompute", "docs", "--chunk-tokens", "40", "--dry-run", "--json").records[0]["bytes"] == sum(
        r["bytes"] for r in listed
    )
    assert facts["chunks"] == sum(m["chunks"] for m in facts["models"]) == len(listed)
    assert facts["live_bytes"] == facts["prefixes"]["bytes"] + sum(r["bytes"] for r in listed)
    assert facts["prefixes"]["chunks"] == 1
    assert {r["bytes"] for r in again.records} == {r["bytes"] for r in listed}


def test_two_models_get_a_column(cli: Cli, stored: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "model" not in cli("chunks", "ls").out.splitlines()[0].split()
    write_checkpoint(tmp_path / "other", "llama-gqa", seed=7)
    monkeypatch.setenv("CACHEBLEND_MODEL", "other")
    assert cli("precompute", "docs/alpha.md", "--chunk-tokens", "40").code == 0
    lines = cli("chunks", "ls").out.splitlines()
    assert lines[0].split() == ["id", "model", "tokens", "size", "source", "text"]
    of = {r["id"][:12]: r["model"] for r in cli("chunks", "ls", "--json").records}
    assert len(set(of.values())) == 2
    for line in lines[1:]:
        assert line.split()[1] == of[line.split()[0]]
    write_checkpoint(tmp_path / "other", "llama-gqa", seed=8)  # another one of that name
    assert cli("precompute", "docs/alpha.md", "--chunk-tokens", "40").code == 0
    named = {" ".join(line.split()[1:3]) for line in cli("chunks", "ls").out.splitlines() if " other " in line}
    assert len(named) == 2, "the fingerprints tell them apart"


def test_stats_add_up(cli: Cli, stored: list[str]) -> None:
    [facts] = cli("chunks", "stats", "--json", "--sources").records
    listed = cli("chunks", "ls", "--json").records
    assert facts["documents"] == 2
    assert facts["live_bytes"] >= sum(r["bytes"] for r in listed)
    assert {s["source"] for s in facts["sources"]} >= {"docs/alpha.md", "docs/beta.md"}
    [model] = facts["models"]
    assert model["tokens"] >= sum(r["tokens"] for r in listed)
    assert "docs/alpha.md" in cli("chunks", "stats", "--sources").out


def test_verify_finds_damage_and_repair_removes_it(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    assert cli("chunks", "verify").code == 0
    damage(tmp_path / "store", stored[1])
    found = cli("chunks", "verify")
    assert found.code == 4
    assert "digest" in found.out
    assert "cacheblend chunks verify --repair" in found.err
    assert cli("chunks", "verify", "-q").out.split() == [stored[1]]
    report = cli("chunks", "verify", "--json")
    assert report.code == 4
    assert [f["id"] for f in report.records[0]["findings"]] == [stored[1]]
    assert (report.records[0]["ok"], report.records[0]["repaired"]) == (False, 0)
    repaired = cli("chunks", "verify", "--repair", "--json")
    assert repaired.code == 0
    assert [f["id"] for f in repaired.records[0]["findings"]] == [stored[1]]
    assert (repaired.records[0]["ok"], repaired.records[0]["repaired"]) == (True, 1)
    assert repaired.records[0]["rebuilt"] is None
    assert cli("chunks", "verify", "--json").records[0]["ok"] is True
    assert {r["id"]: r["kv"] == "stored" for r in cli("chunks", "ls", "--json").records} == {
        key: key != stored[1] for key in stored
    }
    again = cli("precompute", "docs", "--chunk-tokens", "40", "--json").records
    assert [r["id"] for r in again if r["status"] != "unchanged"] == [stored[1]]


def test_a_removed_flag_says_what_to_use(cli: Cli, stored: list[str]) -> None:
    refused = cli("chunks", "verify", "--recheck", "9")
    assert refused.code == 2
    assert "--recheck was removed" in refused.err
    assert "precompute --force" in refused.err


@pytest.mark.parametrize("damage", ["cut", "meta", "gone", "empty"])
def test_repair_of_a_store_that_does_not_open(cli: Cli, stored: list[str], tmp_path: Path, damage: str) -> None:
    data = tmp_path / "store" / "data.mdb"
    if damage == "cut":
        os.truncate(data, data.stat().st_size * 3 // 4 // 4096 * 4096)
    elif damage == "meta":
        with data.open("r+b") as stream:
            stream.write(b"\xff" * 200)
    elif damage == "gone":
        data.unlink()
    else:
        os.truncate(data, 0)
    broken = cli("chunks", "ls")
    assert broken.code == 4
    assert ("chunks verify --repair" in broken.err) == (damage != "gone")
    repaired = cli("chunks", "verify", "--repair", "--json")
    if damage in ("gone", "empty"):
        assert repaired.code == 4
        assert "hint: " in repaired.err
        return
    assert repaired.code == 0, repaired.err
    assert set(repaired.records[0]["rebuilt"]) == {"chunks", "documents", "lost", "sources"}
    assert repaired.records[0]["rebuilt"]["chunks"] == repaired.records[0]["chunks"]
    assert repaired.records[0]["ok"] is True
    assert cli("chunks", "verify").code == 0
    assert cli("precompute", "docs", "--chunk-tokens", "40").code == 0
    assert {r["id"] for r in cli("chunks", "ls", "--json").records} == set(stored)


def test_prune_by_model_and_size(cli: Cli, stored: list[str], model: Path) -> None:
    assert cli("chunks", "prune").code == 2
    assert cli("chunks", "prune", "--to-size", "many").code == 2
    would = cli("chunks", "prune", "--to-size", "0", "--dry-run", "--json").records[0]
    assert set(stored) <= set(would["evicted_ids"])
    assert (would["removed"], would["evicted"]) == (0, 0)
    assert len(cli("chunks", "ls", "--json").records) == len(stored)
    assert cli("chunks", "prune", "--model", "another", "--json").records[0]["removed"] == 0
    assert cli("chunks", "prune", "--older-than", "1d", "--orphans", "-q").out == ""
    gone = cli("chunks", "prune", "--model", str(model), "--yes", "-q").out.split()
    assert set(stored) <= set(gone)
    assert cli("chunks", "ls", "--json").records == []


def test_compact_gives_pages_back(cli: Cli, stored: list[str]) -> None:
    cli("chunks", "rm", "--all", "--yes")
    [sizes] = cli("chunks", "compact", "--json").records
    assert sizes["bytes_after"] < sizes["bytes_before"]
    assert cli("chunks", "verify").code == 0


def test_the_quota_keeps_the_store_small(cli: Cli, docs: Path) -> None:
    for i in range(6):
        (docs / f"{i}.md").write_text(f"page {i} " + "of the lead in Bergen " * 8)
    filled = cli("precompute", "docs", "--max-size", "120KB", "--json")
    listed = cli("chunks", "ls", "--json").records
    assert {r["id"] for r in listed} == {r["id"] for r in filled.records}
    without_kv = [r["id"] for r in listed if r["kv"] != "stored"]
    assert without_kv
    assert f"{len(without_kv)} of the {len(listed)} chunks" in filled.err
    [facts] = cli("chunks", "stats", "--json").records
    assert facts["max_bytes"] == 120 * 1024
    assert facts["live_bytes"] <= 120 * 1024
    assert facts["without_kv"] == len(without_kv)
    assert cli("precompute", "docs", "--max-size", "1 horse").code == 2
    assert "--max-size" not in cli("precompute", "docs", "--max-size", "0").err


@pytest.mark.parametrize("command", ["rm --all", "prune --orphans", "compact", "verify --repair", "stats", "verify"])
def test_upkeep_makes_no_store(cli: Cli, tmp_path: Path, command: str) -> None:
    result = cli("chunks", *command.split())
    assert result.code == 3, result.err
    assert not (tmp_path / "store").exists()


def test_sizes_and_ages() -> None:
    assert [parse_size(t, "--x") for t in ("0", "12", "1k", "1.5 MiB", "2GB")] == [0, 12, 1024, 1572864, 2 << 30]
    assert [parse_age(t, "--x") for t in ("30m", "12h", "2d")] == [1800, 43200, 172800]
    assert [format_size(n) for n in (12, 1536, 5 << 20, 3 << 40)] == ["12 B", "1.5 KiB", "5.0 MiB", "3.0 TiB"]
    for text in ("", "GB", "1x", "-1", "1e400GB"):
        with pytest.raises(UsageError, match="--x"):
            parse_size(text, "--x")
    with pytest.raises(UsageError, match="30d"):
        parse_age("30", "--x")


def test_a_networks_disk_is_refused_unless_forced(cli: Cli, stored: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_store.lmdb_file.directory.filesystem_type", lambda path: "nfs4")
    refused = cli("chunks", "ls")
    assert refused.code == 4
    assert "nfs4" in refused.err
    assert "CACHEBLEND_FORCE_STORE=1" in refused.err
    monkeypatch.setenv("CACHEBLEND_FORCE_STORE", "1")
    assert len(cli("chunks", "ls", "--json").records) == len(stored)


def test_chunks_of_a_question_count_as_recently_used(cli: Cli, docs: Path, tmp_path: Path) -> None:
    """The chunks of an answer and the prefix count as used, even if other chunks were stored later."""
    for name in ("alpha", "beta"):
        assert cli("precompute", f"docs/{name}.md", "--chunk-tokens", "400").code == 0
    old, new = (r["id"] for r in sorted(cli("chunks", "ls", "--json").records, key=lambda r: r["source"]))
    assert cli("ask", "who?", "--chunks", old, "--no-save", "--max-tokens", "1").code == 0
    with ChunkStore.open(tmp_path / "store") as store:
        sizes = {m.id: m.num_bytes for m in store.chunks(prefixes=True)}
    keep = sum(sizes.values()) - 1  # one has to go
    assert cli("chunks", "prune", "--to-size", str(keep), "-q").out.split() == [new]
    with ChunkStore.open(tmp_path / "store") as store:
        assert {m.id: m.has_kv for m in store.chunks(prefixes=True)} == {key: key != new for key in sizes}


def no_space(*_: object, **__: object) -> NoReturn:
    raise StoreNoSpace("the disk is full", "free some of it")


@pytest.mark.parametrize("hindrance", ["writer", "disk"])
def test_ask_neither_waits_nor_fails_to_note_what_it_used(
    cli: Cli, stored: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hindrance: str
) -> None:
    if hindrance == "disk":
        monkeypatch.setattr(Environment, "writing", no_space)
        assert cli("ask", "who?", "--chunks", stored[0], "--max-tokens", "1").code == 0
        return
    note, left = ChunkStore.flush_touches, []

    def while_another_writes(store: ChunkStore) -> bool:
        held = os.open(tmp_path / "store" / "writer.lock", os.O_RDWR)
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits for the writer"))
                left.append(note(store))
                return left[-1]
        finally:
            os.close(held)

    monkeypatch.setattr(ChunkStore, "flush_touches", while_another_writes)
    assert cli("ask", "who?", "--chunks", stored[0], "--max-tokens", "1").code == 0
    assert False in left  # what it used could not be noted, and that is no failure


def test_an_answer_is_not_lost_with_the_kv_it_computed(
    cli: Cli, stored: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(tmp_path / "store", stored[1])
    monkeypatch.setattr(Environment, "writing", no_space)
    asked = cli("ask", "who?", "--chunks", ",".join(stored[:2]), "--max-tokens", "2", "--json")
    assert asked.code == 0, asked.err
    assert [c["status"] for c in asked.records[0]["chunks"]] == ["exact", "computed"]
    assert "1 computed chunk" in asked.err


def test_stats_count_chunks_without_kv(cli: Cli, stored: list[str]) -> None:
    """Without the prefix, which is no chunk that is listed."""
    cli("chunks", "prune", "--to-size", "0")
    [facts] = cli("chunks", "stats", "--json").records
    assert facts["chunks"] == facts["without_kv"] == len(stored)


def test_stats_give_the_kv_of_a_token_that_precompute_stores(cli: Cli, docs: Path) -> None:
    """It counts the tokens that have KV now."""
    plan = cli("precompute", "docs", "--chunk-tokens", "40", "--json").records
    per_token = sum(r["bytes"] for r in plan) / sum(r["tokens"] for r in plan)
    for _ in range(2):
        [share] = cli("chunks", "stats", "--json").records[0]["models"]
        assert share["bytes"] / share["kv_tokens"] == pytest.approx(per_token, rel=0.05)
        assert "KV per token" in cli("chunks", "stats").out
        cli("chunks", "prune", "--to-size", str(share["bytes"] // 2))
