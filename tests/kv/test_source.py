"""Stored KV from other sources than a chunk store: any object with manifests and layers works."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cacheblend_store import ChunkManifest, ChunkStore, LayerReads, StoreError
from checkpoints import WORDS, write_checkpoint

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import Prefilled, prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.source import KVSource
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams


class Elsewhere:
    """What a store holds, in memory. readers: how many were opened; `lost`: what cannot be had any more."""

    def __init__(self, store: ChunkStore) -> None:
        self.readers = 0
        self.lost: set[tuple[bytes, int]] = set()
        self._lock = threading.Lock()
        with store.read() as reader:
            self.manifests = {key: m for key in reader.keys_from(b"") if (m := reader.manifest(key))}
            self.layers = {
                (key, layer): {name: bytes(part) for name, part in reader.layer(m, layer).items()}
                for key, m in self.manifests.items()
                for layer in range(m.num_layers)
            }

    @contextmanager
    def read(self) -> Iterator[Elsewhere]:
        with self._lock:
            self.readers += 1
        yield self

    def manifest(self, key: bytes) -> ChunkManifest | None:
        return self.manifests.get(key)

    version = None

    def locate(self, reads: LayerReads) -> None:
        pass

    def read_layers(self, reads: LayerReads, group: int, buffer: memoryview) -> None:
        for layer, own in zip(reads.groups[group], reads.places, strict=False):
            if (reads.manifest.key, layer) in self.lost:
                raise StoreError("the connection was lost")
            for name, part in self.layers[reads.manifest.key, layer].items():
                buffer[slice(*own[name])] = part

    def state_of(self, manifest: ChunkManifest) -> list[memoryview]:
        raise AssertionError("the model has no recurrent layers")


class Stored:
    def __init__(self, root: Path) -> None:
        write_checkpoint(root / "model", "llama-gqa")
        self.engine = Engine.load(EngineConfig(model=str(root / "model"), block_size=16))
        text = "\n\n".join(" ".join(WORDS[p : p + 5]) + f" {p}." for p in range(6))
        (root / "a.md").write_text(text + "\n")
        self.store = ChunkStore.open(root / "store", mode="write")
        self.engine.precompute(self.store, [str(root / "a.md")], PrecomputeOptions(chunk_tokens=16), lambda event: None)
        self.keys = [m.key for m in sorted(self.store.chunks(), key=lambda m: m.index)][2::-1]

    def prefill(self, source: KVSource, mode: str = "blend") -> tuple[Prefilled, list[str]]:
        question = AskRequest("?", self.keys, BlendParams(mode=mode, ratio=0.3), SamplingParams())
        request = resolve(self.engine.runtime, self.store, question)
        found = prefill(self.engine.runtime, replace(request, store=source))  # type: ignore[arg-type]
        return found, list(found.request.notes)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return Stored(tmp_path_factory.mktemp("source"))


def test_any_source_gives_what_the_store_gives(stored: Stored) -> None:
    elsewhere = Elsewhere(stored.store)
    expected, _ = stored.prefill(stored.store)
    found, notes = stored.prefill(elsewhere)
    assert notes == []
    assert elsewhere.readers == 2  # one for the manifests, one for the KV
    assert found.result.loader.num_bytes == expected.result.loader.num_bytes > 0
    assert torch.equal(found.result.logits, expected.result.logits)


def test_what_is_lost_on_the_way_is_computed(stored: Stored) -> None:
    elsewhere = Elsewhere(stored.store)
    elsewhere.lost.add((stored.keys[1], stored.engine.runtime.model.spec.num_layers - 1))
    found, [note] = stored.prefill(elsewhere)
    assert "the connection was lost" in note
    assert found.plan.chunks[1].status == "computed"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (None, "no longer in the store"),
        ({"token_ids": (1, 2, 3)}, "other tokens or is from another model"),
        ({"num_kv_heads": 7}, "other tokens or is from another model"),
        ({"num_layers": 1}, "other tokens or is from another model"),
    ],
)
def test_a_record_that_is_gone_or_foreign_is_not_used(stored: Stored, other: dict | None, reason: str) -> None:
    elsewhere = Elsewhere(stored.store)
    manifest = elsewhere.manifests.pop(stored.keys[0])
    if other is not None:
        elsewhere.manifests[manifest.key] = replace(manifest, **other)
    found, [note] = stored.prefill(elsewhere)
    assert reason in note
    assert found.plan.chunks[0].status == "computed"


def test_a_full_prefill_asks_no_source(stored: Stored) -> None:
    elsewhere = Elsewhere(stored.store)
    found, _ = stored.prefill(elsewhere, mode="full")
    assert type(found.result.loader) is KVLoader
    assert (
        elsewhere.readers,
        found.result.loader.num_bytes,
        found.result.loader.load_s,
        found.result.loader.stall_s,
    ) == (0, 0, 0.0, 0.0)


def test_threads_do_not_pile_up(stored: Stored) -> None:
    stored.prefill(stored.store)
    before = threading.active_count()
    for _ in range(5):
        stored.prefill(stored.store)
    assert threading.active_count() == before
