"""Chunks named by the ids of another model's records."""

from __future__ import annotations

from pathlib import Path

import pytest
from bare_store import bare_writing
from cacheblend_store import BadBlob, ChunkStore
from checkpoints import write_checkpoint

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams


def test_a_damaged_record_of_this_model_is_computed_and_replaced(tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b")):
        write_checkpoint(tmp_path / name, "llama-gqa", seed=seed)
    theirs, ours = (Engine.load(EngineConfig(model=str(tmp_path / name), block_size=16)) for name in ("a", "b"))
    document = tmp_path / "d.md"
    document.write_text("Mara works in Lyon. " * 8)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        for engine in (theirs, ours):
            engine.precompute(
                store, [str(document)], PrecomputeOptions(chunk_tokens=64, context="sink"), lambda event: None
            )
        named = [m.key for m in store.chunks() if m.model == theirs.model.fingerprint]
        own = [m.key for m in store.chunks() if m.model == ours.model.fingerprint]
        assert len(named) == len(own) > 0

        def ask(mode: str = "blend") -> list[int]:
            return ours.run_alone(
                store, AskRequest("where does Mara work?", named, BlendParams(mode), sampling)
            ).generated_ids

        blended, full = ask(), ask("full")
        with bare_writing(store) as (txn, dbs):
            for key in own:
                value = bytearray(txn.get(key, db=dbs["chunks"]))
                value[40] ^= 4
                txn.put(key, bytes(value), db=dbs["chunks"])
        with pytest.raises(BadBlob):
            store.get_chunk(own[0])
        assert ask() == full, "every chunk is computed"
        assert store.damaged_keys() == []
        assert ask() == blended
        assert all(store.has_kv(key) for key in own)
