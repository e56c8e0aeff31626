"""The way of stored KV to a device: nothing is overwritten before it was copied, and what arrives is what was stored."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cacheblend_store import ChunkStore
from cacheblend_store.format.layouts import CODECS
from checkpoints import WORDS, write_checkpoint
from host_transfer import HostTransfer
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_cli.api import BlendConfig, Engine, EngineConfig, PrecomputeOptions, SamplingParams
from cacheblend_cli.kv import batch as kv_batch
from cacheblend_cli.kv import host_loader, loading, ring_loader
from cacheblend_cli.kv.batch import KVBatch, batches_of
from cacheblend_cli.kv.loader import Workers
from cacheblend_cli.kv.staging import Event, StagingRing
from cacheblend_cli.kv.stored_prompt import StoredPrompt, StoredSpan
from cacheblend_cli.runtime.prefill import Prefilled, prefill
from cacheblend_cli.runtime.request import Question, resolve

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


class LazyDevice:
    """Does what is queued as late as it may: when somebody waits for it, or when told to do some of it early."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], None]] = []
        self._done = 0
        self._lock = threading.Lock()

    def queue(self, work: Callable[[], None]) -> Event:
        with self._lock:
            self._queue.append(work)
            return _Mark(self, len(self._queue))

    def run_to(self, count: int) -> None:
        with self._lock:
            while self._done < min(count, len(self._queue)):
                self._queue[self._done]()
                self._done += 1

    def run_all(self) -> None:
        self.run_to(len(self._queue))


class _Mark:
    def __init__(self, device: LazyDevice, count: int) -> None:
        self._device, self._count = device, count

    def synchronize(self) -> None:
        self._device.run_to(self._count)


class LazyTransfer(HostTransfer):
    """Copies when it must, in a device's order."""

    def __init__(self) -> None:
        super().__init__()
        self.device = LazyDevice()
        self.layers: dict[int, Event] = {}

    def send(self, slot: int, num_bytes: int, place: Callable[[torch.Tensor], None]) -> Event:
        return self.device.queue(lambda: place(self.host[slot][:num_bytes].clone()))

    def finish_layer(self, layer: int) -> None:
        super().finish_layer(layer)
        self.layers[layer] = self.device.queue(lambda: None)

    def join(self, layer: int) -> None:
        super().join(layer)
        self.layers[layer].synchronize()


class RingThatTrusts(StagingRing):
    """Gives a slot away as soon as its batch is submitted: the mistake the events are there for."""

    def submitted(self, batch: int, event: Event) -> None:
        super().submitted(batch, _Mark(LazyDevice(), 0))


def drive(ring_type: type[StagingRing], num_slots: int, parts: list[int], seed: int) -> list[list[int]]:
    """Fill, submit and copy in a random order that one thread may take; what the device read of each batch."""
    ring, device, rng = ring_type(num_slots, parts), LazyDevice(), random.Random(seed)
    slots: list[list[int]] = [[] for _ in range(num_slots)]
    copied: list[list[int]] = []
    todo = [(batch, part) for batch, count in enumerate(parts) for part in range(count)]
    submitted = next_part = 0
    missing = list(parts)
    while submitted < len(parts):
        move = rng.choice(["fill", "submit", "copy"])
        if move == "fill" and next_part < len(todo) and submitted > todo[next_part][0] - num_slots:
            batch, part = todo[next_part]
            slot = ring.acquire(batch)
            assert slot == batch % num_slots
            if part == 0:
                slots[slot].clear()
            slots[slot].append(1000 * batch + part)
            ring.filled(batch)
            missing[batch] -= 1
            next_part += 1
        elif move == "submit" and missing[submitted] == 0:
            slot = ring.wait_filled(submitted)
            assert slot is not None
            ring.submitted(submitted, device.queue(lambda slot=slot: copied.append(list(slots[slot]))))
            submitted += 1
        elif move == "copy":
            device.run_to(rng.randint(0, submitted))
    device.run_all()
    return copied


@given(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(0, 2**32))
def test_no_slot_is_filled_again_before_its_copy_was_made(num_slots: int, parts: list[int], seed: int) -> None:
    expected = [[1000 * batch + part for part in range(count)] for batch, count in enumerate(parts)]
    assert drive(StagingRing, num_slots, parts, seed) == expected


def test_a_ring_that_does_not_wait_is_found_out() -> None:
    parts = [2] * 8
    expected = [[1000 * batch, 1000 * batch + 1] for batch in range(8)]
    assert any(drive(RingThatTrusts, 2, parts, seed) != expected for seed in range(20))


def test_a_stopped_ring_lets_everybody_go() -> None:
    ring = StagingRing(1, [1, 1])
    assert ring.acquire(0) == 0
    found: list[int | None] = []
    waiting = [
        threading.Thread(target=lambda: found.append(ring.acquire(1))),
        threading.Thread(target=lambda: found.append(ring.wait_filled(0))),
    ]
    for thread in waiting:
        thread.start()
    ring.stop()
    for thread in waiting:
        thread.join(timeout=30)
    assert found == [None, None]


@given(st.lists(st.tuples(st.integers(1, 70), st.sampled_from(CODECS)), min_size=1, max_size=8), st.data())
def test_batches_hold_every_chunk_once_and_aligned(chunks: list[tuple[int, str]], data: st.DataObject) -> None:
    at, spans = 3, []
    for count, codec in chunks:
        spans.append(StoredSpan(at, at + count, codec))
        at += count + data.draw(st.integers(0, 1))
    batches = batches_of(spans, 2, 16)
    assert [s for b in batches for s in b.spans] == spans
    assert [b.first for b in batches] == [sum(len(x.spans) for x in batches[:i]) for i in range(len(batches))]
    for batch in batches:
        assert len(batch.spans) == 1 or ("int" not in batch.codec and "8" not in batch.codec)
        buffer = bytearray(batch.num_bytes)
        for index in range(len(batch.spans)):
            for name, target in batch.targets(index, memoryview(buffer)).items():
                assert not any(target)  # nobody else's
                target[:] = bytes([1 + (index + len(name)) % 250]) * len(target)
        for name, tensor in batch.tensors(torch.frombuffer(buffer, dtype=torch.uint8)).items():
            flat = tensor.contiguous().view(torch.uint8).flatten().tolist()
            wanted = [1 + (i + len(name)) % 250 for i in range(len(batch.spans))]
            assert list(dict.fromkeys(flat)) == wanted
            assert tensor.data_ptr() % 4 == 0


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
        self.keys = [m.key for m in sorted(self.store.chunks(), key=lambda m: (m.source, m.index))]

    def prefill(self, keys: list[bytes]) -> Prefilled:
        blend = BlendConfig(ratio=0.3)
        request = resolve(self.engine.runtime, self.store, Question("where?", keys, blend, GREEDY))
        return prefill(self.engine.runtime, request)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[HostTransfer]:
    """From here on KV goes through the ring; the transfers that were made."""
    made: list[HostTransfer] = []

    def transfer_to(device: torch.device) -> HostTransfer:
        made.append(LazyTransfer())
        return made[-1]

    monkeypatch.setattr(loading, "transfer_to", transfer_to)
    monkeypatch.setattr(ring_loader, "NUM_SLOTS", 2)
    monkeypatch.setattr(ring_loader, "num_workers", lambda at_most: 4)
    monkeypatch.setattr(kv_batch, "BATCH_BYTES", 20_000)
    return made


@pytest.mark.parametrize("codec", CODECS)
def test_through_the_ring_arrives_what_was_stored(
    tmp_path: Path, codec: str, staged: list[HostTransfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored(tmp_path, codec)
    order = [stored.keys[i] for i in (4, 0, 2, 2, 5, 1)]
    with monkeypatch.context() as direct:
        direct.setattr(loading, "transfer_to", lambda device: None)
        expected = stored.prefill(order)
    assert not staged
    for _ in range(4):
        found = stored.prefill(order)
        assert len(staged[-1].layers) == 4
        assert staged.pop().host == []  # kept for its figures, a loader keeps no buffers
        assert torch.equal(found.result.logits, expected.result.logits)
        assert found.loader.num_bytes == expected.loader.num_bytes
        assert found.loader.load_s > 0
        assert found.loader.stall_s >= 0
        n = found.plan.num_tokens
        for ours, theirs in zip(found.pool.tensors, expected.pool.tensors, strict=True):
            assert torch.equal(ours.view(-1, *ours.shape[2:])[:n], theirs.view(-1, *theirs.shape[2:])[:n])


def test_a_damaged_blob_on_the_way_is_computed(tmp_path: Path, staged: list[HostTransfer]) -> None:
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
    assert not [t for t in threading.enumerate() if t.name == "kv-submitter"]


def test_one_copy_carries_a_layers_chunks() -> None:
    spans = [StoredSpan(0, 512, "bfloat16"), StoredSpan(512, 1024, "bfloat16"), StoredSpan(1024, 1300, "bfloat16")]
    [batch] = batches_of(spans, 8, 128)
    assert isinstance(batch, KVBatch)
    assert batch.num_bytes == 2 * 1300 * 8 * 128 * 2
    assert batch.tensors(torch.zeros(batch.num_bytes, dtype=torch.uint8))["v"].shape == (1300, 8, 128)


def test_loading_leaves_torchs_threads_to_computing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(tmp_path, "int8")
    before = torch.get_num_threads()
    seen: dict[str, int] = {}
    place = StoredPrompt.place

    def spy(*arguments: object) -> None:
        seen[threading.current_thread().name] = torch.get_num_threads()
        place(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(StoredPrompt, "place", spy)
    monkeypatch.setattr(host_loader, "workers", Workers)  # threads that are born now
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
