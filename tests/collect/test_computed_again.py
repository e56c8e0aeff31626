"""Chunks computed again equal stored ones, in each codec and context."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest
from cacheblend_store import ChunkStore
from checkpoints import WORDS
from computed_again import differing_chunks
from forging import forge

from cacheblend_cli import Engine
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.settings.fields import KV_DTYPES


@pytest.mark.parametrize(("kv_dtype", "context"), zip(KV_DTYPES, cycle(("sink", "document", "neighbours"))))
def test_stored_kv_is_what_the_model_computes(tmp_path: Path, kv_dtype: str, context: str) -> None:
    for name in "ab":
        paragraphs = (f"{name} {p} " + " ".join(WORDS[p : p + 8]) + "." for p in range(4))
        (tmp_path / f"{name}.md").write_text("\n\n".join(paragraphs))
    options = PrecomputeOptions(chunk_tokens=40, context=context, kv_dtype=kv_dtype)
    with Engine.load("handbook") as engine, ChunkStore.open(tmp_path / "store", mode="write") as store:
        engine.precompute(store, [str(tmp_path / f"{name}.md") for name in "ab"], options, lambda event: None)
        collection = engine.collection(store).in_codec(kv_dtype)
        assert not differing_chunks(collection, store)
        last = list(store.chunks())[-1]
        store.close()
        forge(tmp_path / "store", last.id)
        with ChunkStore.open(tmp_path / "store") as forged:
            assert differing_chunks(collection, forged) == {last.id: "2 v"}
