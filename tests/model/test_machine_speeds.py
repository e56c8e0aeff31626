"""Choices by measurement (compute dtype): measured once, stored, and equal for all processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cacheblend_cli import user_cache
from cacheblend_cli.demo import model_dir
from cacheblend_cli.model import machine_speeds
from cacheblend_cli.model.families import spec_from_config
from cacheblend_cli.model.loading import resolve_dtype
from cacheblend_cli.model.machine_speeds import (
    CandidateSpeeds,
    cpu_dtype,
    measure,
    product_speeds,
)
from cacheblend_cli.model.spec import ModelSpec

FASTER = {"float32": (4.0, 2.0), "bfloat16": (2.0, 1.0)}
EMULATED = {"float32": (4.0, 2.0), "bfloat16": (9.0, 1.0)}
SLOW_ALONE = {"float32": (4.0, 2.0), "bfloat16": (2.0, 3.0)}


def config() -> dict[str, object]:
    return dict(json.loads((model_dir() / "config.json").read_text()))


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    monkeypatch.setattr(user_cache, "user_cache_path", lambda name: tmp_path)
    return spec_from_config(config())


@pytest.mark.parametrize(
    ("seconds", "stated", "expected"),
    [
        (FASTER, torch.bfloat16, torch.bfloat16),
        (EMULATED, torch.bfloat16, torch.float32),
        (SLOW_ALONE, torch.bfloat16, torch.float32),
        (FASTER, torch.float32, torch.float32),
        (FASTER, torch.float16, torch.float32),
    ],
)
def test_the_measure_decides_for_bf16_weights_alone(
    spec: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
    seconds: dict[str, tuple[float, float]],
    stated: torch.dtype,
    expected: torch.dtype,
) -> None:
    monkeypatch.setattr(machine_speeds, "measure", lambda candidates: seconds)
    assert cpu_dtype(spec, stated) == expected


def test_it_is_measured_once(spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(machine_speeds, "measure", lambda candidates: (asked.append(candidates), FASTER)[1])
    assert product_speeds(spec) == product_speeds(spec)
    assert len(asked) == 1
    [kept] = (tmp_path / "products").iterdir()
    other, zero = '{"packed": [1, 1], "plain": [1, 1]}', '{"float32": [0, 0], "bfloat16": [1, 1]}'
    texts = ("{", "{}", "[1]", '{"float32": 1}', '{"float32": [1, 2, 3]}', other, zero)
    for damaged in texts:
        kept.write_text(damaged)
        assert product_speeds(spec).seconds == FASTER
    assert len(asked) == 1 + len(texts), "what does not read is measured again"


def test_of_two_processes_that_measure_at_once_the_first_decides(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(candidates: Mapping[str, object]) -> dict[str, tuple[float, float]]:
        monkeypatch.setattr(machine_speeds, "measure", lambda candidates: FASTER)
        product_speeds(spec)
        return EMULATED

    monkeypatch.setattr(machine_speeds, "measure", overtaken)
    assert product_speeds(spec).seconds == FASTER
    assert product_speeds(spec).seconds == FASTER


def test_where_nothing_can_be_kept_it_is_measured_each_time(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "products").write_text("a file in the place of the folder")
    monkeypatch.setattr(machine_speeds, "measure", lambda candidates: FASTER)
    assert product_speeds(spec).seconds == FASTER


def test_the_default_stays_unless_another_is_clearly_faster() -> None:
    default, close, first, second = (1.0, 1.0), (0.9, 0.9), (0.5, 1.05), (1.5, 0.5)
    assert CandidateSpeeds({"default": default, "close": close}).best == "default"
    speeds = CandidateSpeeds({"default": default, "close": close, "first": first, "second": second})
    assert speeds.best == "first"


def test_what_is_measured_runs_in_every_case(spec: ModelSpec) -> None:
    speeds = product_speeds(spec)
    assert list(speeds.seconds) == ["float32", "bfloat16"]
    assert min(min(times) for times in speeds.seconds.values()) > 0
    assert set(machine_speeds.describe(spec)) == {"products"}


def test_a_disturbed_run_does_not_count() -> None:
    runs = {"a": 0, "b": 0}

    def run(name: str) -> None:
        runs[name] += 1
        torch.ones(10_000 if runs[name] == 3 else 10).sort()

    found = measure({name: (lambda name=name: run(name), lambda: None) for name in runs})  # type: ignore[misc]
    assert min(runs.values()) >= 4
    assert found.keys() == runs.keys()


@pytest.mark.parametrize(
    ("named", "device", "expected"),
    [
        ("bfloat16", "cuda", torch.bfloat16),
        ("float16", "cuda", torch.float16),
        ("float16", "cpu", torch.float32),
        (None, "cuda", torch.bfloat16),
        ("float64", "cuda", torch.float32),
    ],
)
def test_auto_is_the_checkpoints_own_on_a_gpu(
    spec: ModelSpec, named: str | None, device: str, expected: torch.dtype
) -> None:
    del spec
    own = spec_from_config(config() | {"dtype": named, "torch_dtype": None})
    assert resolve_dtype("auto", torch.device(device), own, model_dir()) == expected


@pytest.mark.parametrize(
    ("large", "small", "expected"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float16, torch.float32, torch.float16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float64, torch.bfloat16, torch.float32),
        (torch.int32, torch.float16, torch.float16),
        (torch.int32, torch.uint8, torch.bfloat16),
    ],
)
def test_without_a_dtype_in_config_auto_is_that_of_most_weights(
    spec: ModelSpec, tmp_path: Path, large: torch.dtype, small: torch.dtype, expected: torch.dtype
) -> None:
    held = {"a": torch.ones(8, 8, dtype=large), "b": torch.ones(8, dtype=small)}
    save_file(held, tmp_path / "model.safetensors")
    del spec
    silent = spec_from_config({k: v for k, v in config().items() if k not in ("dtype", "torch_dtype")})
    assert resolve_dtype("auto", torch.device("cuda"), silent, tmp_path) == expected
