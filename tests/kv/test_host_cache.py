"""The host cache on a fake GPU: what it serves is what the store has now, and nothing is read twice."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheblend_store import BadBlob, ChunkManifest, ChunkStore, StoreReader
from cacheblend_store.compiled_reads import CompiledReads
from cacheblend_store.format.blobs import blob_prefix
from cacheblend_store.format.records import layer_spec
from fake_gpu import FakeGpu
from gpu_engine import Setup, engine_gpu

from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import Prefilled, prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.kv import cuda_loader, host_cache
from cacheblend_cli.kv.host_cache import HostCache
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

NUM_CHUNKS, NUM_LAYERS = 5, 4


@dataclass
class Bed:
    gpu: FakeGpu
    engine: Engine
    on_cpu: Engine
    store: ChunkStore
    keys: list[bytes]

    @property
    def cache(self) -> HostCache:
        memory = self.engine.runtime.memory()
        assert memory is not None
        assert memory.host_cache is not None
        return memory.host_cache

    def prefill(self, engine: Engine, chunks: tuple[int, ...]) -> Prefilled:
        ask = AskRequest("what is it?", [self.keys[i] for i in chunks], BlendParams(ratio=0.3), SamplingParams())
        done = prefill(engine.runtime, resolve(engine.runtime, self.store, ask))
        done.sequence.release()
        return done

    def check(self, *chunks: int, computed: int | None = None) -> torch.Tensor:
        """Prefill on the GPU and on the CPU, compare the logits, and return them. computed: the chunk that is."""
        found, expected = self.prefill(self.engine, chunks), self.prefill(self.on_cpu, chunks)
        torch.testing.assert_close(found.logits.cpu(), expected.logits, atol=1e-3, rtol=0)
        assert [s.status == "computed" for s in found.plan.chunks] == [i == computed for i in chunks]
        assert bool(found.request.notes) == (computed is not None)
        assert not self.gpu.errors
        return found.logits.cpu()


@pytest.fixture
def slab_bytes() -> int:
    return 1 << 22


@pytest.fixture
def bed(tmp_path: Path, slab_bytes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    monkeypatch.setattr(host_cache, "SLAB_BYTES", slab_bytes)
    monkeypatch.setattr(host_cache, "LEAST_SLAB_BYTES", 1)
    size = host_cache.LEAST_SLABS * slab_bytes / 2**30
    setup = Setup.write(tmp_path, num_chunks=NUM_CHUNKS, model={"num_hidden_layers": NUM_LAYERS}, host_cache=size)
    with engine_gpu() as gpu, setup.store() as store:
        engine = setup.engine("cuda")
        keys = setup.precompute(engine, store)
        bed = Bed(gpu, engine, setup.engine("cpu"), store, keys)
        bed.cache.wait()
        yield bed


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What loaders look up and read in stores, copy, and launch, by name."""
    names = list[str]()
    watched: list[tuple[Any, str]] = [
        (StoreReader, "manifest"), (StoreReader, "locate"), (StoreReader, "read_layers"), (CompiledReads, "read"),
        (cuda_loader.CudaTransfer, "send"), (cuda_loader.Staging, "place"),
    ]  # fmt: skip
    for of, name in watched:
        plain = getattr(of, name)

        def spy(*given: Any, plain: Any = plain, name: str = name, **more: Any) -> Any:
            names.extend([name] * (len(given[2]) if name == "send" else 1))
            return plain(*given, **more)

        monkeypatch.setattr(of, name, spy)
    return names


def test_a_second_prompt_looks_nothing_up_reads_nothing_and_copies_little(bed: Bed, seen: list[str]) -> None:
    bed.check(0, 1, 2, 3, 4)
    assert {"manifest", "locate", "read_layers", "read", "send"} <= set(seen)
    ask = AskRequest("what is it?", bed.keys[:NUM_CHUNKS], BlendParams(ratio=0.3), SamplingParams())
    request = resolve(bed.engine.runtime, bed.store, ask)
    for _ in range(2):
        seen.clear()
        prefill(bed.engine.runtime, request).sequence.release()
        assert set(seen) == {"send", "place"}
        assert seen.count("send") <= 4 * (NUM_CHUNKS + 1)  # copies, the prefix among them
        assert seen.count("place") <= 4
    counts = bed.cache.counts
    assert (counts["host_cache_hits"], counts["host_cache_misses"]) == (2 * (NUM_CHUNKS + 1), NUM_CHUNKS + 1)


def test_a_write_to_the_store_looks_records_up_and_reads_no_kv(bed: Bed, seen: list[str]) -> None:
    bed.check(0, 1, 2)
    bed.store.remove_chunks([bed.keys[4]])
    seen.clear()
    bed.prefill(bed.engine, (0, 1, 2))
    assert "manifest" in seen
    assert not {"locate", "read_layers"} & set(seen)


def test_a_source_without_versions_is_looked_up_and_forgets_nothing(
    bed: Bed, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one with a tier is."""
    bed.check(0, 1, 2)
    with monkeypatch.context() as unknown:
        unknown.setattr(StoreReader, "__init__", lambda reader, pages, version=None: opened(reader, pages))
        seen.clear()
        bed.prefill(bed.engine, (0, 1, 3))
        assert seen.count("locate") == 1
    seen.clear()
    bed.prefill(bed.engine, (0, 1, 2))
    assert "read_layers" not in seen


opened = StoreReader.__init__


def test_a_chunk_that_was_replaced_is_read_again(bed: Bed) -> None:
    """With the same key, but with other KV, as another version of the model's kernels may compute it."""
    before = bed.check(0, 1, 2)
    replace_kv(bed.store, bed.keys[1])
    assert not torch.equal(bed.check(0, 1, 2), before)


def replace_kv(store: ChunkStore, key: bytes) -> None:
    """Store a chunk again with K and V of zeros."""
    found = store.get_blobs(key)
    assert found is not None
    manifest, blobs = found
    spec = layer_spec(manifest, 0)
    start = len(blob_prefix(spec))
    store.remove_chunks([key])
    store.put_chunk(manifest, [blob[:start] + bytes(len(blob) - start) for blob in blobs])


def test_a_chunk_that_is_gone_is_not_served(bed: Bed) -> None:
    bed.check(0, 1, 2)
    ask = AskRequest("what is it?", bed.keys[:3], BlendParams(ratio=0.3), SamplingParams())
    request = resolve(bed.engine.runtime, bed.store, ask)
    bed.store.remove_chunks([bed.keys[1]])
    done = prefill(bed.engine.runtime, request)
    done.sequence.release()
    assert [s.status == "computed" for s in done.plan.chunks] == [False, True, False]


@pytest.mark.parametrize("slab_bytes", [1 << 15])
def test_the_least_recently_used_slab_is_emptied(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for a part of the chunks only, and what is read goes through other memory then."""
    emptied, empty = list[object](), HostCache._emptied
    monkeypatch.setattr(HostCache, "_emptied", lambda cache: emptied.append(empty(cache)) or emptied[-1])
    for chunks in ((0, 1), (2, 3), (4, 0), (1, 2, 3, 4, 0), (2, 3), (4, 1), (0, 1), (0, 1)):
        bed.check(*chunks)
        bed.cache.wait()
    assert any(emptied)
    assert 0 < bed.cache.counts["host_cache_bytes"] <= 4 * (1 << 15)
    assert bed.cache.counts["host_cache_hits"] > 0


@pytest.mark.parametrize("slab_bytes", [1 << 15])
def test_memory_that_is_copied_from_is_waited_for(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    release = HostCache.release
    monkeypatch.setattr(HostCache, "release", lambda cache, block, copied: release(cache, block, None))
    for chunks in ((0, 1), (2, 3), (4, 0), (1, 2), (3, 4), (0, 2)):
        bed.prefill(bed.engine, chunks)
        bed.cache.wait()
    assert any(message.startswith("race") for _, message, _ in bed.gpu.errors)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("group", range(NUM_LAYERS))
def test_what_could_not_be_read_is_computed_and_not_kept(
    bed: Bed, group: int, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it is found out: also while a group ahead of the computed layers is sent."""
    if not cached:
        monkeypatch.setattr(HostCache, "reserve", lambda *given: None)
    plain = StoreReader.copy_layer

    def copy_layer(reader: StoreReader, manifest: ChunkManifest, layer: int, targets: Any) -> None:
        plain(reader, manifest, layer, targets)
        if manifest.key == bed.keys[1] and layer == group:
            raise BadBlob("does not match its digest", layer=layer)

    with monkeypatch.context() as damaged:
        damaged.setattr(StoreReader, "copy_layer", copy_layer)
        damaged.setattr(CompiledReads, "read", lambda *given: False)
        bed.check(0, 1, 2, computed=1)
    bed.check(0, 1, 2)


def test_memory_that_cannot_be_pinned_is_done_without(bed: Bed) -> None:
    failed = Future[torch.Tensor]()
    failed.set_exception(RuntimeError("CUDA error: out of memory"))
    bed.cache._next = failed
    for _ in range(2):
        bed.check(0, 1, 2)
    assert bed.cache.counts["host_cache_bytes"] == 0
    assert bed.cache.counts["host_cache_hits"] == 0


@pytest.mark.parametrize(("size", "slabs"), [(0, 0), (63 << 20, 0), (100 << 20, 4), (1 << 30, 4), (5 << 28, 5)])
def test_sizes(size: int, slabs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCache, "_pin", lambda cache: None)
    cache = HostCache(size)
    assert (cache.is_off, cache._most_slabs) == (not slabs, slabs)
