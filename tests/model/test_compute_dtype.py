"""What a CPU computes in by default: what was measured on it, and never less than the weights were saved in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cacheblend_cli import user_cache
from cacheblend_cli.demo import model_dir
from cacheblend_cli.model import compute_dtype
from cacheblend_cli.model.compute_dtype import ProductSpeeds, cpu_dtype, measure, product_speeds
from cacheblend_cli.model.families import spec_from_config
from cacheblend_cli.model.loading import resolve_dtype
from cacheblend_cli.model.spec import ModelSpec

FASTER = ProductSpeeds(fp32_many_s=4.0, fp32_one_s=2.0, bf16_many_s=2.0, bf16_one_s=1.0)
EMULATED = ProductSpeeds(fp32_many_s=4.0, fp32_one_s=2.0, bf16_many_s=9.0, bf16_one_s=1.0)
SLOW_ALONE = ProductSpeeds(fp32_many_s=4.0, fp32_one_s=2.0, bf16_many_s=2.0, bf16_one_s=3.0)


def config() -> dict[str, object]:
    return dict(json.loads((model_dir() / "config.json").read_text()))


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    monkeypatch.setattr(user_cache, "user_cache_path", lambda name: tmp_path)
    return spec_from_config(config())


@pytest.mark.parametrize(
    ("speeds", "stated", "expected"),
    [
        (FASTER, torch.bfloat16, torch.bfloat16),
        (EMULATED, torch.bfloat16, torch.float32),
        (SLOW_ALONE, torch.bfloat16, torch.float32),
        (FASTER, torch.float32, torch.float32),
        (FASTER, torch.float16, torch.float32),
    ],
)
def test_the_measure_decides_for_bf16_weights_alone(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, speeds: ProductSpeeds, stated: torch.dtype, expected: torch.dtype
) -> None:
    monkeypatch.setattr(compute_dtype, "measure", lambda spec: speeds)
    assert cpu_dtype(spec, stated) == expected


def test_it_is_measured_once(spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ModelSpec] = []
    monkeypatch.setattr(compute_dtype, "measure", lambda spec: (asked.append(spec), FASTER)[1])
    assert product_speeds(spec) == product_speeds(spec) == FASTER
    assert len(asked) == 1
    [kept] = (tmp_path / "products").iterdir()
    kept.write_text("{")
    assert product_speeds(spec) == FASTER
    assert len(asked) == 2, "what does not read is measured again"


def test_a_measure_is_of_four_products(spec: ModelSpec) -> None:
    found = measure(spec)
    assert min(vars(found).values()) > 0
    assert found.best in (torch.float32, torch.bfloat16)


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
