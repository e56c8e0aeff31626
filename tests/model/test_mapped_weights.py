"""Weights that stay in their file are those that are copied."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from cacheblend_kernels import RowTable, compiled
from cacheblend_store import ChunkStore
from checkpoints import write_checkpoint
from gguf_files import write_gguf
from hub_families import RUN
from safetensors.torch import load_file, save_file

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.demo import model_dir
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model import sharded
from cacheblend_cli.model.description import Precision
from cacheblend_cli.model.families import read_spec
from cacheblend_cli.model.loading import load_model
from cacheblend_cli.model.locate import resolve_model
from cacheblend_cli.model.sharded import Cut
from cacheblend_cli.model.weights import load_weights

CPU = torch.device("cpu")
MODELS = {model.name: model for model in RUN}
needs_compiled = pytest.mark.skipif(not compiled.multiplies(torch.float32), reason="no code was compiled")


def weights_of(path: Path, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    shares = list[float]()
    with monkeypatch.context() as patch:
        if not in_place:
            patch.setattr(compiled, "multiplies", lambda dtype: False)
        held = load_weights(read_spec(path), path, torch.float32, CPU, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert any(isinstance(weight, RowTable) for weight in held.values()) == in_place
    return {name: weight if isinstance(weight, torch.Tensor) else values(weight) for name, weight in held.items()}


def values(table: RowTable) -> torch.Tensor:
    rows = compiled.restore_rows(table, torch.arange(len(table)), torch.float32)
    assert rows is not None
    return rows * table.factor


def check_alike(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, in_place = (weights_of(path, way, monkeypatch) for way in (False, True))
    assert copied.keys() == in_place.keys()
    for name, weight in copied.items():
        assert torch.allclose(weight, in_place[name], rtol=1e-6, atol=0), name


@needs_compiled
@pytest.mark.parametrize(
    "name", ["qwen2", "gemma-2", "glm-4-9b", "granite-3"]
)  # norms with an offset; heads reordered; factors
def test_rows_in_a_checkpoint_equal_copied_ones(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


@needs_compiled
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_rows_in_a_gguf_file_equal_copied_ones(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", kind)
    check_alike(resolve_model(str(tmp_path / "m.gguf")), monkeypatch)


@needs_compiled
@pytest.mark.parametrize("tied", [False, True])
def test_matrices_stay_in_their_file(tmp_path: Path, tied: bool) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa", tie_word_embeddings=tied)
    file = tmp_path / "m" / "model.safetensors"
    decoder = load_model(tmp_path / "m", "m", CPU, Precision("float32"), "torch").decoder
    assert str(file) in Path("/proc/self/maps").read_text()
    embedding, ids = load_file(file)["model.embed_tokens.weight"], torch.tensor([3, 0, 7])
    assert torch.equal(decoder.embed(ids), embedding[ids])
    row = torch.randn(1, embedding.shape[1])
    head = load_file(file).get("lm_head.weight", embedding)
    assert torch.allclose(decoder._head(row), row @ head.T, atol=1e-4)
    assert (decoder._head.table is decoder._embedding.weight) == tied  # type: ignore[union-attr]


def test_a_rank_reads_runs_of_rows_from_a_source_that_uses_its_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, memory = torch.arange(16.0).view(8, 2), torch.empty(16)

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        return memory[: 2 * (stop - start)].view(-1, 2).copy_(stored[start:stop])

    source = Mock(read=read, headers=lambda: [("w", "F32", (8, 2))])
    monkeypatch.setattr(sharded, "expected_shapes", lambda spec: {})
    part = sharded.ShardedTensors(source, {"w": Cut(rows=((0, 2), (4, 6)))}, Mock())
    assert list(part.headers()) == [("w", "F32", (4, 2))]
    assert torch.equal(part.read("w", 0, 4), stored[[0, 1, 4, 5]])


@needs_compiled
def test_kv_of_a_file_that_was_written_to_is_not_stored(tmp_path: Path) -> None:
    shutil.copytree(model_dir(), tmp_path / "m")
    (tmp_path / "a.txt").write_text("Mara leads billing. " * 20)
    engine, file = Engine.load(EngineConfig(model=str(tmp_path / "m"))), tmp_path / "m" / "model.safetensors"
    assert engine.model.has_same_files
    shutil.copy(file, tmp_path / "new")
    (tmp_path / "new").replace(file)
    assert not engine.model.has_same_files
    engine.model.check_files()  # replaced: the mapped file is as it was
    engine = Engine.load(EngineConfig(model=str(tmp_path / "m")))
    with file.open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\1")
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        with pytest.raises(UsageError, match="changed while"):
            engine.precompute(store, [str(tmp_path / "a.txt")], PrecomputeOptions(), lambda event: None)
        assert not [chunk for chunk in store.chunks() if chunk.has_kv]
