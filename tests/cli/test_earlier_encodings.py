"""Stores of earlier versions: chunks whose codec was encoded otherwise or was removed are named and computed again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cacheblend_store import ChunkStore
from cacheblend_store.format import keys
from cacheblend_store.upkeep import moving

from cacheblend_cli.collect.settings import CollectSettings, DocumentRoot
from cacheblend_cli.prompt import collection

Cli = Callable[..., Any]


@pytest.mark.parametrize("codec", ["int7", "int4"])
def test_an_earlier_encoding_is_named_and_replaced(
    cli: Cli, docs: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(keys, "BITS", {})  # as when codecs were not versioned
        old = cli("precompute", "docs", "--kv-dtype", codec, "-q").out.split()
    monkeypatch.setenv("CACHEBLEND_KV_DTYPE", codec)
    refused = cli("ask", "alpha")
    monkeypatch.delenv("CACHEBLEND_KV_DTYPE")
    assert refused.code == 3
    assert f"{len(old)} chunks are stored for {model} by an earlier version of cacheblend" in refused.err
    assert "precompute the documents" in refused.err
    named = cli("ask", "alpha", "--chunks", old[0], "--max-tokens", "1", "--json").records[0]
    assert [chunk["status"] for chunk in named["chunks"]] == ["computed"]
    assert any(f"no KV of this model in {codec}" in note for note in named["notes"])
    planned = cli("precompute", "docs", "--kv-dtype", codec, "--dry-run")
    assert f"--kv-dtype '{codec} of an earlier version'" in planned.out + planned.err
    again = cli("precompute", "--yes", "--json")  # with the settings of the folder
    assert again.code == 0, again.err
    ids = [record["id"] for record in again.records if "id" in record]
    assert len(ids) == len(old)
    assert not set(ids) & set(old)
    with ChunkStore.open(tmp_path / "store") as store:
        kept = {m.id: m.codec for m in store.chunks()}
    assert {kept[i] for i in ids} == {codec}
    assert not set(old) & set(kept)
    answered = cli("ask", "alpha", "--max-tokens", "1", "--json").records[0]
    assert all(chunk["status"] in ("exact", "blended") for chunk in answered["chunks"])


@pytest.mark.parametrize("codec", ["float8_e4m3", "int4"])
def test_the_prefix_is_stored_exactly(cli: Cli, docs: Path, tmp_path: Path, codec: str) -> None:
    said = cli("precompute", "docs", "--kv-dtype", codec, "--dtype", "float32", "--json")
    assert said.code == 0, said.err
    with ChunkStore.open(tmp_path / "store") as store:
        codecs = {m.context: m.codec for m in store.chunks(prefixes=True)}
    assert codecs == {"prefix": "float32", "document": codec}


@pytest.fixture(params=["int8", "int3", "float8_e5m2"])
def removed(request: pytest.FixtureRequest, cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A codec of earlier versions, in which the documents are stored."""
    with monkeypatch.context() as earlier:
        earlier.setattr(collection, "DEFAULT_CODEC", request.param)
        assert cli("precompute", "docs", "--chunk-tokens", "40").code == 0
    return str(request.param)


def test_chunks_in_a_removed_codec_are_computed_and_then_used(cli: Cli, removed: str) -> None:
    ask = ("ask", "alpha", "--max-tokens", "1", "--json")
    first, again = cli(*ask), cli(*ask)
    assert first.code == 0, first.err
    assert {c["status"] for c in first.records[0]["chunks"]} == {"computed"}
    notes = [note for note in first.records[0]["notes"] if f"stored as {removed}, which was removed" in note]
    assert len(notes) == len(first.records[0]["chunks"])
    assert {c["status"] for c in again.records[0]["chunks"]} <= {"exact", "blended"}


def test_chunks_in_a_removed_codec_are_listed_checked_replaced_and_freed(
    cli: Cli, docs: Path, removed: str, tmp_path: Path
) -> None:
    assert removed in cli("chunks", "stats").out
    assert {r["kv_dtype"] for r in cli("chunks", "ls", "--json").records} == {removed}
    assert cli("chunks", "verify").code == 0
    old = cli("chunks", "ls", "-q").out.split()
    assert cli("chunks", "rm", old[0]).code == 0
    refused = cli("precompute")
    assert refused.code == 2  # without a terminal: --yes
    assert f"--kv-dtype '{removed} of an earlier version'" in refused.err
    again = cli("precompute", "--yes", "--json")
    assert again.code == 0, again.err
    assert len(again.records) == len(old)  # cut as before
    with ChunkStore.open(tmp_path / "store") as store:
        assert {m.codec for m in store.chunks()} == {"float32"}


@pytest.mark.parametrize("pushed_by", ["this version", "an earlier version"])
def test_texts_of_chunks_in_a_removed_codec_come_from_a_tier(
    cli: Cli, removed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pushed_by: str
) -> None:
    tier = f"file://{tmp_path / 'tier'}"
    with monkeypatch.context() as earlier:
        earlier.setattr(moving, "REMOVED", moving.REMOVED if pushed_by == "this version" else ())
        assert cli("chunks", "push", tier).code == 0
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "other"))
    pulled = cli("chunks", "pull", tier)
    assert pulled.code == 0, pulled.err
    assert {r["kv"] for r in cli("chunks", "ls", "--json").records} == {"none"}
    monkeypatch.setenv("CACHEBLEND_TIER", tier)
    answered = cli("ask", "alpha", "--max-tokens", "1", "--json")
    assert answered.code == 0, answered.err
    assert {c["status"] for c in answered.records[0]["chunks"]} == {"computed"}


def test_a_remembered_dtype_that_was_removed_is_the_one_to_use_now(tmp_path: Path) -> None:
    root = DocumentRoot("docs", "model", "", CollectSettings(chunk_tokens=64, kv_dtype="int4"))
    memo = root.memo()
    settings = {**memo.value["settings"], "kv_dtype": "int3"}
    found = DocumentRoot.of_memo(replace(memo, value={**memo.value, "settings": settings}))
    assert found == root
