"""On a GPU a question is computed in full where blending would take longer, by the times of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cacheblend_store import ChunkStore
from fake_gpu import FakeGpu
from gpu_engine import Setup, capture_graphs, engine_gpu

from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.features import auto_ratio
from cacheblend_cli.engine.features.auto_ratio import decided
from cacheblend_cli.engine.worker.memory import MemoryProfile
from cacheblend_cli.kv.rows import slice_rows
from cacheblend_cli.types import (
    FULL_IS_FASTER,
    Answer,
    AskOptions,
    AskRequest,
    BlendParams,
    SamplingParams,
    TextDocument,
)

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
DEFAULT = AskOptions(own_ratio=True)
FULL_TIMES = ((64, 1.0), (128, 2.0))
SLOW_MS, FAST_MS = 10_000.0, 1.0
"""Milliseconds between two events of the device: a blended prefill takes longer than a full one, or not."""


@dataclass(frozen=True)
class Machine:
    setup: Setup
    gpu: FakeGpu
    engine: Engine
    store: ChunkStore
    keys: list[bytes]

    def request(self, **about: Any) -> AskRequest:
        given = {"keys": self.keys, "sampling": GREEDY, "options": DEFAULT} | about
        return AskRequest("what is it?", given.pop("keys"), **given)

    def ask(self, milliseconds: float, **about: Any) -> Answer:
        self.gpu.milliseconds = milliseconds
        return self.engine.run_alone(self.store, self.request(**about))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    setup = Setup.write(tmp_path, model={"num_hidden_layers": 4})
    with setup.store() as store, engine_gpu() as gpu:
        engine = setup.engine("cuda")
        keys = setup.precompute(engine, store)
        memory = engine.runtime.memory()
        assert memory is not None
        assert memory.profile is not None
        assert [n for n, _ in memory.profile.times] == [32, 64, 128]
        engine.runtime._memory = replace(memory, profile=replace(memory.profile, times=FULL_TIMES))
        machine = Machine(setup, gpu, engine, store, keys)
        machine.ask(FAST_MS, options=AskOptions())  # with a ratio of its own: nothing is learnt
        capture_graphs(engine)
        yield machine
        assert not gpu.errors


def test_what_was_slower_than_a_full_prefill_is_computed_in_full(machine: Machine) -> None:
    first = machine.ask(SLOW_MS)
    assert (first.mode, first.auto) == ("blend", None)  # nothing is known of blending yet
    answer = machine.ask(SLOW_MS)
    assert (answer.mode, answer.ratio, answer.ratio_from) == ("full", 1.0, FULL_IS_FASTER)
    assert answer.kv_bytes_loaded == answer.cached_tokens == 0
    assert any("full prefill" in note for note in answer.notes)
    assert answer.to_dict()["auto"]["mode"] == "full"
    plain = machine.setup.engine("cpu").run_alone(machine.store, machine.request(blend=BlendParams(mode="full")))
    assert answer.generated_ids == plain.generated_ids
    machine.gpu.milliseconds = FAST_MS
    others = machine.setup.engine("cuda")  # another process: what was learnt is in the user's cache
    others.runtime._memory = machine.engine.runtime._memory
    assert others.run_alone(machine.store, machine.request()).mode == "full"


def test_a_prefill_without_graphs_teaches_nothing(machine: Machine) -> None:
    """The next one of its shape has them."""
    memory, engine = machine.engine.runtime.memory(), machine.setup.engine("cuda")
    own = engine.runtime.memory()
    assert memory is not None
    assert own is not None
    engine.runtime._memory = replace(own, profile=memory.profile)
    others = replace(machine, engine=engine)
    assert [others.ask(SLOW_MS).mode for _ in range(2)] == ["blend", "blend"]
    capture_graphs(engine)
    assert [others.ask(SLOW_MS).mode for _ in range(2)] == ["blend", "full"]


def test_what_is_faster_blended_is_blended(machine: Machine) -> None:
    answers = [machine.ask(FAST_MS) for _ in range(3)]
    for answer in answers:
        assert (answer.mode, answer.auto, answer.notes) == ("blend", None, [])
        assert answer.timing.full_ttft_s is not None
        assert answer.timing.full_ttft_s > 1
    machine.ask(SLOW_MS)
    assert machine.ask(SLOW_MS).mode == "blend", "one slow prompt of several is an outlier"


def test_blending_is_tried_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_ratio, "_LOAD_AGAIN", 2)
    modes = [machine.ask(ms).mode for ms in (*[SLOW_MS] * 4, *[FAST_MS] * 4)]
    assert modes == ["blend", "full", "full", "blend", "full", "full", "blend", "blend"]


ASKED = {
    "a ratio": {"options": AskOptions()},
    "a selector": {"blend": BlendParams(selector="hkvd")},
    "no correction": {"blend": BlendParams(correction="none")},
    "a comparison": {"options": replace(DEFAULT, verify=True)},
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_a_user_asks_for_is_done(asked: str, machine: Machine) -> None:
    for _ in range(3):
        machine.ask(SLOW_MS)
    assert machine.ask(SLOW_MS).mode == "full"
    assert machine.ask(SLOW_MS, **ASKED[asked]).mode == "blend"


def test_ratio_auto_weighs_the_same_times(machine: Machine) -> None:
    options = AskOptions(auto=True)
    assert [machine.ask(SLOW_MS, options=options).mode for _ in range(2)] == ["blend", "full"]


def test_a_plan_says_it(machine: Machine) -> None:
    machine.ask(SLOW_MS)
    plan = machine.engine.plan_of(machine.engine.resolve(machine.store, machine.request()))
    assert (plan.cached_tokens, plan.kv_bytes, plan.auto) == (0, 0, None)
    assert any("full prefill" in note for note in plan.notes)


def test_missing_chunks_are_stored_and_used_ones_touched(machine: Machine) -> None:
    document = TextDocument("Mara sails to Bergen in a small boat with a parrot.")
    machine.ask(SLOW_MS)
    touched: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine.store, "touch", touched.extend)
        answer = machine.ask(SLOW_MS, documents=(document,))
    assert answer.mode == "full"
    assert set(machine.keys) <= set(touched)
    new = {bytes.fromhex(chunk.id) for chunk in answer.chunks} - set(machine.keys)
    assert new
    assert all(machine.store.has_kv(key) for key in new)


def test_a_narrow_model_takes_larger_slices(machine: Machine) -> None:
    """Whatever was measured: the same slices in every process, or bits of KV would differ."""
    decoder = machine.engine.model.decoder
    wide = SimpleNamespace(device=decoder.device, spec=replace(decoder.spec, hidden_size=4096))
    assert slice_rows(decoder) == machine.engine.runtime.slice_rows == 2 * slice_rows(wide) == 4096
    assert slice_rows(machine.setup.engine("cpu").model.decoder) == 256


def test_several_ranks_blend(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        machine.ask(SLOW_MS)
    request = machine.engine.resolve(machine.store, machine.request())
    assert decided(machine.engine.runtime, request)[0].blend.mode == "full"
    monkeypatch.setattr(machine.engine.runtime.decoder.part, "is_whole", False)
    assert decided(machine.engine.runtime, request) == (request, None)


def test_a_cpu_blends_and_measures_nothing(machine: Machine) -> None:
    engine = machine.setup.engine("cpu")
    profile = MemoryProfile(0, 0, 0, 0, times=((64, 1e-9), (128, 2e-9)))
    engine.runtime._memory = replace(engine.runtime.memory_for(40), profile=profile)
    answer = engine.run_alone(machine.store, machine.request())
    assert (answer.mode, answer.auto, answer.timing.full_ttft_s) == ("blend", None, None)
    assert not engine.runtime.speeds
