"""All callers store KV in the same way: the collection's record and the prefix are stored with the first chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cacheblend_documents import Converted
from cacheblend_store import ChunkStore
from checkpoints import write_checkpoint

from cacheblend_cli.collect.collector import Collector
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.collect.texts import plan_texts
from cacheblend_cli.corpus.documents import Document
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.samples import Context, Sample
from cacheblend_cli.prompt.records import kept_records
from cacheblend_cli.types import AskRequest, SamplingParams, TextDocument

TEXT = "Mara leads billing. She works in Bergen, near the harbor.\n"
Storing = Callable[[Engine, ChunkStore, Path], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("storing-model") / "model"
    write_checkpoint(path, "qwen3", seed=3)
    return path


def loaded(model: Path, kv_dtype: str) -> Engine:
    return Engine.load(EngineConfig(model=str(model), device="cpu", dtype="float32", block_size=16, kv_dtype=kv_dtype))


def precomputed(engine: Engine, store: ChunkStore, folder: Path) -> None:
    (folder / "page.md").write_text(TEXT)
    engine.precompute(store, [str(folder / "page.md")], PrecomputeOptions(chunk_tokens=128), lambda event: None)


def put(engine: Engine, store: ChunkStore, folder: Path) -> None:
    putting = engine.put(store, Document("put/page", Converted(TEXT)))
    while putting.collect():
        pass
    putting.commit()


def asked(engine: Engine, store: ChunkStore, folder: Path) -> None:
    ask = AskRequest("Who?", documents=(TextDocument(TEXT),), sampling=SamplingParams(max_tokens=1))
    assert [chunk.status for chunk in engine.run_alone(store, ask).chunks] == ["computed"]


def evaluated(engine: Engine, store: ChunkStore, folder: Path) -> None:
    sample = Sample("Who?", (), (Context(TEXT),))
    assert SampleChunks(engine, store, [sample]).store([sample], ["sink"]) == 1


@pytest.mark.parametrize("storing", [precomputed, put, asked, evaluated])
def test_the_collection_and_its_prefix_are_stored_with_any_chunk(model: Path, tmp_path: Path, storing: Storing) -> None:
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        engine = loaded(model, "exact")
        storing(engine, store, tmp_path)
        collection = engine.collection(store)
        assert set(kept_records(store)) == {collection.id}
        assert store.has_kv(collection.prefix_key)


def collector_of(engine: Engine, store: ChunkStore) -> Collector:
    return Collector(engine.collection(store), store)


def test_a_chunk_named_twice_is_stored_once(model: Path, tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        collector = collector_of(loaded(model, "auto"), store)
        [[chunk]] = plan_texts(collector.collection, [Document("a", Converted(TEXT))], CollectSettings())
        assert [stored.key for stored in collector.store([chunk, replace(chunk, source="b")])] == [chunk.key]
