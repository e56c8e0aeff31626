"""Scales of float8 KV that a checkpoint brings: read where the pool is float8, and passed over where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from safetensors.torch import load_file, save_file

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.kv_scales import KVScales

LAYERS = 2
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}


def write(path: Path, names: dict[str, Any], quantisation: dict[str, Any] | None = None) -> Path:
    """A checkpoint with these tensors of every layer's attention, of the layer's number and one more each."""
    write_checkpoint(path, "llama-gqa", num_hidden_layers=LAYERS)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(LAYERS):
        for name, value in names.items():
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.as_tensor(value) * (layer + 1)
    save_file(tensors, file, metadata={"format": "pt"})
    if quantisation is not None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    return path


def scales(path: Path, pool: str = "float8_e4m3") -> KVScales | None:
    return Runtime.load(EngineConfig(model=str(path), device="cpu", kv_pool_dtype=pool)).decoder.kv_scales


@pytest.mark.parametrize(
    "names",
    [
        {"k_scale": 0.25, "v_scale": 0.5},
        {"k_scale": [0.25], "v_scale": [0.5], "q_scale": [1.0]},
        {"k_scale": [0.25, 0.25], "v_scale": [[[0.5]], [[0.5]]]},  # a head each
        {"attn.k_scale": 0.25, "attn.v_scale": 0.5},
        {"k_proj.k_scale": 0.25, "v_proj.v_scale": 0.5},
        {"k_proj.output_scale": 0.25, "v_proj.output_scale": 0.5},
    ],
)
def test_its_own_scales_are_those_of_a_float8_pool(tmp_path: Path, names: dict[str, Any]) -> None:
    found = scales(write(tmp_path / "m", names, COMPRESSED))
    assert found is not None
    for layer, (k, v) in enumerate(zip(found.k, found.v, strict=True), 1):
        assert k.tolist() == [0.25 * layer] * 2
        assert v.tolist() == [0.5 * layer] * 2


def test_one_scale_for_both(tmp_path: Path) -> None:
    found = scales(write(tmp_path / "m", {"kv_scale": 0.125}))
    assert found is not None
    assert found.k[1].tolist() == found.v[1].tolist() == [0.25, 0.25]


def test_they_are_passed_over_where_the_pool_is_not_float8(tmp_path: Path) -> None:
    assert scales(write(tmp_path / "m", {"k_scale": 0.25}, COMPRESSED), "auto") is None


def test_scales_of_integers_are_not_used(tmp_path: Path) -> None:
    names = {"k_scale": 0.25, "v_scale": 0.5, "k_zero_point": 0.0, "v_zero_point": 0.0}
    integers = COMPRESSED | {"kv_cache_scheme": SCHEME | {"type": "int"}}
    found = scales(write(tmp_path / "m", names, integers))
    assert found is not None
    assert found.k[0].tolist() != [0.25, 0.25], "they are calibrated"


@pytest.mark.parametrize(
    ("names", "named"),
    [
        ({"k_scale": 0.25}, "v_scale of layer 0"),
        ({"k_scale": 0.25, "v_scale": -1.0}, "self_attn.v_scale"),
        ({"k_scale": [0.25, 0.5, 1.0], "v_scale": 0.5}, "self_attn.k_scale"),
        ({"k_scale": 0.25, "v_scale": float("nan")}, "self_attn.v_scale"),
    ],
)
def test_what_is_missing_or_damaged_is_named(tmp_path: Path, names: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError) as refused:
        scales(write(tmp_path / "m", names, COMPRESSED))
    assert refused.value.exit_code == 2
    assert named in refused.value.message
