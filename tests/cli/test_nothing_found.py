"""`ask` without results names what is stored, how it differs from the request, and what to do."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapters import write_adapter
from bare_store import bare_writing
from cacheblend_store import ChunkStore

Cli = Callable[..., Any]


@pytest.mark.parametrize(
    ("stored_with", "asked_with", "was", "now"),
    [
        ((), ("--salt", "me"), "no --salt", "--salt"),
        (("--salt", "me"), (), "--salt", "no --salt"),
        (("--salt", "me"), ("--salt", "you"), "another --salt", "--salt"),
        (("--dtype", "bfloat16", "--salt", "me"), (), "--dtype bfloat16 and --salt", "--dtype float32 and no --salt"),
    ],
)
def test_the_difference_is_named(
    cli: Cli, docs: Path, model: Path, stored_with: tuple[str], asked_with: tuple[str], was: str, now: str
) -> None:
    stored = cli("precompute", "docs", *stored_with, "-q").out.split()
    assert cli("ask", "alpha", "--max-tokens", "1", *stored_with).code == 0
    refused = cli("ask", "alpha", *asked_with)
    assert refused.code == 3
    assert f"{len(stored)} chunks are stored for {model} with {was}; you ask for {model} with {now}\n" in refused.err
    assert "precompute" in refused.err.rpartition("hint: ")[2]


def test_another_kv_dtype_is_named(cli: Cli, docs: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("precompute", "docs", "--kv-dtype", "int4")
    monkeypatch.setenv("CACHEBLEND_KV_DTYPE", "exact")
    refused = cli("ask", "alpha")
    assert refused.code == 3
    assert f"stored for {model} with kv_dtype int4; you ask for {model} with kv_dtype float32" in refused.err


def test_another_model_is_named(cli: Cli, docs: Path, model: Path, tmp_path: Path) -> None:
    cli("precompute", "docs/alpha.md")
    other = tmp_path / "other-model"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 777.0, "rope_parameters": None}))
    refused = cli("ask", "alpha", "--model", str(other))
    assert refused.code == 3, refused.err
    assert f"{model}" in refused.err
    assert f"{other}" in refused.err
    assert f"--model {model}" in refused.err


def test_another_template_is_named(cli: Cli, docs: Path, model: Path, tmp_path: Path) -> None:
    own = tmp_path / "model"
    shutil.copytree(model, own)
    cli("precompute", "docs/alpha.md", "--model", str(own))
    template = "{{ 'The present moment.' }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (own / "chat_template.jinja").write_text(template)
    refused = cli("ask", "alpha", "--model", str(own))
    assert refused.code == 3, refused.err
    assert "hint: " in refused.err


def test_words_that_nothing_has_are_not_taken_for_a_difference(cli: Cli, stored: list[str], model: Path) -> None:
    refused = cli("ask", "qqqqzzz")
    assert refused.code == 3
    assert f"{len(stored)} chunks" in refused.err


def test_an_empty_store_says_so(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    cli("chunks", "rm", "--all", "--yes")
    refused = cli("ask", "alpha")
    assert refused.code == 3
    assert f"{tmp_path / 'store'}" in refused.err


def test_the_nearest_of_several_is_named(cli: Cli, docs: Path, model: Path) -> None:
    first = cli("precompute", "docs", "--dtype", "bfloat16", "--salt", "me", "-q").out.split()
    second = cli("precompute", "docs/alpha.md", "--salt", "me", "-q").out.split()
    refused = cli("ask", "alpha")
    assert {str(len(first)), str(len(second))} <= set(re.findall(r"\d+", refused.err))


def test_an_adapter_is_named(cli: Cli, docs: Path, model: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "lora", model, ("q_proj", "v_proj"))
    cli("precompute", "docs/alpha.md")
    refused = cli("ask", "alpha", "--lora", "lora")
    assert refused.code == 3, refused.err
    assert f"1 chunk is stored for {model} with no --lora" in refused.err
    assert "--lora" in refused.err
    assert cli("precompute", "docs/alpha.md", "--lora", "lora").code == 0
    assert cli("ask", "alpha", "--lora", "lora", "--max-tokens", "1", "--verify").code == 0


@pytest.mark.parametrize("command", [("search", "alpha"), ("ask", "alpha", "--local")])
def test_damaged_chunks_are_named_if_only_they_match(
    cli: Cli, stored: list[str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    with ChunkStore.open(tmp_path / "store", mode="write") as store, bare_writing(store) as (transaction, dbs):
        for key in map(bytes.fromhex, stored):
            record = bytes(transaction.get(key, db=dbs["chunks"]))
            transaction.put(key, record[:-1] + bytes([record[-1] ^ 1]), db=dbs["chunks"])
    (tmp_path / "store" / "search.sqlite3").unlink()  # an index made before the damage has the chunks
    result = cli(*command)
    assert result.code == 3
    assert f"{len(stored)} stored chunks are damaged and not searched; repair: " in result.err
