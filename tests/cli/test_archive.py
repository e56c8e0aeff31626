"""chunks export and import: what a user sees."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Go on with another, empty store."""
    return lambda: monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "store2"))


def test_export_and_import_between_stores(cli: Cli, stored: list[str], elsewhere: Callable[[], None]) -> None:
    name = "x.tar"
    [facts] = cli("chunks", "export", name, "--json").records
    assert (facts["documents"], facts["signed"], facts["damaged"]) == (2, False, [])
    before = cli("search", "lead of billing", "--json").out
    listed = cli("chunks", "ls", "--json").out
    elsewhere()
    first = cli("chunks", "import", name, "--json")
    assert {r["status"] for r in first.records} == {"new"}
    assert set(stored) <= {r["id"] for r in first.records}
    assert "not signed" in first.err
    assert {r["status"] for r in cli("chunks", "import", name, "--json").records} == {"unchanged"}
    assert cli("chunks", "ls", "--json").out == listed
    assert cli("search", "lead of billing", "--json").out == before
    again = cli("precompute", "docs", "--chunk-tokens", "40", "--json").records
    assert {r["status"] for r in again} == {"unchanged"}
    asked = cli("ask", "who is the lead?", "--chunks", stored[0], "--max-tokens", "2", "--json").records[0]
    assert [c["status"] for c in asked["chunks"]] == ["exact"]


def test_what_to_export(cli: Cli, stored: list[str], model: Path) -> None:
    ids = cli("chunks", "ls", "--source", "*alpha*", "-q").out.split()
    assert (
        cli("chunks", "export", "a", "--source", "*alpha*", "--json").records[0]["chunks"] == len(ids) + 1
    )  # the prefix
    assert cli("chunks", "export", "b", "-", "--json", stdin="\n".join(ids)).records[0]["chunks"] == len(ids) + 1
    assert cli("chunks", "export", "c", stored[0][:10], "--json").records[0]["chunks"] == 2
    assert cli("chunks", "export", "d", "--model", str(model), "--json").records[0]["chunks"] == len(stored) + 1
    assert cli("chunks", "export", "e", "--all", "--json").records[0]["chunks"] == len(stored) + 1
    assert sorted(cli("chunks", "export", "g", "-q").out.split()) == sorted(stored)
    assert cli("chunks", "export", "h", stored[0][:10], "-q").out.split() == [stored[0]]
    for arguments, code in (
        (("f", "ffffff"), 3), (("f", "--source", "nothing"), 3), (("f", "--all", "--model", "x"), 2), (("a",), 2),
        (("no/such/f",), 3), (("f", "--sign-key", "nokey"), 3),
    ):  # fmt: skip
        result = cli("chunks", "export", *arguments)
        assert result.code == code, result.err
        assert "hint: " in result.err


def test_signed_exports(cli: Cli, stored: list[str], elsewhere: Callable[[], None], tmp_path: Path) -> None:
    (tmp_path / "key").write_text("0123456789abcdef0123\n")
    (tmp_path / "other").write_text("fedcba9876543210fedc\n")
    (tmp_path / "short").write_text("x\n")
    assert cli("chunks", "export", "s.tar", "--sign-key", "key").code == 0
    assert cli("chunks", "export", "u.tar").code == 0
    assert cli("chunks", "export", "t.tar", "--sign-key", "short").code == 2
    elsewhere()
    wrong = cli("chunks", "import", "s.tar", "--sign-key", "other")
    assert wrong.code == 4
    assert "signature is wrong" in wrong.err
    assert cli("chunks", "import", "u.tar", "--sign-key", "key").code == 4
    assert cli("chunks", "ls", "--json").records == []
    assert "signature is not checked" in cli("chunks", "import", "s.tar").err
    right = cli("chunks", "import", "s.tar", "--sign-key", "key")
    assert right.code == 0
    assert "warning" not in right.err


def test_a_rejected_chunk_ends_in_4_after_the_others(
    cli: Cli, stored: list[str], elsewhere: Callable[[], None], tmp_path: Path
) -> None:
    cli("chunks", "export", "x")
    with tarfile.open("x") as tar:
        member = tar.getmember(f"{stored[0]}.safetensors")
    with open("x", "r+b") as file:
        file.seek(member.offset_data + member.size - 1)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last ^ 1]))
    elsewhere()
    result = cli("chunks", "import", "x", "--json")
    assert result.code == 4
    assert [r["id"] for r in result.records if r["status"] == "rejected"] == [stored[0]]
    assert {r["id"] for r in cli("chunks", "ls", "--json").records} == set(stored) - {stored[0]}


def test_imports_that_cannot_be(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    assert cli("chunks", "import", "nothing").code == 3
    assert cli("chunks", "import", "docs").code == 4
    (tmp_path / "x.tar").write_bytes(b"x" * 2000)
    assert cli("chunks", "import", "x.tar").code == 4
    cli("chunks", "export", "y.tar")
    assert cli("chunks", "import", "y.tar", "--max-entries", "2").code == 4
    assert cli("chunks", "import", "y.tar", "--max-bytes", "1KB").code == 4
    assert cli("chunks", "import", "y.tar", "--max-bytes", "much").code == 2


def test_the_manifest_is_for_other_tools_too(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    cli("chunks", "export", "x")
    with tarfile.open("x") as tar:
        lines = [json.loads(line) for line in tar.extractfile("manifest.jsonl") or ()]
    chunks = {r["file"].removesuffix(".safetensors"): r["manifest"] for r in lines if r["type"] == "chunk"}
    [shown] = cli("chunks", "show", stored[0], "--json").records
    assert chunks[stored[0]]["text"] == shown["text"]
    assert chunks[stored[0]]["token_ids"] == shown["token_ids"]
    documents = [r["record"] for r in lines if r["type"] == "document"]
    assert {d["source"] for d in documents} == {"docs/alpha.md", "docs/beta.md"}
    assert {key for d in documents for key, *_ in d["chunks"]} == {chunks[name]["key"] for name in stored}


def test_an_archive_that_cannot_be_written_is_the_users_to_mend(cli: Cli, stored: list[str]) -> None:
    result = cli("chunks", "export", "x" * 250)  # the file beside it has a longer name
    assert result.code == 2
    assert "cannot be written" in result.err
