"""precompute --kv-dtype over documents whose KV is stored in a finer codec: it is converted, not computed again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheblend_store import ChunkStore
from cacheblend_store.format.codecs import decode_kv, encode_kv, view_kv
from cacheblend_store.format.keys import blob_key
from safetensors.torch import load

from cacheblend_cli.collect import collector

Cli = Callable[..., Any]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens of the chunks that are computed."""
    found: list[int] = []
    collect = collector.Collector.collect

    def counted(self: Any, chunks: Any) -> Any:
        found.extend(len(planned.chunk.token_ids) for planned in chunks)
        return collect(self, chunks)

    monkeypatch.setattr(collector.Collector, "collect", counted)
    return found


def kv_of(path: Path, codec: str) -> dict[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]]:
    with ChunkStore.open(path) as store, store.read() as reader:
        return {
            m.token_ids: [
                decode_kv(view_kv(reader.layer(m, i), m.codec, m.num_tokens, *m.shapes[i]), m.codec)
                for i in range(m.num_layers)
            ]
            for m in store.chunks()
            if m.codec == codec
        }


def test_finer_kv_is_converted(cli: Cli, docs: Path, tmp_path: Path, computed: list[int]) -> None:
    cli("precompute", "docs", "--chunk-tokens", "40", "--kv-dtype", "float32")
    tokens, store = sum(computed), tmp_path / "store"
    computed.clear()
    planned = json.loads(cli("precompute", "docs", "--kv-dtype", "int6", "--dry-run", "--json").out)
    assert planned["converted"]["tokens"] == tokens
    said = cli("precompute", "docs", "--kv-dtype", "int6")  # nothing to confirm: nothing is computed
    assert said.code == 0, said.err
    assert f"{planned['converted']['chunks']} converted" in said.err
    assert f"{tokens} tokens not computed again" in said.err
    assert not computed
    wanted, found = kv_of(store, "float32"), kv_of(store, "int6")
    assert wanted.keys() == found.keys()
    for ids, layers in wanted.items():
        for (k, v), (k_found, v_found) in zip(layers, found[ids], strict=True):
            k_want, v_want = decode_kv(load(encode_kv(k, v, "int6")), "int6")
            assert torch.equal(k_want, k_found)
            assert torch.equal(v_want, v_found)
    assert cli("chunks", "verify").code == 0
    assert " new" not in cli("precompute", "docs", "--kv-dtype", "int6").err


def test_coarser_kv_is_not(cli: Cli, docs: Path, computed: list[int]) -> None:
    cli("precompute", "docs", "--kv-dtype", "int4")
    tokens = sum(computed)
    for codec in ("int3", "int6", "float32"):
        computed.clear()
        assert cli("precompute", "docs", "--kv-dtype", codec, "--yes").code == 0
        assert sum(computed) == tokens
    computed.clear()
    assert cli("precompute", "docs", "--kv-dtype", "int8").code == 0  # float32 is there now
    assert not computed


def test_what_is_missing_damaged_or_changed_is_computed(
    cli: Cli, docs: Path, tmp_path: Path, computed: list[int]
) -> None:
    cli("precompute", "docs", "--chunk-tokens", "40", "--kv-dtype", "float32", "--context", "sink")
    total = sum(computed)
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        evicted, damaged, *_ = sorted(store.chunks(), key=lambda m: m.key)
        store.evict_chunks([evicted.key])
        store.transact(lambda writer: writer.put("blobs", blob_key(damaged.key, 0), b"x" * damaged.blob_sizes[0]))
    computed.clear()
    assert cli("precompute", "docs", "--kv-dtype", "int6", "--yes").code == 0
    assert sorted(computed) == sorted((evicted.num_tokens, damaged.num_tokens))
    computed.clear()
    assert cli("precompute", "docs", "--kv-dtype", "int4", "--force", "--yes").code == 0
    assert sum(computed) == total


def test_an_interrupted_conversion_goes_on(
    cli: Cli, docs: Path, tmp_path: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("precompute", "docs", "--chunk-tokens", "40", "--kv-dtype", "float32")
    computed.clear()
    whole = collector.Collector._whole
    done: list[bytes] = []

    def interrupted(self: Any, planned: Any, kv: Any) -> Any:
        if planned.context != "prefix":
            done.append(planned.key)
            if len(done) == 3:
                raise KeyboardInterrupt
        return whole(self, planned, kv)

    with monkeypatch.context() as patch:
        patch.setattr(collector.Collector, "_whole", interrupted)
        assert cli("precompute", "docs", "--kv-dtype", "int8").code == 130
    with ChunkStore.open(tmp_path / "store") as store:
        chunks = {replace(m, text="").token_ids for m in store.chunks() if m.codec == "float32"}
    assert cli("precompute", "docs", "--kv-dtype", "int8").code == 0
    assert kv_of(tmp_path / "store", "int8").keys() == chunks
    assert not computed
