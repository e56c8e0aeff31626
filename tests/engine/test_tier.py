"""Engines with stores of their own and one tier: what one computed the other loads, and no answer depends on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cacheblend_store import ChunkStore
from cacheblend_store.tier import SharedTier, open_tier
from checkpoints import WORDS, write_checkpoint
from object_server import ObjectServer, object_server

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.types import Answer, AskOptions, AskRequest, BlendParams, SamplingParams

LONG_S = 60.0  # no test waits for it: requests end before


def request(keys: list[bytes], mode: str = "blend", **options: Any) -> AskRequest:
    sampling = SamplingParams(max_tokens=4)
    return AskRequest("where?", keys, BlendParams(mode=mode, ratio=0.3), sampling, options=AskOptions(**options))


@dataclass
class TierSetup:
    """One engine, the tier's server, and machines: stores of their own over them."""

    engine: Engine
    root: Path
    server: ObjectServer

    def machine(
        self, name: str, *, key: Path | None = None, deadline_s: float = LONG_S, prefix: str = "team"
    ) -> Machine:
        store = ChunkStore.open(self.root / name, mode="write")
        said: list[str] = []
        tier = SharedTier(open_tier(f"s3://kv-test/{prefix}", key), deadline_s, said.append)
        store.share(tier)
        return Machine(self.engine, store, tier, said)


@dataclass
class Machine:
    engine: Engine
    store: ChunkStore
    tier: SharedTier
    said: list[str]

    def precompute(self, docs: Path) -> list[bytes]:
        self.engine.precompute(
            self.store, [str(docs)], PrecomputeOptions(chunk_tokens=16, context="sink"), lambda e: None
        )
        assert self.tier.flush(LONG_S) == 0
        return [m.key for m in sorted(self.store.chunks(), key=lambda m: (m.source, m.index))]

    def evict(self) -> None:
        """As where the records came without KV."""
        self.store.evict_chunks([m.key for m in self.store.chunks(prefixes=True)])

    def ask(self, keys: list[bytes], mode: str = "blend") -> Answer:
        return self.engine.run_alone(self.store, request(keys, mode))


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierSetup]:
    root = tmp_path_factory.mktemp("tier")
    write_checkpoint(root / "model", "llama-gqa")
    (root / "docs").mkdir()
    for name in "ab":
        text = "\n\n".join(" ".join(WORDS[p : p + 5]) + f" {name} {p}." for p in range(4))
        (root / "docs" / f"{name}.md").write_text(text + "\n")
    engine = Engine.load(EngineConfig(model=str(root / "model"), block_size=16))
    with object_server(root / "objects") as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield TierSetup(engine, root, server)


@pytest.fixture
def pair(setup: TierSetup, tmp_path: Path, request: Any) -> Iterator[tuple[Machine, list[bytes], Answer]]:
    """A machine whose chunks are in the tier and that has no KV any more, their keys, and the answer it gave before."""
    key = tmp_path / "key"
    key.write_bytes(b"a secret of more than sixteen bytes")
    keyed = getattr(request, "param", "") == "encrypted"
    setup.root = tmp_path
    machine = setup.machine("one", prefix=tmp_path.name, key=key if keyed else None)
    keys = machine.precompute(Path(setup.server.data.parent / "docs"))[4:1:-1]
    before = machine.ask(keys)
    assert before.tier is None
    machine.evict()
    machine.tier._known.clear()
    yield machine, keys, before
    machine.store.close()


def same(found: Answer, before: Answer) -> bool:
    return found.generated_ids == before.generated_ids and found.text == before.text


@pytest.mark.parametrize("pair", ["plain", "encrypted"], indirect=True)
def test_what_is_in_the_tier_is_loaded_and_kept(pair: tuple[Machine, list[bytes], Answer]) -> None:
    machine, keys, before = pair
    found = machine.ask(keys)
    assert same(found, before)
    assert [c.status for c in found.chunks] == [c.status for c in before.chunks]
    assert found.recomputed_tokens == before.recomputed_tokens
    assert (found.tier.found, found.tier.taken, found.tier.lost) == (4, 4, 0)  # three chunks and the prefix
    assert all(map(machine.store.has_kv, keys))
    again = machine.ask(keys)
    assert again.tier is None
    assert same(again, before)
    assert machine.said == []
    assert machine.tier.flush(LONG_S) == 0
    assert machine.tier.counts.put_bytes
    assert machine.tier.counts.failed == 0


def test_no_save_keeps_nothing(pair: tuple[Machine, list[bytes], Answer]) -> None:
    machine, keys, before = pair
    found = machine.engine.run_alone(machine.store, request(keys, save=False))
    assert same(found, before)
    assert found.tier.taken == 4
    assert not any(map(machine.store.has_kv, keys))


@pytest.mark.parametrize("pair", ["plain", "encrypted"], indirect=True)
def test_a_flipped_byte_in_every_object_is_a_miss(setup: TierSetup, pair: tuple[Machine, list[bytes], Answer]) -> None:
    machine, keys, before = pair
    full = machine.ask(keys, "full")
    files = [f for f in setup.server.objects() if machine.tier.tier.url.rpartition("/")[2] in str(f)]
    assert len(files) >= 9
    for number, file in enumerate(files):
        data = bytearray(file.read_bytes())
        data[len(data) * (number + 1) // (len(files) + 1)] ^= 1
        file.write_bytes(data)
    found = machine.ask(keys)
    assert found.generated_ids == full.generated_ids
    assert (found.tier.taken, found.tier.lost) == (0, 4)
    assert machine.tier.counts.refused == 4
    assert len(machine.said) == 1
    assert machine.tier.flush(LONG_S) == 0
    machine.evict()
    machine.tier._known.clear()
    healed = machine.ask(keys)
    # the chunks and the prefix: what was computed took the place of what was damaged
    assert (healed.tier.found, healed.tier.taken) == (4, 4)
    assert healed.generated_ids == before.generated_ids


@pytest.mark.parametrize("status", [500, 503, 403])
def test_a_tier_that_refuses_is_a_miss_and_is_left_alone(
    setup: TierSetup, pair: tuple[Machine, list[bytes], Answer], status: int
) -> None:
    machine, keys, _ = pair
    full = machine.ask(keys, "full")
    setup.server.status = status
    try:
        found = machine.ask(keys)
    finally:
        setup.server.status = 0
    assert found.generated_ids == full.generated_ids
    assert (found.tier.found, found.tier.taken) == (0, 0)
    assert machine.tier.counts.failed >= 3
    assert machine.tier.resting
    assert len(machine.said) == len(set(machine.said)) <= 2
    setup.server.seen.clear()
    machine.evict()
    assert machine.ask(keys).tier.found == 0
    assert setup.server.seen == []


def test_a_tier_that_hangs_is_waited_for_no_longer_than_the_deadline(
    setup: TierSetup, pair: tuple[Machine, list[bytes], Answer]
) -> None:
    machine, keys, _ = pair
    full = machine.ask(keys, "full")
    machine.tier.deadline_s = 0.01
    setup.server.hang = LONG_S
    try:
        found = machine.ask(keys)
    finally:
        setup.server.hang = 0.0
    assert found.generated_ids == full.generated_ids
    assert found.tier.found == 0
    assert machine.tier.counts.late == 4


def test_kv_that_does_not_come_is_computed(
    setup: TierSetup, pair: tuple[Machine, list[bytes], Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier says what it has, and then gives nothing."""
    machine, keys, _ = pair
    full = machine.ask(keys, "full")
    never = threading.Event()
    monkeypatch.setattr(machine.tier.tier, "read", lambda *where: never.wait(LONG_S) and memoryview(b""))
    monkeypatch.setattr("cacheblend_cli.engine.request.tiered.full_prefill_s", lambda *about: 0.01)
    find = machine.tier.find

    def in_time(chunks: object, seconds: float | None = None) -> object:
        machine.tier.deadline_s = 0.01
        return find(chunks, LONG_S)

    monkeypatch.setattr(machine.tier, "find", in_time)
    machine.tier.deadline_s = 0.01
    try:
        found = machine.ask(keys)
    finally:
        never.set()
    assert found.generated_ids == full.generated_ids
    assert (found.tier.found, found.tier.taken, found.tier.lost) == (4, 0, 4)
    assert len(found.notes) <= 3


def test_precompute_takes_what_another_machine_computed(setup: TierSetup, tmp_path: Path) -> None:
    setup.root = tmp_path
    docs = Path(setup.server.data.parent / "docs")
    one = setup.machine("one", prefix=tmp_path.name)
    keys = one.precompute(docs)
    two = setup.machine("two", prefix=tmp_path.name)
    report = two.engine.precompute(
        two.store, [str(docs)], PrecomputeOptions(chunk_tokens=16, context="sink"), lambda e: None
    )
    assert (report.computed_tokens, report.new) == (0, len(keys))
    assert all(map(two.store.has_kv, keys))
    assert same(two.ask(keys[:3]), one.ask(keys[:3]))
    assert two.tier.flush(LONG_S) == 0
    assert two.tier.counts.puts in (0, 1)  # the prefix is computed: it is stored first
    for machine in (one, two):
        machine.store.close()


def test_ratio_auto_weighs_the_tier(setup: TierSetup, pair: tuple[Machine, list[bytes], Answer]) -> None:
    machine, keys, _ = pair

    def ask() -> Answer:
        return machine.engine.run_alone(machine.store, request(keys, auto=True))

    machine.tier.latency_s, machine.tier.bytes_per_s = 1e-6, 1e12
    fast = ask()
    assert fast.auto.work.tier_bytes > 0
    machine.evict()
    machine.tier._known.clear()
    machine.tier.latency_s, machine.tier.bytes_per_s = 100.0, 1.0
    slow = ask()
    assert slow.mode == "full"
    assert slow.auto.decision.full.prefill_s < 100
