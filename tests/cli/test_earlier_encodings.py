"""Stores of earlier versions, whose int8 and int4 are encoded otherwise: they say so, and chunks are computed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cacheblend_store import ChunkStore
from cacheblend_store.format import keys

Cli = Callable[..., Any]


@pytest.mark.parametrize("codec", ["int8", "int4"])
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


@pytest.mark.parametrize("codec", ["bfloat16", "float8_e4m3", "int6"])
def test_the_prefix_is_stored_exactly(cli: Cli, docs: Path, tmp_path: Path, codec: str) -> None:
    said = cli("precompute", "docs", "--kv-dtype", codec, "--dtype", "float32", "--json")
    assert said.code == 0, said.err
    with ChunkStore.open(tmp_path / "store") as store:
        codecs = {m.context: m.codec for m in store.chunks(prefixes=True)}
    assert codecs == {"prefix": "float32", "document": codec}
