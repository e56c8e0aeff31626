"""--kv-dtype auto stores few bits, close to a full prefill; and stores of former versions, whose default was exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cacheblend_store import ChunkStore

from cacheblend_cli.prompt import collection

Cli = Callable[..., Any]
pytestmark = pytest.mark.default_codec
CLOSE = 0.005
"""KL that stored KV may cost where exact KV costs none: ten times what real models lose, since the demo's heads are
small."""


def codecs_of(store: Path) -> dict[str, set[str]]:
    with ChunkStore.open(store) as opened:
        found: dict[str, set[str]] = {}
        for manifest in opened.chunks(prefixes=True):
            found.setdefault(manifest.context, set()).add(manifest.codec)
        return found


def test_the_default_is_stored_planned_and_shown(cli: Cli, docs: Path, tmp_path: Path) -> None:
    planned = json.loads(cli("precompute", "docs", "--dry-run", "--json", "--dtype", "float32").out)
    exact = json.loads(
        cli("precompute", "docs", "--dry-run", "--json", "--kv-dtype", "exact", "--dtype", "float32").out
    )
    stored = cli("precompute", "docs", "--dtype", "float32", "--json")
    assert stored.code == 0, stored.err
    assert codecs_of(tmp_path / "store") == {"prefix": {"float32"}, "document": {collection.DEFAULT_CODEC}}
    assert collection.DEFAULT_CODEC in cli("chunks", "stats").out
    num_bytes = sum(record["bytes"] for record in stored.records)
    assert planned["new"]["bytes"] == num_bytes
    assert 3 * num_bytes < exact["new"]["bytes"]
    again = cli("precompute", "docs", "--dtype", "float32").err
    assert f"{len(stored.records)} unchanged" in again
    assert "new" not in again


def test_default_kv_is_close_where_exact_kv_is_exact(cli: Cli, docs: Path) -> None:
    """One chunk, and chunks of one document in order, at ratio 0; at ratio 1 nothing stored is used but the prefix's,
    which is exact."""
    ids = cli("precompute", "docs", "--chunk-tokens", "40", "--dtype", "float32", "-q").out.split()
    for chunks in (ids[0], ",".join(ids[:2])):
        for ratio, most in (("0", CLOSE), ("1", 1e-6)):
            asked = ("ask", "alpha", "--chunks", chunks, "--ratio", ratio, "--verify", "--max-tokens", "4", "--json")
            answer = cli(*asked, "--dtype", "float32").records[0]
            assert answer["verify"]["kl"] <= most
            assert answer["cached_tokens"] > 0 or ratio == "1"


def test_exact_kv_of_former_versions_is_used_and_converted(
    cli: Cli, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as former:
        former.setattr(collection, "DEFAULT_CODEC", collection.EXACT)
        assert cli("precompute", "docs", "--dtype", "float32").code == 0
    answer = cli("ask", "alpha", "--max-tokens", "1", "--json", "--dtype", "float32").records[0]
    assert {chunk["status"] for chunk in answer["chunks"]} <= {"exact", "blended"}
    assert codecs_of(tmp_path / "store")["document"] == {"float32"}
    again = cli(
        "precompute", "--dtype", "float32"
    )  # the folders that are known, with nothing to confirm: nothing is computed
    assert again.code == 0, again.err
    assert "converted" in again.err
    assert collection.DEFAULT_CODEC in codecs_of(tmp_path / "store")["document"]
    answer = cli("ask", "alpha", "--max-tokens", "1", "--json", "--dtype", "float32").records[0]
    assert {chunk["status"] for chunk in answer["chunks"]} <= {"exact", "blended"}
    assert len({chunk["id"] for chunk in answer["chunks"]}) == len(answer["chunks"])


def test_a_setting_that_names_a_codec_goes_first(cli: Cli, docs: Path, tmp_path: Path) -> None:
    for name, codec in (("exact", "float32"), ("bfloat16", "bfloat16"), ("int4", "int4")):
        assert cli("precompute", "docs", "--kv-dtype", name, "--dtype", "float32", "--yes").code == 0
        assert codec in codecs_of(tmp_path / "store")["document"]
    refused = cli("precompute", "docs", "--kv-dtype", "int5")
    assert refused.code == 2
    assert "known: auto, exact, float32" in refused.err
    assert "int7" in refused.err
