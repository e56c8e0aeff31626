"""A GPU's memory: the room for KV found by the profile run, and errors if it is too small."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from callbacks import answered, pieces_to
from checkpoints import write_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_cli.blend.corrections import Regression
from cacheblend_cli.collect import prefill as collect
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.worker import prefill as worker_prefill
from cacheblend_cli.engine.worker.decode import GraphRunner
from cacheblend_cli.engine.worker.memory import (
    MemoryProfile,
    blocks_that_fit,
    measure,
    reserve,
    warm_up,
    warm_up_graphs,
)
from cacheblend_cli.errors import DeviceError, UsageError
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.model import host_memory
from cacheblend_cli.model.device import check_host_room, check_room
from cacheblend_cli.types import AskOptions, AskRequest, BlendParams, SamplingParams

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    write_checkpoint(tmp_path / "model", "llama-gqa")
    return Engine.load(EngineConfig(model=str(tmp_path / "model"), block_size=16, prompt="{chunks} {question}"))


class Gauge:
    """A device whose prefills take 1 MiB and 1000 bytes a row, beside the KV of their own pool."""

    def __init__(self, engine: Engine, total: int, used: int) -> None:
        self.total, self._used, self._engine = total, used, engine
        self.rows: list[int] = []

    def used(self) -> int:
        return self._used

    def peak(self, run: Callable[[], None]) -> int:
        num_rows = run.args[1]  # type: ignore[attr-defined]
        run()
        self.rows.append(num_rows)
        kv = int(self._engine.model.spec.kv_bytes_per_token(4)) * -(-num_rows // 16) * 16
        return (1 << 20) + 1000 * num_rows + kv


def test_the_profile_finds_what_a_row_takes(engine: Engine) -> None:
    gauge = Gauge(engine, 1 << 30, 1 << 28)
    found = measure(engine.model.decoder, 16, gauge)
    assert gauge.rows == [n for n, _ in found.times] == [256, 512]  # no longer than the context of the model
    assert all(seconds > 0 for _, seconds in found.times)
    assert found.per_row == pytest.approx(1000, abs=1)
    assert found.fixed == pytest.approx(1 << 20, abs=600)


@given(
    st.integers(1 << 28, 1 << 38), st.floats(0.05, 1.0), st.floats(0, 1.2), st.integers(1, 1 << 18), st.integers(1, 1 << 18),
    st.sampled_from([1024, 32768, 131072]), st.sampled_from([16, 64]),
)  # fmt: skip
def test_pool_and_activations_never_pass_the_share(
    total: int, utilization: float, used: float, per_row: int, kv: int, context: int, block_size: int
) -> None:
    profile = MemoryProfile(total, int(used * total), 1 << 20, per_row)
    room = utilization * total - profile.used - profile.fixed
    try:
        blocks = blocks_that_fit(profile, utilization, kv, context, block_size)
    except DeviceError:
        assert room < 2 * block_size * (kv + per_row)
        return
    tokens = blocks * block_size
    assert tokens * (kv + per_row) <= room + block_size * (kv + per_row)
    more = tokens + 2 * block_size
    assert tokens >= 2 * context or more * (kv + per_row) > room  # nothing is left that a prompt could use


def test_one_pool_serves_question_after_question(engine: Engine) -> None:
    """The lasting pool gives the answers of a fresh one, and every block comes back, whatever happened."""
    plain = engine.run_alone(None, AskRequest("where does Mara work?", [], BlendParams(), GREEDY))
    memory = reserve(engine.model.decoder, engine.config, meter=Gauge(engine, 1 << 30, 1 << 28))
    engine.runtime._memory = memory
    for cache in memory.pool.tensors:
        cache.fill_(float("nan"))
    for _ in range(3):
        answer = engine.run_alone(
            None, AskRequest("where does Mara work?", [], BlendParams(), GREEDY), AskOptions(verify=True)
        )
        assert answer.generated_ids == plain.generated_ids
        assert answer.verify is not None
        assert answer.verify.kl < 1e-6
        assert memory.pool.allocator.num_used == 0

    def broken(piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answered(
            engine,
            engine.resolve(None, AskRequest("where does Mara work?", [], BlendParams(), GREEDY)),
            pieces_to(broken),
        )
    assert memory.pool.allocator.num_used == 0
    with pytest.raises(UsageError, match="check-layer 9"):
        engine.run_alone(
            None, AskRequest("where does Mara work?", [], BlendParams(selector="hkvd", check_layer=9), GREEDY)
        )
    assert memory.pool.allocator.num_used == 0


def test_the_warm_up_runs_what_a_question_runs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves the pool as it was: empty."""
    launched: list[str] = []
    kernels, num_layers = engine.model.decoder.kernels, engine.model.spec.num_layers
    for name in ("load_kv", "kv_deviation", "rope", "rope_and_cache", "prefill_attention", "warm_up"):
        plain = getattr(kernels, name)

        def counted(*args: Any, name: str = name, plain: Any = plain, **kwargs: Any) -> Any:
            launched.append(name)
            return plain(*args, **kwargs)

        monkeypatch.setattr(kernels, name, counted)
    corrected: list[int] = []
    plain_apply = Regression.apply

    def applied(self: Any, layer: Any, *args: Any) -> None:
        corrected.append(layer.index)
        plain_apply(self, layer, *args)

    monkeypatch.setattr(Regression, "apply", applied)
    pool = KVPool.of(engine.model.decoder, 4, 16)
    warm_up(engine.model.decoder, pool)
    assert set(corrected) == set(range(1, num_layers))  # the default's, after the question's probe
    assert {name: launched.count(name) for name in ("kv_deviation", "warm_up")} == {
        "kv_deviation": 1,
        "warm_up": 1,  # every layer attends as the others do
    }
    assert {"load_kv", "rope", "rope_and_cache", "prefill_attention"} <= set(launched)
    assert pool.allocator.num_used == 0


def test_the_first_answer_captures_no_graph(engine: Engine) -> None:
    """The graphs of one answer are captured for contexts of usual length, and none for more than the model has."""
    captured: list[int] = []

    def capture(function: Callable[[], None]) -> Callable[[], None]:
        captured.append(1)
        return function

    decoder = engine.model.decoder
    pool = KVPool.of(decoder, 40, 16)
    runner = GraphRunner(decoder, pool, capture)
    warm_up_graphs(runner, 3000)
    assert sorted(runner._graphs) == [(1, 1024), (1, 2048), (1, 4096)]
    sequence = pool.new_sequence(32)
    runner.begin([sequence], [20], 4)
    runner.step(torch.tensor([5]))
    assert len(captured) == 3
    others = GraphRunner(decoder, pool, capture)
    warm_up_graphs(others, 100)
    assert sorted(others._graphs) == [(1, 1024)]
    warm_up_graphs(others, 1 << 20)
    assert max(others._graphs) == (1, 8192)


def test_what_would_fit_is_said(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    per_token = engine.model.spec.kv_bytes_per_token(4) + 1000
    used = 1 << 28
    total = int((used + (1 << 20) + 64 * per_token) / 0.9) + 8000
    engine.runtime._memory = reserve(engine.model.decoder, engine.config, meter=Gauge(engine, total, used))
    with pytest.raises(DeviceError, match=r"hold 64$") as caught:
        engine.run_alone(None, AskRequest("where does Mara work? " * 20, [], BlendParams(), GREEDY))
    assert caught.value.hint is not None
    assert "--gpu-memory-utilization" in caught.value.hint

    held: list[weakref.ref[torch.Tensor]] = []

    def out_of_memory(*args: object, **kwargs: object) -> None:
        activations = torch.zeros(8)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(worker_prefill, "layer_by_layer", out_of_memory)
    with pytest.raises(DeviceError, match="tokens") as caught:
        engine.run_alone(None, AskRequest("where?", [], BlendParams(), GREEDY))
    assert caught.value.__cause__ is not None
    assert held[0]() is None  # or what would fit were counted too low
    assert engine.runtime._memory is not None
    assert engine.runtime._memory.pool.allocator.num_used == 0


def test_packs_that_do_not_fit_are_halved(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = engine.model.decoder
    prefix = collect.collect_prefix(decoder, [1, 2, 3])
    sequences = [
        collect.CollectSequence(tuple(range(5, 5 + n)), (collect.Kept(bytes([n]), 0, n),)) for n in (7, 9, 4, 12, 6)
    ]
    whole = list(collect.collect(decoder, prefix, sequences))
    plain, sizes = collect._Place.collect, []

    def tight(place: Any, pieces: Any) -> Any:
        sizes.append(len(pieces))
        if sum(end - start for start, end in pieces) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(place, pieces)

    monkeypatch.setattr(collect._Place, "collect", tight)
    most = 16
    found = list(collect.collect(decoder, prefix, sequences))
    assert sizes == [5, 2, 3, 1, 2, 1, 1]
    assert [kv.key for kv in found] == [kv.key for kv in whole]
    for ours, theirs in zip(found, whole, strict=True):
        torch.testing.assert_close(ours.k, theirs.k)
        torch.testing.assert_close(ours.v, theirs.v)
    most = 11
    with pytest.raises(DeviceError, match="15 tokens") as caught:
        list(collect.collect(decoder, prefix, sequences))
    assert "--chunk-tokens" in str(caught.value.hint)


def test_weights_that_cannot_fit_are_told_before_they_are_read(engine: Engine) -> None:
    decoder = engine.model.decoder
    check_room(engine.model.spec, torch.float32, torch.device("cuda:0"), 4 * decoder.num_parameters)
    with pytest.raises(DeviceError, match="float32") as caught:
        check_room(engine.model.spec, torch.float32, torch.device("cuda:0"), 4 * decoder.num_parameters - 1)
    assert caught.value.hint


def test_weights_that_the_host_cannot_hold_are_refused() -> None:
    check_host_room(1 << 30, torch.bfloat16, 1 << 30)
    check_host_room(1 << 30, torch.bfloat16, None)
    with pytest.raises(DeviceError, match=r"1\.0 GiB in bfloat16; 1\.0 GiB of memory"):
        check_host_room(1 << 30, torch.bfloat16, (1 << 30) - 1)


def test_a_containers_limit_is_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CONTAINER_LIMIT", tmp_path / "memory.max")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:  4096 kB\n")
    assert host_memory.available_memory() == 4 << 20
    for text, limit in (("max\n", 4 << 20), ("1048576\n", 1 << 20)):
        (tmp_path / "memory.max").write_text(text)
        assert host_memory.available_memory() == limit
    (tmp_path / "memory.current").write_text("614400\n")
    (tmp_path / "memory.stat").write_text("anon 409600\ninactive_file 204800\n")
    assert host_memory.available_memory() == (1 << 20) - 409600
    assert host_memory.total_memory() == 1 << 20


def test_no_room_at_all(engine: Engine) -> None:
    with pytest.raises(DeviceError) as caught:
        reserve(engine.model.decoder, engine.config, meter=Gauge(engine, 1 << 30, 1 << 30))
    assert caught.value.exit_code == 5


def test_the_cpu_keeps_no_pool(engine: Engine) -> None:
    assert engine.runtime.memory() is None
    with pytest.raises(UsageError, match="gpu-memory-utilization"):
        EngineConfig(gpu_memory_utilization=0)
