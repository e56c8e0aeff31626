"""A model whose layers differ: in the pool, in the store, in the sizes that are told beforehand, and when swapped
out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cacheblend_store import ChunkStore
from cacheblend_store.upkeep.verify import verify
from checkpoints import WORDS, write_checkpoint
from computed_again import differing_chunks

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.pool import KVPool, bytes_per_token
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

HEADS = [(2, 16), (2, 16), (2, 32)]  # of the layers with K and V of their own: the last three of six use another's
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixed")
    write_checkpoint(root / "model", "gemma4")
    for name in "ab":
        (root / f"{name}.md").write_text("\n\n".join(" ".join(WORDS[n : n + 9]) + f" {name}{n}." for n in range(3)))
    return root


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(EngineConfig(model=str(folder / "model"), block_size=16, dtype="float32"))


def precompute(engine: Engine, store: ChunkStore, folder: Path, codec: str = "exact", dry_run: bool = False) -> int:
    """Return the bytes of KV that the run reports."""
    options = PrecomputeOptions(chunk_tokens=40, context="sink", kv_dtype=codec, dry_run=dry_run)
    return engine.precompute(store, [str(folder / "a.md"), str(folder / "b.md")], options, lambda event: None).bytes


@pytest.mark.parametrize("codec", ["exact", "float8_e4m3", "int7", "int4"])
def test_what_is_stored_is_what_a_dry_run_says(engine: Engine, folder: Path, tmp_path: Path, codec: str) -> None:
    engine.runtime.config = replace(engine.runtime.config, kv_dtype=codec)
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        said = precompute(engine, store, folder, codec, dry_run=True)
        precompute(engine, store, folder, codec)
        chunks = list(store.chunks())
        assert len(chunks) > 2
        for chunk in chunks:
            assert list(chunk.shapes) == HEADS
            assert chunk.blob_sizes[0] == chunk.blob_sizes[1] < chunk.blob_sizes[2]
        assert said == sum(chunk.num_bytes for chunk in chunks)
        assert not differing_chunks(engine.collection(store), store)
        question = AskRequest("who?", [chunk.key for chunk in chunks[:3]], BlendParams(ratio=0.3), GREEDY)
        assert engine.run_alone(store, question).kv_bytes_loaded > 0
        assert verify(store).ok


def test_a_layer_without_kv_of_its_own_has_another_layers_pool(engine: Engine) -> None:
    decoder = engine.runtime.decoder
    pool = KVPool.of(decoder, 2, 16)
    assert [tuple(pool.layers[i].k.shape[2:]) for i in range(3)] == HEADS
    held = [id(cache) for cache in pool.layers]
    assert [held.index(one) for one in held] == [0, 1, 2, 1, 1, 2]
    assert bytes_per_token(decoder) * 2 * 16 == sum(t.numel() * t.itemsize for t in pool.tensors)


def test_swapped_out_kv_is_restored(engine: Engine) -> None:
    pool = KVPool.of(engine.runtime.decoder, 4, 16)
    for tensor in pool.tensors:
        tensor.normal_()
    before = [tensor[[3, 1]].clone() for tensor in pool.tensors]
    parts = pool.swap_out([3, 1])
    for tensor in pool.tensors:
        tensor.zero_()
    pool.swap_in([0, 2], parts)
    for tensor, was in zip(pool.tensors, before, strict=True):
        assert torch.equal(tensor[[0, 2]], was)


def test_a_check_layer_has_kv_of_its_own(engine: Engine, folder: Path, tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        precompute(engine, store, folder)
        keys = [chunk.key for chunk in store.chunks()]
        with pytest.raises(UsageError):
            engine.run_alone(
                store, AskRequest("who?", keys, BlendParams(ratio=0.3, selector="hkvd", check_layer=3), GREEDY)
            )
