"""Chunks collected as the mean over texts before them: what the study measures is what it says, and the first chunk
stays exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from cacheblend_store import ChunkStore
from checkpoints import WORDS, write_checkpoint
from study_modules import study_modules

from cacheblend_cli.collect import collector
from cacheblend_cli.collect.prefill import CollectSequence, Kept, collect_prefix
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.samples import Context, Sample

TEXTS = [" ".join(WORDS[n : n + 12]) + " " for n in range(4)]


@pytest.fixture
def script() -> Iterator[ModuleType]:
    with study_modules() as load:
        yield load("common_change")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    write_checkpoint(tmp_path / "model", "llama-gqa", max_position_embeddings=512)
    return Engine.load(EngineConfig(model=str(tmp_path / "model"), dtype="float32"))


def test_a_chunk_is_the_mean_over_the_texts_before_it(script: ModuleType, engine: Engine) -> None:
    decoder, encode = engine.model.decoder, engine.model.tokenizer.encode_text
    first, other = (tuple(encode(text)) for text in TEXTS[:2])
    prefix = collect_prefix(decoder, [1, 2, 3])
    sequences = [CollectSequence(ids, (Kept(bytes(16), 0, len(ids)),)) for ids in (first, other)]
    alone = list(collector.collect(decoder, prefix, sequences))
    with script.collected_behind(engine, TEXTS[2:], first):
        exact, mean = collector.collect(decoder, prefix, sequences)
    behind = []
    for text in TEXTS[2:]:
        ids = tuple(encode(text))
        [kv] = collector.collect(
            decoder, prefix, [CollectSequence(ids + other, (Kept(bytes(16), len(ids), len(ids + other)),))]
        )
        behind.append(kv)
    for layer in range(engine.model.spec.num_layers):
        assert torch.equal(exact.k[layer], alone[0].k[layer])
        for kept in ("k", "v"):
            expected = torch.stack([getattr(kv, kept)[layer] for kv in behind]).mean(0)
            torch.testing.assert_close(getattr(mean, kept)[layer], expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(mean.v[-1], alone[1].v[-1], atol=1e-4)


def test_the_first_chunk_of_the_prompt_needs_no_repair(script: ModuleType, engine: Engine, tmp_path: Path) -> None:
    sample = Sample("where?", ("x",), tuple(Context(text) for text in TEXTS[:3]))
    first = tuple(engine.model.tokenizer.encode_text(TEXTS[0]))
    with (
        ChunkStore.open(tmp_path / "store", mode="write") as store,
        script.collected_behind(engine, TEXTS[3:], first),
    ):
        request = script.resolved(engine, store, sample, SampleChunks(engine, store, [sample]))
        assert [chunk.status for chunk in request.plan.chunks] == ["exact", "blended", "blended"]
