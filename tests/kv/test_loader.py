"""Loading stored KV to a device: the data arrives unchanged, and what is damaged is computed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from cacheblend_kernels import compiled
from cacheblend_store import ChunkStore, StoreReader
from cacheblend_store.format.blobs import CODECS, blob_spec
from checkpoints import WORDS, write_checkpoint
from fake_gpu import installed
from hypothesis import given
from hypothesis import strategies as st
from page_map import pages_by_level

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import Prefilled, prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.kv import loader
from cacheblend_cli.kv.load_queue import workers
from cacheblend_cli.kv.loader import HostLoader, KVLoader
from cacheblend_cli.kv.loading import make_loader
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.kv.stored_prompt import ALIGNMENT, StoredPrompt, layer_groups, layer_layout
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.settings.fields import KV_DTYPES
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


@given(st.integers(1, 70), st.sampled_from(CODECS), st.integers(1, 3), st.sampled_from([16, 80]))
def test_a_layers_tensors_are_aligned_and_apart(num_tokens: int, codec: str, heads: int, dim: int) -> None:
    layout, spec = layer_layout(codec, num_tokens, heads, dim), blob_spec(codec, num_tokens, heads, dim)
    memory, numbers = torch.zeros(layout.num_bytes, dtype=torch.uint8), dict(zip(spec, range(1, 9), strict=False))
    assert list(layout.tensors) == list(spec)
    for name, tensor in layout.tensors.items():
        assert (tensor.start % ALIGNMENT, tensor.end - tensor.start) == (0, spec[name].num_bytes)
        assert not memory[tensor.start : tensor.end].any()  # nobody else's
        memory[tensor.start : tensor.end] = numbers[name]
    for name, view in layout.views(memory).items():
        assert view.shape[-len(spec[name].shape) :] == spec[name].shape
        assert view.contiguous().view(torch.uint8).unique().tolist() == [numbers[name]]


@pytest.mark.parametrize(
    ("family", "most", "sizes"), [("llama-gqa", 3, [3, 1]), ("gemma3n", 4, None), ("gemma4", 2, None)]
)
def test_groups_are_adjacent_layers_of_one_kind(
    family: str, most: int, sizes: list[int] | None, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "model", family)
    decoder = Engine.load(EngineConfig(model=str(tmp_path / "model"))).model.decoder
    groups = layer_groups(decoder, most)
    assert [layer for group in groups for layer in group.layers] == list(range(decoder.spec.num_kv_layers))
    for group in groups:
        kinds = {(decoder.spec.kv_shapes[layer], decoder.rope.of_layer[layer]) for layer in group.layers}
        assert kinds == {(group.heads, group.rope)}
        assert len(group.layers) <= most
    assert sizes in (None, [len(group.layers) for group in groups])


class Stored:
    """An engine, and chunks of one codec."""

    def __init__(self, root: Path, codec: str, block_size: int = 16) -> None:
        write_checkpoint(root / "model", "llama3-rope")
        self.engine = Engine.load(EngineConfig(model=str(root / "model"), block_size=block_size))
        docs = root / "docs"
        docs.mkdir()
        for d in range(3):
            text = "\n\n".join(" ".join(WORDS[(d + p) % 7 : (d + p) % 7 + 9]) + f" {d}{p}." for p in range(3))
            (docs / f"{d}.md").write_text(text + "\n")
        self.store = ChunkStore.open(root / "store", mode="write")
        self.engine.precompute(
            self.store, [str(docs)], PrecomputeOptions(chunk_tokens=40, kv_dtype=codec), lambda event: None
        )
        self.prefix_codec = next((m.codec for m in self.store.chunks(prefixes=True) if m.context == "prefix"), codec)
        self.keys = [m.key for m in sorted(self.store.chunks(), key=lambda m: (m.source, m.index))]

    def prefill(self, keys: list[bytes]) -> Prefilled:
        blend = BlendParams(ratio=0.3)
        request = resolve(self.engine.runtime, self.store, AskRequest("where?", keys, blend, GREEDY))
        return prefill(self.engine.runtime, request)


def test_a_damaged_blob_on_the_way_is_computed(tmp_path: Path) -> None:
    stored = Stored(tmp_path, "auto")
    good = stored.prefill(stored.keys[:4])
    path = tmp_path / "store" / "data.mdb"
    with stored.store.read() as reader:
        manifest = reader.manifest(stored.keys[2])
        assert manifest is not None
        needle = bytes(reader.blob(manifest, 2)[-64:])
    stored.store.close()
    content = bytearray(path.read_bytes())
    at = content.find(needle)
    assert at >= 0
    content[at] ^= 1
    path.write_bytes(content)
    stored.store = ChunkStore.open(tmp_path / "store", mode="read")
    found = stored.prefill(stored.keys[:4])
    assert any("digest" in note for note in found.request.notes)
    assert [s.status for s in found.plan.chunks][2] == "computed"
    torch.testing.assert_close(found.result.logits, good.result.logits)


def test_chunks_below_a_damaged_page_are_computed(tmp_path: Path) -> None:
    stored = Stored(tmp_path, "auto")
    stored.store.close()
    path = tmp_path / "store" / "data.mdb"
    levels, page_size = pages_by_level(path, "blobs")
    content = bytearray(path.read_bytes())
    for pgno in levels[-1]:
        content[pgno * page_size : (pgno + 1) * page_size] = bytes(page_size)
    path.write_bytes(content)
    stored.store = ChunkStore.open(tmp_path / "store", mode="read")
    found = stored.prefill(stored.keys[:4])
    assert [s.status for s in found.plan.chunks] == ["computed"] * 4
    assert sum("damaged" in note for note in found.request.notes) >= 4


def test_the_snapshot_is_closed_once_all_is_read(tmp_path: Path) -> None:
    """Its file may be replaced while the prompt is computed, and is opened again when no snapshot is open."""
    stored = Stored(tmp_path, "auto")
    plan, decoder = stored.prefill(stored.keys[:4]).plan, stored.engine.model.decoder
    pool = KVPool.of(decoder, -(-plan.num_tokens // 16), 16)
    with make_loader(decoder, stored.store, pool.new_sequence(plan.num_tokens), plan) as made:
        assert isinstance(made, HostLoader)
        for layer in range(decoder.spec.num_kv_layers):
            made.wait(layer)
        for running in made._running:
            running.result()
        assert stored.store._environment().transactions == 0


@pytest.mark.parametrize("where", [(StoredPrompt, "slots"), (StoreReader, "read_layers"), (StoredPrompt, "place")])
def test_a_fault_while_loading_is_raised_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str]
) -> None:
    stored = Stored(tmp_path, "auto")
    good = stored.prefill(stored.keys[:4])

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as planted:
        planted.setattr(*where, fail)
        with pytest.raises(MemoryError):
            stored.prefill(stored.keys[:4])
    assert stored.store._environment().transactions == 0
    assert torch.equal(stored.prefill(stored.keys[:4]).result.logits, good.result.logits)


def zeros(decoder: Decoder, num_tokens: int) -> KVPool:
    pool = KVPool.of(decoder, -(-num_tokens // 16), 16)
    for tensor in pool.raw:
        tensor.zero_()
    return pool


@pytest.mark.parametrize("codec", KV_DTYPES[1:])
def test_a_gpu_loads_what_a_cpu_loads(tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "library", lambda: None)  # its sums differ from torch's in the last bit
    stored = Stored(tmp_path, codec)
    plan = stored.prefill([stored.keys[i] for i in (4, 0, 2, 5, 1)]).plan

    def load(decoder: Decoder) -> list[torch.Tensor]:
        pool = zeros(decoder, plan.num_tokens)
        with make_loader(decoder, stored.store, pool.new_sequence(plan.num_tokens), plan) as made:
            for layer in range(decoder.spec.num_kv_layers):
                made.wait(layer)
        return pool.tensors

    expected = load(stored.engine.model.decoder)
    with installed() as gpu:
        on_gpu = EngineConfig(model=str(tmp_path / "model"), device="cuda", attention_backend="torch", dtype="float32")
        decoder = Engine.load(on_gpu).model.decoder
        load(decoder)  # makes the tables
        gpu.clear()
        found = load(decoder)
        assert not gpu.found("synchronisation")
        assert not gpu.found("pageable copy")
        assert not gpu.errors
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.cpu(), theirs)


def test_loading_leaves_torchs_threads_to_computing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(tmp_path, "int4")
    before = torch.get_num_threads()
    seen: dict[str, int] = {}
    place = StoredPrompt.place

    def spy(*arguments: object) -> None:
        seen[threading.current_thread().name] = torch.get_num_threads()
        place(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(StoredPrompt, "place", spy)
    monkeypatch.setattr(loader, "workers", workers.__wrapped__)  # threads that are born now
    torch.set_num_threads(3)
    try:
        stored.prefill(stored.keys[:4])
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (torch.get_num_threads(), later, set(seen.values())) == (3, [3], {1})
    finally:
        torch.set_num_threads(before)


def test_prompts_that_load_at_once_do_not_block_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread reads for both, into host buffers for two of four groups of layers; the second is needed first."""
    monkeypatch.setattr(compiled, "library", lambda: None)
    stored = Stored(tmp_path, "int7")
    plan, on_cpu = stored.prefill(stored.keys[:5]).plan, stored.engine.model.decoder
    expected = zeros(on_cpu, plan.num_tokens)
    with make_loader(on_cpu, stored.store, expected.new_sequence(plan.num_tokens), plan) as made:
        made.wait(on_cpu.spec.num_kv_layers - 1)
    monkeypatch.setattr(loader, "num_workers", lambda at_most: 1)
    with installed() as gpu:
        on_gpu = EngineConfig(model=str(tmp_path / "model"), device="cuda", attention_backend="torch", dtype="float32")
        decoder = Engine.load(on_gpu).model.decoder
        num_layers, pools = decoder.spec.num_kv_layers, list[KVPool]()
        loaders = list[KVLoader]()
        for _ in range(2):
            pools.append(zeros(decoder, plan.num_tokens))
            sequence = pools[-1].new_sequence(plan.num_tokens)
            loaders.append(make_loader(decoder, stored.store, sequence, plan).open())
        assert not loaders[0].is_ready(num_layers - 1)
        for made in reversed(loaders):
            for layer in range(num_layers):
                made.wait(layer)
            assert made.is_ready(num_layers - 1)
            made.close()
        assert not gpu.errors
        for pool in pools:
            for ours, theirs in zip(pool.tensors, expected.tensors, strict=True):
                assert torch.equal(ours.cpu(), theirs)
