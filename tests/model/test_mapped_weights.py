"""Weights that stay in their file until they are taken out are those that are copied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from hub_families import RUN
from safetensors.torch import load_file, save_file

from cacheblend_cli.model import weights as loading
from cacheblend_cli.model.families import read_spec
from cacheblend_cli.model.weights import load_weights

CPU = torch.device("cpu")


def loaded(path: Path, least: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    monkeypatch.setattr(loading, "OWN_MAPPING", least)
    held = load_weights(read_spec(path), path, torch.bfloat16, CPU)
    return {name: held.pop(name).clone() for name in list(held)}


MODELS = {model.name: model for model in RUN}


@pytest.mark.parametrize(
    "name", ["qwen2", "gemma-2", "glm-4-9b"]
)  # all mapped; norms have an offset; heads are reordered: none
def test_they_are_the_same(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in MODELS:
        MODELS[name].write(tmp_path)
    else:
        write_checkpoint(tmp_path, name)
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
    other = next(name for name in tensors if "layers.0" in name and "k_proj.weight" in name)
    tensors[other] = tensors[other].float()
    save_file(tensors, file, {"format": "pt"})
    copied, mapped = (loaded(tmp_path, least, monkeypatch) for least in (1 << 30, 256))
    assert copied.keys() == mapped.keys()
    for weight, tensor in copied.items():
        assert torch.equal(tensor, mapped[weight]), weight


def test_taking_one_out_gives_its_file_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, "qwen2")
    monkeypatch.setattr(loading, "OWN_MAPPING", 256)
    held = load_weights(read_spec(tmp_path), tmp_path, torch.float32, CPU)

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    before = mappings()
    assert before > 4
    for name in list(held):
        if name.startswith("0."):
            held.pop(name)
    assert mappings() <= before - 4
