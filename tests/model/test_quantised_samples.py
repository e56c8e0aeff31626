"""Quantised weights are read as the libraries that define their formats read them (tools/quantised_samples.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.quantisation import read_quantisation
from cacheblend_cli.model.quantised import DequantisedTensors
from cacheblend_cli.model.tensor_source import SafetensorsFiles

SAMPLES = Path(__file__).parent / "quantised_samples.safetensors"


def parts_of(sample: str) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]:
    with safe_open(SAMPLES, framework="pt") as file:
        held = {n.split("/")[1]: file.get_tensor(n) for n in file.keys() if n.startswith(f"{sample}/")}  # noqa: SIM118
        return held, held.pop("read"), json.loads(file.metadata()[sample])


def samples() -> list[str]:
    with safe_open(SAMPLES, framework="pt") as file:
        return sorted(file.metadata())


def read(folder: Path, held: dict[str, torch.Tensor], config: dict[str, Any], step: int) -> torch.Tensor:
    save_file(held, folder / "m.safetensors")
    quantisation = read_quantisation(config)
    assert quantisation is not None
    source = DequantisedTensors(SafetensorsFiles([folder / "m.safetensors"]), quantisation)
    (header,) = source.headers()
    name, kind, (rows, _) = header
    assert (name, kind) == ("layer.weight", "F32")
    return torch.cat([source.read(name, start, min(rows, start + step)) for start in range(0, rows, step)])


@pytest.mark.parametrize("step", [1000, 7])
@pytest.mark.parametrize("sample", samples())
def test_a_weight_is_read_as_its_library_reads_it(sample: str, step: int, tmp_path: Path) -> None:
    held, theirs, config = parts_of(sample)
    ours = read(tmp_path, held, config, step)
    assert ours.dtype == torch.float32
    assert theirs.abs().max() > 0.1
    assert (ours - theirs).abs().max() <= 1e-7


@pytest.mark.parametrize("powers", [None, torch.float8_e8m0fnu, torch.uint8])
def test_fp8_blocks_are_read_as_transformers_reads_them(powers: torch.dtype | None, tmp_path: Path) -> None:
    torch.manual_seed(1)
    weight, scales = torch.randn(48, 96).to(torch.float8_e4m3fn), torch.rand(3, 3) + 0.5
    if powers is not None:
        scales = torch.exp2(torch.arange(-4.0, 5.0)).view(3, 3).to(torch.float8_e8m0fnu)
        scales = scales.view(torch.uint8) if powers == torch.uint8 else scales
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scales, torch.float32)
    config = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    ours = read(tmp_path, {"layer.weight": weight, "layer.weight_scale_inv": scales}, config, 5)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("sample", "change", "told"),
    [
        ("packed 4 bits", lambda t: t.update({"layer.weight_shape": torch.tensor([40, 80])}), "[40, 80]"),
        ("int8 asymmetric", lambda t: t.pop("layer.weight_zero_point"), "weight_zero_point"),
        ("fp8 tensor", lambda t: t.update({"layer.weight_scale": torch.ones(1).to(torch.int32)}), "I32"),
        ("int8 channels", lambda t: t.update({"layer.weight": torch.ones(40, 64).to(torch.float8_e4m3fn)}), "F8_E4M3"),
    ],
)
def test_parts_that_do_not_fit_are_told(sample: str, change: Any, told: str, tmp_path: Path) -> None:
    held, _, config = parts_of(sample)
    change(held)
    with pytest.raises(UsageError) as refused:
        read(tmp_path, held, config, 1000)
    assert told in refused.value.message
