"""Chunks encoded on a GPU: the bytes of a CPU, without a synchronisation, while the next launch is computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cacheblend_store import CodecError
from cacheblend_store.format import codecs
from cacheblend_store.format.blobs import CODECS
from cacheblend_store.format.codecs import encode_kv
from fake_gpu import FakeGpu, installed

from cacheblend_cli.collect import encoding, prefill
from cacheblend_cli.collect.encoding import encode_chunk, encoded
from cacheblend_cli.collect.prefill import ChunkKV

SHAPES = ((2, 64), (2, 64), (1, 80), (2, 64))  # KV heads and head_dim by layer


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    tables = codecs.level_table, codecs._grid, codecs._middle, codecs._rotation  # of this device alone
    with installed() as gpu:
        yield gpu
    for table in tables:
        table.cache_clear()


def chunk(num_tokens: int, seed: int = 0) -> ChunkKV:
    """K and V in bf16, some rows and channels of which are outliers."""
    numbers = torch.Generator().manual_seed(seed)
    k, v = ([torch.randn(num_tokens, *s, generator=numbers).bfloat16() for s in SHAPES] for _ in range(2))
    k[0][0, 0], v[3][num_tokens // 2] = 5.0, 0.0
    v[1][:, 0, 3] *= 40
    return ChunkKV(bytes([seed]), k, v)


def on(gpu: FakeGpu, kv: ChunkKV) -> ChunkKV:
    k, v = ([gpu.tensor(x.clone()) for x in parts] for parts in (kv.k, kv.v))
    return ChunkKV(kv.key, k, v)


def on_cpu(kv: ChunkKV, codec: str) -> list[bytes]:
    return [encode_kv(k, v, codec) for k, v in zip(kv.k, kv.v, strict=True)]


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_are_those_of_a_cpu_and_nothing_waits(gpu: FakeGpu, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_VALUES", 80 * 2 * 64 * 3)  # of 80 tokens one layer at a time, of fewer several
    chunks = [chunk(n, seed) for seed, n in enumerate((5, 40, 1, 80))]
    encode_chunk(on(gpu, chunks[0]), codec)  # makes the tables
    moved = [on(gpu, kv) for kv in chunks]
    gpu.clear()
    found = list(encoded(moved, codec))
    assert found == [(kv.key, on_cpu(kv, codec)) for kv in chunks]
    assert not gpu.found("synchronisation")
    assert not gpu.found("pageable copy")
    assert sum(gpu.found("event wait").values()) == len(chunks)
    assert not gpu.errors


def test_the_next_launch_is_computed_before_bytes_are_handled(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "OTHER_PACK_TOKENS", 60)
    taken: list[int] = []

    def launches(chunks: list[ChunkKV]) -> Iterator[ChunkKV]:
        for kv in chunks:
            taken.append(kv.key[0])
            yield kv

    chunks = [chunk(20, seed) for seed in range(7)]
    seen = [(key[0], len(taken)) for key, _ in encoded(launches([on(gpu, kv) for kv in chunks]), "int7")]
    assert seen == [(0, 4), (1, 5), (2, 6), (3, 7), (4, 7), (5, 7), (6, 7)]
    taken.clear()
    assert [(key[0], len(taken)) for key, _ in encoded(launches(chunks), "int7")] == [(i, i + 1) for i in range(7)]


@pytest.mark.parametrize(("codec", "bad"), [("int7", float("nan")), ("float8_e4m3", float("inf"))])
@pytest.mark.parametrize("part", ["k", "v"])
def test_the_chunk_that_a_codec_cannot_hold_is_refused(gpu: FakeGpu, codec: str, bad: float, part: str) -> None:
    """Chunks before it are whole, and the message is a CPU's."""
    chunks = [chunk(9, seed) for seed in range(3)]
    getattr(chunks[1], part)[2][4, 0, 5] = bad
    with pytest.raises(CodecError) as alone:
        on_cpu(chunks[1], codec)
    found = encoded([on(gpu, kv) for kv in chunks], codec)
    assert next(found) == (chunks[0].key, on_cpu(chunks[0], codec))
    with pytest.raises(CodecError) as caught:
        next(found)
    assert (caught.value.message, caught.value.hint) == (alone.value.message, alone.value.hint)


def test_without_memory_on_the_gpu_a_chunk_is_encoded_on_the_host(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = encoding.coded_unchecked, iter(range(100))

    def full(*given: object) -> object:
        if next(calls) == 3:  # in the second chunk
            raise torch.OutOfMemoryError
        return plain(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(encoding, "coded_unchecked", full)
    chunks = [chunk(9, seed) for seed in range(3)]
    assert list(encoded([on(gpu, kv) for kv in chunks], "int7")) == [(kv.key, on_cpu(kv, "int7")) for kv in chunks]


@pytest.mark.parametrize("forgotten", ["synchronize", "wait_event"])
def test_a_wait_that_is_missing_is_found_out(gpu: FakeGpu, forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of the fake GPU: the host reads the bytes after their copy, which comes after the encoding."""
    of = type(torch.cuda.Event()) if forgotten == "synchronize" else type(torch.cuda.current_stream())
    monkeypatch.setattr(of, forgotten, lambda *of_it: None)
    list(encoded([on(gpu, chunk(9))], "int7"))
    assert any("race" in message for _, message, _ in gpu.errors)
