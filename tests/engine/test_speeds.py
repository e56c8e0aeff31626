"""Measured speeds: the fit, the probes, and the file they are kept in."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cacheblend_store import ChunkStore
from checkpoints import WORDS, write_checkpoint

from cacheblend_cli.blend.cost import estimate_full
from cacheblend_cli.blend.speeds import (
    fit,
    full_speeds,
    kv_share,
    measure_compute,
    read_speeds,
    speed_file,
    write_speeds,
)
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.features.auto_ratio import kv_bytes, workload
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.model.weights import load_weights
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams, Speeds, Workload

ROWS = (8, 32, 128, 512, 1024)
SPEEDS = Speeds(1e-4, 1e-5, 1e-9, 1e-4, 1e-3, 1e9, 3)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path / "model", "llama-gqa")
    return Engine.load(EngineConfig(model=str(path / "model"), block_size=16))


@pytest.mark.parametrize("true", [(1e-4, 1e-5, 1e-9), (0.0, 1e-5, 0.0), (2e-3, 1e-6, 1e-8)])
def test_the_fit_finds_what_made_the_times(true: tuple[float, float, float]) -> None:
    times = [true[0] + n * true[1] + n * (n + 1) / 2 * true[2] for n in ROWS]
    assert fit(ROWS, times) == pytest.approx(true, rel=1e-6, abs=1e-15)
    noisy = fit(ROWS, [t * (1.1 if i % 2 else 0.9) for i, t in enumerate(times)])
    assert min(noisy) >= 0
    for n, t in zip(ROWS, times, strict=True):
        assert noisy[0] + n * noisy[1] + n * (n + 1) / 2 * noisy[2] == pytest.approx(t, rel=0.3)


@pytest.mark.parametrize("times", [[1.0], [1.0, 0.5], [3.0, 2.0, 1.0, 0.5, 0.1]])
def test_the_fit_never_says_that_rows_cost_nothing(times: list[float]) -> None:
    found = fit(ROWS[: len(times)], times)
    assert min(found) >= 0
    assert found[1] > 0


@pytest.mark.parametrize(
    "times", [((256, 0.018), (512, 0.03)), ((256, 0.1), (512, 0.21))], ids=["launches", "attention"]
)
def test_full_prefills_are_estimated_from_two(times: tuple[tuple[int, float], ...], engine: Engine) -> None:
    spec = engine.model.spec
    speeds = full_speeds(spec, times)
    for n, seconds in times:
        work = Workload(spec.num_kv_layers, n, 0, 0.0, n, n / 2, 0, kv_share(spec))
        assert estimate_full(speeds, work).prefill_s == pytest.approx(seconds, rel=0.01)


def test_a_short_full_prefill_is_not_estimated_from_long_ones_alone(engine: Engine) -> None:
    spec = engine.model.spec
    speeds = full_speeds(spec, ((256, 0.015), (4096, 0.03), (8192, 0.062)))
    work = Workload(spec.num_kv_layers, 512, 0, 0.0, 512, 256, 0, kv_share(spec))
    assert 0.01 < estimate_full(speeds, work).prefill_s < 0.02


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_every_depth_can_be_probed(tmp_path: Path, layers: int) -> None:
    write_checkpoint(tmp_path / "model", "qwen2", num_hidden_layers=layers)
    decoder = Engine.load(EngineConfig(model=str(tmp_path / "model"))).model.decoder
    speeds = measure_compute(decoder, 16, seconds=0.05)
    assert speeds.row_s > 0
    assert speeds.head_s > 0
    assert speeds.moved_s > 0
    assert math.isinf(speeds.bytes_per_s)
    assert len(decoder.layers) == decoder.spec.num_layers == layers  # the probe took a copy


def test_kv_share_is_that_of_the_weights(engine: Engine) -> None:
    spec = engine.model.spec
    weights = load_weights(spec, engine.model.path, torch.float32, torch.device("cpu"))
    products = [math.prod(t.shape) for name, t in weights.items() if name.startswith("0.") and len(t.shape) == 2]
    kv = math.prod(weights["0.qkv_proj.weight"][spec.q_size :].shape)
    assert kv_share(spec) == pytest.approx(kv / sum(products))


def test_the_workload_is_that_of_the_plan(tmp_path: Path, engine: Engine) -> None:
    for i in range(3):
        (tmp_path / f"{i}.md").write_text(" ".join(WORDS[i : i + 9]) + f" {i}.\n")
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        engine.precompute(store, [str(tmp_path)], PrecomputeOptions(chunk_tokens=40), lambda event: None)
        keys = sorted(m.key for m in store.chunks())
        request = resolve(engine.runtime, store, AskRequest("who?", keys, BlendParams(), SamplingParams()))
        plan = request.plan
        answer = engine.run_alone(store, AskRequest("who?", keys, BlendParams(), SamplingParams(max_tokens=1)))
        work = workload(request)
        assert work.total == answer.prompt_tokens
        assert work.inexact == answer.cached_tokens - answer.exact_tokens
        assert work.fresh == plan.fresh_tokens
        assert work.kv_bytes == kv_bytes(request) == answer.kv_bytes_loaded
        seen = [p + 1 for s in plan.chunks if s.status == "blended" for p in range(s.start, s.end)]
        assert work.inexact_keys == pytest.approx(sum(seen) / len(seen))
        assert workload(replace(request, blend=BlendParams(selector="first"))).check_layer == 0
        blends = BlendParams(), BlendParams(correction="none")
        assert [workload(replace(request, blend=b)).corrected for b in blends] == [True, False]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "new" / "speeds" / "x.json"
    assert read_speeds(file) is None
    for speeds in (SPEEDS, replace(SPEEDS, bytes_per_s=math.inf)):
        write_speeds(file, speeds)
        assert read_speeds(file) == speeds
        assert [p.name for p in file.parent.iterdir()] == ["x.json"]
        json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize(
    "change",
    [
        {"row_s": 0},
        {"row_s": -1.0},
        {"layer_s": "fast"},
        {"pair_s": True},
        {"bytes_per_s": 0},
        {"row_s": float("nan")},
    ],
)
def test_a_file_that_makes_no_sense_is_none(tmp_path: Path, change: dict[str, object]) -> None:
    file = tmp_path / "x.json"
    write_speeds(file, SPEEDS)
    data = json.loads(file.read_text())
    file.write_text(json.dumps(data))
    assert read_speeds(file) == SPEEDS
    file.write_text(json.dumps(data | change))
    assert read_speeds(file) is None
    for text in ("", "{", "[]", "null", json.dumps(data)[:-9]):
        file.write_text(text)
        assert read_speeds(file) is None
    file.write_bytes(b"\xff\xfe")
    assert read_speeds(file) is None


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = tmp_path / "file" / "x.json"
    write_speeds(file, SPEEDS)
    assert read_speeds(file) is None


def test_other_circumstances_are_another_file(engine: Engine) -> None:
    here = speed_file(engine.model, "float32")
    assert speed_file(engine.model, "float32") == here
    assert speed_file(engine.model, "int8") != here
    assert speed_file(replace(engine.model, fingerprint="other"), "float32") != here
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert speed_file(engine.model, "float32") != here
    finally:
        torch.set_num_threads(threads)
