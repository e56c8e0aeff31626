"""chunks push and pull, and --tier: what a user sees."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answer_schema import problems

Cli = Callable[..., Any]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Go on with another, empty store."""
    return lambda: monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "store2"))


def statuses(result: Any) -> set[str]:
    return {record["status"] for record in result.records}


def objects(folder: Path) -> list[Path]:
    """The objects of chunks."""
    return [file for file in folder.glob("v1/*/*") if file.is_file() and file.name != "collection"]


def test_push_and_pull_between_stores(cli: Cli, stored: list[str], elsewhere: Callable[[], None]) -> None:
    assert statuses(cli("chunks", "push", "./usb", "--json")) == {"new"}
    assert statuses(cli("chunks", "push", "./usb", "--json")) == {"unchanged"}
    before = cli("search", "lead of billing", "--json").out
    listed = cli("chunks", "ls", "--json").out
    elsewhere()
    first = cli("chunks", "pull", "./usb", "--json")
    assert statuses(first) == {"new"}
    assert set(stored) <= {r["id"] for r in first.records}
    assert statuses(cli("chunks", "pull", "./usb", "--json")) == {"unchanged"}
    assert cli("chunks", "ls", "--json").out == listed
    assert cli("search", "lead of billing", "--json").out == before
    assert statuses(cli("precompute", "docs", "--chunk-tokens", "40", "--json")) == {"unchanged"}


def test_what_to_push_and_to_pull(cli: Cli, stored: list[str], model: Path, elsewhere: Callable[[], None]) -> None:
    ids = cli("chunks", "ls", "--source", "*alpha*", "-q").out.split()
    for name, arguments, count in (
        ("a", ("--source", "*alpha*"), len(ids)), ("b", (stored[0][:10],), 1), ("c", ("--model", str(model)), len(stored)),
        ("d", ("--all",), len(stored)),
    ):  # fmt: skip
        pushed = cli("chunks", "push", f"./{name}", *arguments, "-q").out.split()
        assert len(pushed) == count + 1  # the prompt's prefix
    for arguments, code in (
        (("./f", "ffffff"), 3), (("./f", "--source", "nothing"), 3), (("./f", "--all", "--model", "x"), 2), (("ftp://f",), 2),
        (("./no/such/f",), 3), (("./f", "--tier-key-file", "nokey"), 2), (("s3://id:secret@bucket",), 2),
    ):  # fmt: skip
        result = cli("chunks", "push", *arguments)
        assert result.code == code, result.err
        assert "hint: " in result.err
        assert "secret" not in result.err
    elsewhere()
    assert cli("chunks", "pull", "./d", "ffffff").code == 3
    assert cli("chunks", "pull", "./nothing").code == 3
    assert cli("chunks", "pull", "./d", "--source", "docs/alpha.md").code == 0
    assert set(cli("chunks", "ls", "-q").out.split()) == set(ids)


def test_a_pull_keeps_the_stores_version_of_a_document(
    cli: Cli, stored: list[str], docs: Path, elsewhere: Callable[[], None]
) -> None:
    cli("chunks", "push", "./usb")
    elsewhere()
    (docs / "alpha.md").write_text("# alpha\n\nanother text\n")
    assert cli("precompute", "docs", "--chunk-tokens", "40").code == 0
    own = cli("chunks", "ls", "--source", "*alpha*", "-q").out
    assert cli("chunks", "pull", "./usb").code == 0
    assert cli("chunks", "ls", "--source", "*alpha*", "-q").out == own
    assert cli("chunks", "pull", "./usb", "--replace").code == 0
    assert set(cli("chunks", "ls", "-q").out.split()) == set(stored)


def test_a_rejected_chunk_ends_in_4_after_the_others(
    cli: Cli, stored: list[str], elsewhere: Callable[[], None], tmp_path: Path
) -> None:
    cli("chunks", "push", "./usb")
    [file] = (tmp_path / "usb").glob(f"v1/*/{stored[0]}")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    elsewhere()
    result = cli("chunks", "pull", "./usb", "--json")
    assert result.code == 4
    assert [r["id"] for r in result.records if r["status"] == "rejected"] == [stored[0]]
    kept = {r["id"]: r["kv"] for r in cli("chunks", "ls", "--json").records}
    assert kept == {name: "none" if name == stored[0] else "stored" for name in stored}


def test_a_key_hides_and_is_needed(
    cli: Cli, stored: list[str], elsewhere: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("0123456789abcdef0123\n")
    (tmp_path / "other").write_text("fedcba9876543210fedc\n")
    assert cli("chunks", "push", "./usb", "--tier-key-file", "key").code == 0
    for file in (tmp_path / "usb").rglob("*"):
        assert not any(name in str(file) or (file.is_file() and name.encode() in file.read_bytes()) for name in stored)
        assert not file.is_file() or b"alpha" not in file.read_bytes()
    elsewhere()
    assert cli("chunks", "pull", "./usb").code == 2
    assert cli("chunks", "pull", "./usb", "--tier-key-file", "other").code == 2
    assert cli("chunks", "pull", "./usb", "--tier-key-file", "key").code == 0
    assert set(cli("chunks", "ls", "-q").out.split()) == set(stored)


def test_precompute_and_ask_over_a_tier(
    cli: Cli, docs: Path, elsewhere: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHEBLEND_TIER", f"file://{tmp_path}/tier")
    monkeypatch.setenv("CACHEBLEND_TIER_DEADLINE", "60")  # no test waits for it
    ids = cli("precompute", "docs", "--chunk-tokens", "40", "-q").out.split()
    assert len(objects(tmp_path / "tier")) == len(set(ids)) + 1
    asked = ("ask", "who?", "--chunks", ids[0], "--max-tokens", "3", "--json")
    [before] = cli(*asked).records
    assert "tier" not in before
    assert cli("chunks", "prune", "--to-size", "0").code == 0
    [found] = cli(*asked).records
    assert (found["answer"], found["tier"]["found"], found["tier"]["taken"]) == (before["answer"], 2, 2)
    assert problems(found) == []
    elsewhere()
    assert cli("precompute", "docs", "--chunk-tokens", "40").code == 0
    [facts] = cli("chunks", "stats", "--json").records
    assert (facts["tier"]["chunks"], facts["tier"]["encrypted"]) == (len(set(ids)) + 1, False)
    assert cli("chunks", "prune", "--tier").code == 2
    assert len(objects(tmp_path / "tier")) == len(set(ids)) + 1
    old = objects(tmp_path / "tier")[0]
    os.utime(old, (time.time() - 9e5,) * 2)
    assert cli("chunks", "prune", "--tier", "--older-than", "10d", "--json").records[0]["removed"] == 1
    assert not old.exists()


def test_a_tier_in_the_settings_holds_no_credentials(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_TIER", "s3://id:secret@bucket/x")
    result = cli("config", "show")
    assert (result.code, "secret" in result.out + result.err) == (2, False)
