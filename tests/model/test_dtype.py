"""The compute dtype that `auto` chooses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cacheblend_kernels import compiled
from safetensors.torch import save_file

from cacheblend_cli.demo import model_dir
from cacheblend_cli.model.description import resolve_dtype
from cacheblend_cli.model.families import spec_from_config


def config() -> dict[str, object]:
    return dict(json.loads((model_dir() / "config.json").read_text()))


@pytest.mark.parametrize("named", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("native", [True, False])
def test_a_cpu_computes_in_bfloat16_only_what_is_saved_in_it_and_if_it_multiplies_it(
    named: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "has_bfloat16", lambda: native)
    spec = spec_from_config(config() | {"dtype": named})
    expected = "bfloat16" if native and named == "bfloat16" else "float32"
    assert resolve_dtype("auto", "cpu", spec, model_dir()) == expected


@pytest.mark.parametrize(
    ("way", "gain", "expected"), [(2, 0.5, True), (1, 2.0, True), (1, 0.9, False), (0, 2.0, False)]
)
def test_bfloat16_without_amx_has_to_be_faster(
    way: int, gain: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "library", lambda: object())
    monkeypatch.setattr(compiled, "_best_way", lambda dtype: way)
    monkeypatch.setattr(compiled, "_gain_of_bfloat16", lambda: gain)
    assert compiled.has_bfloat16() == expected


def test_without_compiled_products_a_cpu_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "library", lambda: None)
    assert not compiled.has_bfloat16()


@pytest.mark.parametrize(
    ("named", "device", "expected"),
    [
        ("bfloat16", "cuda", "bfloat16"),
        ("float16", "cuda", "float16"),
        ("float16", "cpu", "float32"),
        (None, "cuda", "bfloat16"),
        ("float64", "cuda", "float32"),
    ],
)
def test_auto_is_the_checkpoints_own_on_a_gpu(named: str | None, device: str, expected: str) -> None:
    own = spec_from_config(config() | {"dtype": named, "torch_dtype": None})
    assert resolve_dtype("auto", device, own, model_dir()) == expected


@pytest.mark.parametrize(
    ("large", "small", "expected"),
    [
        (torch.float32, torch.float32, "float32"),
        (torch.float16, torch.float32, "float16"),
        (torch.bfloat16, torch.float32, "bfloat16"),
        (torch.float64, torch.bfloat16, "float32"),
        (torch.int32, torch.float16, "float16"),
        (torch.int32, torch.uint8, "bfloat16"),
    ],
)
def test_without_a_dtype_in_config_auto_is_that_of_most_weights(
    tmp_path: Path, large: torch.dtype, small: torch.dtype, expected: str
) -> None:
    held = {"a": torch.ones(8, 8, dtype=large), "b": torch.ones(8, dtype=small)}
    save_file(held, tmp_path / "model.safetensors")
    silent = spec_from_config({k: v for k, v in config().items() if k not in ("dtype", "torch_dtype")})
    assert resolve_dtype("auto", "cuda", silent, tmp_path) == expected
