"""Collecting a long sequence in pieces: the same KV, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import pytest
import torch
from checkpoints import write_checkpoint

from cacheblend_cli.collect import prefill
from cacheblend_cli.collect.prefill import ChunkKV, CollectSequence, Kept, collect, collect_prefix
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("model") / "model"
    write_checkpoint(path, "qwen2", max_position_embeddings=1024)
    return Engine.load(EngineConfig(model=str(path)))


def kept(*ends: int, first: int = 0) -> tuple[Kept, ...]:
    return tuple(Kept(bytes([n]), start, end) for n, (start, end) in enumerate(zip((first, *ends), ends, strict=False)))


@pytest.mark.parametrize("most", [1, 24, 60, 200])
def test_collecting_in_pieces_gives_the_same_kv(engine: Engine, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    decoder, ids = engine.model.decoder, tuple(5 + i * 7 % 200 for i in range(150))
    sequence = CollectSequence(ids, kept(40, 60, 110, 150, first=20))
    prefix = collect_prefix(decoder, [1, 2, 3])
    [*whole] = collect(decoder, prefix, [sequence])
    monkeypatch.setitem(prefill.PACK_TOKENS, "cpu", most)
    [*found] = collect(decoder, prefix, [sequence])
    assert [kv.key for kv in found] == [kv.key for kv in whole]
    for ours, theirs in zip(found, whole, strict=True):
        torch.testing.assert_close(ours.k, theirs.k)
        torch.testing.assert_close(ours.v, theirs.v)


def test_a_chunk_comes_when_it_is_done(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prefill.PACK_TOKENS, "cpu", 50)
    launches: list[int] = []
    plain = prefill.layer_by_layer

    def counted(decoder: object, rows: Sized, *rest: object) -> object:
        launches.append(len(rows))
        return plain(decoder, rows, *rest)

    monkeypatch.setattr(prefill, "layer_by_layer", counted)
    sequence = CollectSequence(tuple(range(5, 155)), kept(40, 60, 110, 150))
    found: Iterator[ChunkKV] = collect(engine.model.decoder, collect_prefix(engine.model.decoder, []), [sequence])
    seen = [(len(launches), kv.key[0]) for kv in found]
    assert launches == [40, 20, 50, 40]
    assert seen == [(1, 0), (2, 1), (3, 2), (4, 3)]
