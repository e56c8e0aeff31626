"""The compute dtype that `auto` chooses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cacheblend_kernels import compiled
from safetensors.torch import save_file

from cacheblend_cli.demo import model_dir
from cacheblend_cli.model.families import spec_from_config
from cacheblend_cli.model.loading import resolve_dtype


def config() -> dict[str, object]:
    return dict(json.loads((model_dir() / "config.json").read_text()))


@pytest.mark.parametrize("named", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("native", [True, False])
def test_a_cpu_computes_in_bfloat16_only_what_is_saved_in_it_and_if_it_multiplies_it(
    named: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "has_bfloat16", lambda: native)
    spec = spec_from_config(config() | {"dtype": named})
    expected = torch.bfloat16 if native and named == "bfloat16" else torch.float32
    assert resolve_dtype("auto", torch.device("cpu"), spec, model_dir()) == expected


def test_without_compiled_products_a_cpu_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "library", lambda: None)
    assert not compiled.has_bfloat16()


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
def test_auto_is_the_checkpoints_own_on_a_gpu(named: str | None, device: str, expected: torch.dtype) -> None:
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
    tmp_path: Path, large: torch.dtype, small: torch.dtype, expected: torch.dtype
) -> None:
    held = {"a": torch.ones(8, 8, dtype=large), "b": torch.ones(8, dtype=small)}
    save_file(held, tmp_path / "model.safetensors")
    silent = spec_from_config({k: v for k, v in config().items() if k not in ("dtype", "torch_dtype")})
    assert resolve_dtype("auto", torch.device("cuda"), silent, tmp_path) == expected
