"""Loading stored KV to a device: no buffer is overwritten before it is copied, and the data arrives unchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheblend_kernels import StoredKV, compiled
from cacheblend_kernels.torch_backend import TorchBackend
from cacheblend_store import ChunkStore
from cacheblend_store.format.blobs import CODECS, PLAIN, blob_spec
from cacheblend_store.format.levels import BITS
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
from cacheblend_cli.kv.loader import StoredLoader, make_loader
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.kv.stored_prompt import KVBatch, StoredPrompt, batches_of, row_chunks_of
from cacheblend_cli.kv.transfer import CudaTransfer, HostTransfer
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.prompt.plan import Segment
from cacheblend_cli.settings.fields import KV_DTYPES
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


class LazyTransfer(HostTransfer):
    """What is sent is brought to the pool as late as it may be: when its buffer or its layer is waited for."""

    batch_bytes = 20_000  # so few that a layer has several

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[int, int] = {}
        self._sent: list[Callable[[], None]] = []
        self._done = 0
        self._last_of: dict[int, int] = {}  # of each buffer
        self._lock = threading.RLock()

    def memory(self, buffer: int) -> memoryview:
        self._run_to(self._last_of.get(buffer, 0))
        return super().memory(buffer)

    def send(self, layer: int, buffer: int, num_bytes: int, place: Callable[[torch.Tensor], None]) -> None:
        with self._lock:
            self._sent.append(lambda: HostTransfer.send(self, layer, buffer, num_bytes, place))
            self.layers[layer] = self._last_of[buffer] = len(self._sent)

    def join(self, layer: int) -> None:
        super().join(layer)
        self._run_to(self.layers[layer])

    def _run_to(self, count: int) -> None:
        with self._lock:
            while self._done < count:
                self._sent[self._done]()
                self._done += 1


class TransferThatTrusts(LazyTransfer):
    """Gives a buffer away before its contents are copied."""

    def memory(self, buffer: int) -> memoryview:
        return HostTransfer.memory(self, buffer)


def span_of(start: int, end: int, codec: str) -> Segment:
    return Segment("chunk", start, (0,) * (end - start), "exact", codec=codec)


@given(st.lists(st.tuples(st.integers(1, 70), st.sampled_from(CODECS)), min_size=1, max_size=8), st.data())
def test_batches_hold_every_chunk_once_and_aligned(chunks: list[tuple[int, str]], data: st.DataObject) -> None:
    at, spans = 3, []
    for count, codec in chunks:
        spans.append(span_of(at, at + count, codec))
        at += count + data.draw(st.integers(0, 1))
    batches = [batch[2, 16] for batch in batches_of(spans, [(2, 16)], 20_000)]
    assert [s for b in batches for s in b.spans] == spans
    assert [b.first for b in batches] == [sum(len(x.spans) for x in batches[:i]) for i in range(len(batches))]
    for batch in batches:
        assert len({span.codec for span in batch.spans}) == 1
        assert len(batch.spans) == 1 or batch.num_bytes < 20_000 + 5 * 512
        rows = row_chunks_of(batch.spans, torch.device("cpu"))
        buffer = bytearray(batch.num_bytes)
        for index, places in enumerate(batch.places):
            for name, (start, end) in places.items():
                target = memoryview(buffer)[start:end]
                assert not any(target)  # nobody else's
                target[:] = bytes([1 + (index + len(name)) % 250]) * len(target)
        for name, tensor in batch.tensors(torch.frombuffer(buffer, dtype=torch.uint8)).items():
            flat = tensor.contiguous().view(torch.uint8).flatten().tolist()
            wanted = [1 + (i + len(name)) % 250 for i in range(len(batch.spans))]
            assert list(dict.fromkeys(flat)) == wanted
            assert tensor.data_ptr() % 4 == 0
            assert len(tensor) in (sum(span.num_tokens for span in batch.spans), len(batch.spans))
            if rows is not None and len(tensor) == len(rows):
                assert [1 + (i + len(name)) % 250 for i in rows.tolist()] == tensor.flatten(1).view(torch.uint8)[
                    :, 0
                ].tolist()


class Stored:
    """An engine and chunks of one codec, with batches so small that a layer has several."""

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


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[LazyTransfer]:
    """From here on KV goes through few buffers, late; the transfers that were made."""
    made: list[LazyTransfer] = []

    def transfer_to(device: torch.device) -> LazyTransfer:
        made.append(LazyTransfer())
        return made[-1]

    monkeypatch.setattr(loader, "transfer_to", transfer_to)
    monkeypatch.setattr(loader, "num_workers", lambda at_most: 2)
    return made


@pytest.mark.parametrize("codec", KV_DTYPES[1:])
def test_through_the_buffers_arrives_what_was_stored(
    tmp_path: Path, codec: str, staged: list[LazyTransfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    if codec in BITS:  # a chunk by itself is loaded by compiled code, several are not
        monkeypatch.setattr(compiled, "library", lambda: None)
    stored = Stored(tmp_path, codec)
    order = [stored.keys[i] for i in (4, 0, 2, 2, 5, 1)]
    with monkeypatch.context() as direct:
        direct.setattr(loader, "transfer_to", lambda device: HostTransfer())
        expected = stored.prefill(order)
    assert not staged
    for _ in range(4):
        found = stored.prefill(order)
        transfer = staged.pop()
        assert len(transfer.layers) == 4
        assert transfer._buffers == []  # kept for its figures, a loader keeps no buffers
        assert torch.equal(found.result.logits, expected.result.logits)
        assert found.result.loader.num_bytes == expected.result.loader.num_bytes
        assert found.result.loader.load_s > 0
        assert found.result.loader.stall_s >= 0
        n = found.plan.num_tokens
        for ours, theirs in zip(found.pool.tensors, expected.pool.tensors, strict=True):
            assert torch.equal(ours.view(-1, *ours.shape[2:])[:n], theirs.view(-1, *theirs.shape[2:])[:n])


def test_a_buffer_that_is_given_away_too_early_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(tmp_path, "exact")
    expected = stored.prefill(stored.keys[:4])
    monkeypatch.setattr(loader, "num_workers", lambda at_most: 1)
    monkeypatch.setattr(LazyTransfer, "batch_bytes", 0)  # four chunks of a layer in one buffer, one after another
    for transfer, same in ((LazyTransfer, True), (TransferThatTrusts, False)):
        monkeypatch.setattr(loader, "transfer_to", lambda device, transfer=transfer: transfer())
        assert torch.equal(stored.prefill(stored.keys[:4]).result.logits, expected.result.logits) is same


def test_a_damaged_blob_on_the_way_is_computed(tmp_path: Path, staged: list[LazyTransfer]) -> None:
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


def test_chunks_below_a_damaged_page_are_computed(tmp_path: Path, staged: list[LazyTransfer]) -> None:
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
        assert isinstance(made, StoredLoader)
        for layer in range(decoder.spec.num_kv_layers):
            made.wait(layer)
        for running in made._running:
            running.result()
        assert stored.store._environment().transactions == 0


@pytest.mark.parametrize("where", ["open", "memory", "send"])
def test_a_fault_while_loading_is_raised_and_leaves_nothing_open(
    tmp_path: Path, staged: list[LazyTransfer], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    stored = Stored(tmp_path, "auto")
    good = stored.prefill(stored.keys[:4])

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as planted:
        planted.setattr(LazyTransfer, where, fail)
        with pytest.raises(MemoryError):
            stored.prefill(stored.keys[:4])
    assert stored.store._environment().transactions == 0
    assert torch.equal(stored.prefill(stored.keys[:4]).result.logits, good.result.logits)


@pytest.mark.parametrize("codec", CODECS)
def test_one_copy_carries_a_layers_chunks(codec: str) -> None:
    spans = [span_of(0, 512, codec), span_of(512, 1024, codec), span_of(1024, 1300, codec)]
    [[batch]] = [b.values() for b in batches_of(spans, [(8, 128)], 12 << 20)]
    assert isinstance(batch, KVBatch)
    stored = sum(t.num_bytes for s in spans for t in blob_spec(codec, s.num_tokens, 8, 128).values())
    assert 0 <= batch.num_bytes - stored < 5 * 512
    tensors = batch.tensors(torch.zeros(batch.num_bytes, dtype=torch.uint8))
    assert tensors["v"].shape[:2] == (1300, 8)
    per_chunk = [name for name in tensors if name not in ("k", "v") and len(tensors[name]) == 3]
    assert per_chunk == ([] if codec in PLAIN else ["k_mean"] if codec in BITS else ["k_scale", "v_scale"])
    assert all(tensors[name].shape[1] == 8 for name in per_chunk)


@pytest.mark.parametrize(("codec", "batches"), [("int7", 1), ("int4", 1), ("float8_e4m3", 2), ("bfloat16", 2)])
def test_a_gpu_gets_a_layer_of_4096_tokens_of_an_8b_in_few_batches(codec: str, batches: int) -> None:
    spans = [span_of(at, at + 512, codec) for at in range(0, 4096, 512)]
    assert len(batches_of(spans, [(8, 128)], CudaTransfer.batch_bytes)) == batches
    assert len(batches_of(spans, [(8, 128)], HostTransfer.batch_bytes)) == 8


@pytest.mark.parametrize("codec", ["exact", "float8_e4m3", "int7"])
def test_a_gpu_loads_what_a_cpu_loads_a_batch_a_layer(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "library", lambda: None)
    stored = Stored(tmp_path, codec)
    plan = stored.prefill([stored.keys[i] for i in (4, 0, 2, 5, 1)]).plan
    rows: list[StoredKV] = []
    plain = TorchBackend.load_kv

    def load_kv(self: TorchBackend, given: StoredKV, *where: Any) -> None:
        rows.append(given)
        plain(self, given, *where)

    def load(decoder: Decoder) -> list[torch.Tensor]:
        pool = KVPool.of(decoder, -(-plan.num_tokens // 16), 16)
        for tensor in pool.tensors:
            tensor.zero_()
        rows.clear()
        with make_loader(decoder, stored.store, pool.new_sequence(plan.num_tokens), plan) as made:
            for layer in range(decoder.spec.num_kv_layers):
                made.wait(layer)
        return pool.tensors

    monkeypatch.setattr(TorchBackend, "load_kv", load_kv)
    expected, num_layers = load(stored.engine.model.decoder), stored.engine.model.spec.num_kv_layers
    assert len(rows) == num_layers * 6  # with the prefix
    with installed() as gpu:
        on_gpu = EngineConfig(model=str(tmp_path / "model"), device="cuda", attention_backend="torch", dtype="float32")
        decoder = Engine.load(on_gpu).model.decoder
        load(decoder)  # makes the tables
        gpu.clear()
        found = load(decoder)
        assert not gpu.found("synchronisation")
        assert not gpu.found("pageable copy")
        assert not gpu.errors
        assert len(rows) == num_layers * (1 if codec == "exact" else 2)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.cpu(), theirs)


def test_chunks_of_other_codecs_are_other_batches() -> None:
    codecs = ("int7", "int7", "bfloat16", "int7", "int4")
    spans = [span_of(at, at + 9, codec) for at, codec in zip(range(0, 45, 9), codecs, strict=True)]
    found = [[span.codec for span in batch[2, 16].spans] for batch in batches_of(spans, [(2, 16)], 1 << 20)]
    assert found == [["int7", "int7"], ["bfloat16"], ["int7"], ["int4"]]


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
