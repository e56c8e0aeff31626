"""--kv-dtype auto stores few bits, close to a full prefill; and stores of former versions, whose default was exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cacheblend_store import ChunkStore
from platformdirs import user_config_path

from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt import collection
from cacheblend_cli.settings.fields import REMOVED_KV_DTYPES

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


def test_exact_kv_of_former_versions_is_used_and_computed_again(
    cli: Cli, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as former:
        former.setattr(collection, "DEFAULT_CODEC", collection.EXACT)
        assert cli("precompute", "docs", "--dtype", "float32").code == 0
    answer = cli("ask", "alpha", "--max-tokens", "1", "--json", "--dtype", "float32").records[0]
    assert {chunk["status"] for chunk in answer["chunks"]} <= {"exact", "blended"}
    assert codecs_of(tmp_path / "store")["document"] == {"float32"}
    again = cli("precompute", "--dtype", "float32", "--yes")
    assert again.code == 0, again.err
    assert collection.DEFAULT_CODEC in codecs_of(tmp_path / "store")["document"]
    answer = cli("ask", "alpha", "--max-tokens", "1", "--json", "--dtype", "float32").records[0]
    assert {chunk["status"] for chunk in answer["chunks"]} <= {"exact", "blended"}
    assert len({chunk["id"] for chunk in answer["chunks"]}) == len(answer["chunks"])


def test_a_setting_that_names_a_codec_goes_first(cli: Cli, docs: Path, tmp_path: Path) -> None:
    for name, codec in (("exact", "float32"), ("float8_e4m3", "float8_e4m3"), ("int4", "int4")):
        assert cli("precompute", "docs", "--kv-dtype", name, "--dtype", "float32", "--yes").code == 0
        assert codec in codecs_of(tmp_path / "store")["document"]
    refused = cli("precompute", "docs", "--kv-dtype", "int5")
    assert refused.code == 2
    assert "known: auto, exact, float8_e4m3" in refused.err
    assert "int7" in refused.err


@pytest.mark.parametrize(("name", "instead"), REMOVED_KV_DTYPES.items())
def test_a_removed_name_says_what_to_use(
    cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch, name: str, instead: str
) -> None:
    def check(message: str, hint: str | None) -> None:
        assert f"{name!r}" in message
        assert "was removed" in message
        assert (hint or "").endswith(f"use {instead}")

    flag, command = cli("precompute", "docs", "--kv-dtype", name), cli("config", "set", "kv_dtype", name)
    settings = user_config_path("cacheblend") / "config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text(f'kv_dtype = "{name}"\n')
    file = cli("precompute", "docs")
    settings.unlink()
    monkeypatch.setenv("CACHEBLEND_KV_DTYPE", name)
    variable = cli("ask", "alpha")
    for refused in (flag, command, file, variable):
        assert refused.code == 2
        check(*refused.err.strip().split("hint: "))
    for make in (EngineConfig, CollectSettings):
        with pytest.raises(UsageError) as caught:
            make(kv_dtype=name)
        check(caught.value.message, caught.value.hint)
