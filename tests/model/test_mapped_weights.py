"""Weights that stay in their file until they are taken out are those that are copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from checkpoints import write_checkpoint
from gguf_files import write_gguf
from hub_families import RUN
from safetensors.torch import load_file, save_file

from cacheblend_cli.model import loading, sharded, weights
from cacheblend_cli.model.families import read_spec
from cacheblend_cli.model.loading import Precision, load_model
from cacheblend_cli.model.sharded import Cut
from cacheblend_cli.model.weights import load_weights

CPU = torch.device("cpu")


def loaded(path: Path, least: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, torch.Tensor]:
    monkeypatch.setattr(weights, "OWN_MAPPING", least)
    held = load_weights(read_spec(path), path, torch.bfloat16, CPU, **options)
    return {name: held.pop(name).clone() for name in list(held)}


MODELS = {model.name: model for model in RUN}


@pytest.mark.parametrize(
    "name", ["qwen2", "gemma-2", "glm-4-9b"]
)  # all mapped; norms have an offset; heads are reordered: none
def test_mapped_weights_equal_copied_ones(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in MODELS:
        MODELS[name].write(tmp_path)
    else:
        write_checkpoint(tmp_path, name)
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
    other = next(name for name in tensors if "layers.0" in name and "k_proj.weight" in name)
    tensors[other] = tensors[other].float()
    save_file(tensors, file, {"format": "pt"})
    check_alike(tmp_path, monkeypatch)


def check_alike(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare weights read at once with mapped weights and with weights read when popped."""
    shares = list[float]()
    at_once = loaded(path, 1 << 30, monkeypatch)
    mapped = loaded(path, 256, monkeypatch)
    late = loaded(path, 256, monkeypatch, matrices="late", progress=shares.append)
    assert at_once.keys() == mapped.keys() == late.keys()
    for weight, tensor in at_once.items():
        assert torch.equal(tensor, mapped[weight]), weight
        assert torch.equal(tensor, late[weight]), weight
    assert shares == sorted(shares)
    assert shares[-1] == 1


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_a_gguf_file_gives_the_same_late(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", kind)
    check_alike(loading.resolve_model(str(tmp_path / "m.gguf")), monkeypatch)


@pytest.mark.parametrize(
    ("family", "form"), [("llama-gqa", "safetensors"), ("llama-gqa", "gguf"), ("qwen2", "safetensors")]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_are_not_packed_have_their_own_weights(
    tmp_path: Path, family: str, form: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of a layer may take the memory of the layer before only where products copy them."""
    write_checkpoint(tmp_path / "m", family)
    path = tmp_path / "m"
    if form == "gguf":
        write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", "Q8_0")
        path = loading.resolve_model(str(tmp_path / "m.gguf"))
    monkeypatch.setattr(weights, "OWN_MAPPING", 256)
    results = list[list[torch.Tensor]]()
    for layout in ("packed", "plain"):
        monkeypatch.setattr(loading, "weight_layout", lambda spec, dtype, layout=layout: layout)
        decoder = load_model(path, "m", CPU, Precision(dtype), "torch").decoder
        x = torch.linspace(-1, 1, decoder.spec.hidden_size).to(decoder.dtype).expand(8, -1)
        found = [(layer._qkv.both(x)[0], layer._o(x), layer.mlp(x)) for layer in decoder.layers]
        results.append([tensor.float() for of_layer in found for tensor in of_layer])
    for packed, plain in zip(*results, strict=True):
        assert torch.allclose(packed, plain, atol=1e-5 if dtype == "float32" else 0.02, rtol=0.02)
    assert not torch.allclose(results[1][0], results[1][-3], atol=0.1), "or this would prove little"


def test_a_rank_reads_runs_of_rows_from_a_source_that_uses_its_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, memory = torch.arange(16.0).view(8, 2), torch.empty(16)

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        return memory[: 2 * (stop - start)].view(-1, 2).copy_(stored[start:stop])

    source = Mock(read=read, headers=lambda: [("w", "F32", (8, 2))])
    monkeypatch.setattr(sharded, "expected_shapes", lambda spec: {})
    part = sharded.ShardedTensors(source, {"w": Cut(rows=((0, 2), (4, 6)))}, Mock())
    assert list(part.headers()) == [("w", "F32", (4, 2))]
    assert torch.equal(part.read("w", 0, 4), stored[[0, 1, 4, 5]])


def test_taking_one_out_gives_its_file_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, "qwen2")
    monkeypatch.setattr(weights, "OWN_MAPPING", 256)
    held = load_weights(read_spec(tmp_path), tmp_path, torch.float32, CPU)

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    before = mappings()
    assert before > 4
    for name in list(held):
        if name.startswith("0."):
            held.pop(name)
    assert mappings() <= before - 4
