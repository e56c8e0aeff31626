"""Chunks that must not be taken for one another's: of two salts, and of two codecs, in one store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
SALT = "tenant-b-correct-horse"


def ask(cli: Cli, *arguments: str) -> dict:
    result = cli("ask", "alpha?", "--max-tokens", "2", "--json", *arguments)
    assert result.code == 0, result.err
    return result.records[0]


def test_salts_keep_tenants_apart(cli: Cli, docs: Path, tmp_path: Path) -> None:
    ours = cli("precompute", "docs", "--chunk-tokens", "40", "-q").out.split()
    theirs = cli("precompute", "docs", "--chunk-tokens", "40", "-q", "--salt", SALT).out.split()
    assert len(ours) == len(theirs) > 1
    assert not set(ours) & set(theirs)
    found = ask(cli)
    assert {c["id"] for c in found["chunks"]} <= set(ours)
    assert {c["id"] for c in ask(cli, "--salt", SALT)["chunks"]} <= set(theirs)
    assert cli("ask", "alpha?", "--salt", "nobody", "--json").code == 3
    named = ask(cli, "--chunks", ",".join(theirs[:2]), "--no-save")  # KV of another salt is not used
    assert SALT.encode() not in (tmp_path / "store" / "data.mdb").read_bytes()
    assert {c["id"] for c in named["chunks"]} <= set(ours)


def test_chunks_of_different_codecs_in_one_prompt(cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = cli("precompute", "docs/alpha.md", "--chunk-tokens", "40", "--kv-dtype", "int4", "-q").out.split()
    exact = cli("precompute", "docs/beta.md", "--chunk-tokens", "40", "--kv-dtype", "exact", "-q").out.split()
    codecs = {r["id"]: r["kv_dtype"] for r in cli("chunks", "ls", "--json").records}
    assert {codecs[i] for i in small} == {"int4"}
    assert {codecs[i] for i in exact} == {"float32"}
    for codec in ("auto", "float8_e4m3"):  # what is stored is used, whatever would be stored now
        monkeypatch.setenv("CACHEBLEND_KV_DTYPE", codec)
        found = ask(cli, "--chunks", ",".join([small[0], exact[0], small[1]]))
        assert "computed" not in {c["status"] for c in found["chunks"]}
        assert found["cached_tokens"] >= sum(c["tokens"] for c in found["chunks"])
        assert found["kv_bytes_loaded"] > 0
