"""Weights quantised once into a GGUF file: complete or not used, and equal to the gguf package's blocks."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from checkpoints import write_checkpoint
from gguf.quants import dequantize, quantize
from gguf_files import write_gguf

from cacheblend_cli import user_cache
from cacheblend_cli.cli.main import run
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.checkpoint import tensor_source
from cacheblend_cli.model.families import read_spec
from cacheblend_cli.model.gguf_files import quantise
from cacheblend_cli.model.gguf_files.folders import model_dir_of
from cacheblend_cli.model.gguf_files.quantise import FILE, KINDS, is_intact, quantised_folder
from cacheblend_cli.model.gguf_files.tensors import GGUFTensors
from cacheblend_cli.model.tensor_source import SafetensorsFiles


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that were read from the checkpoint."""
    names, read = list[str](), SafetensorsFiles.read

    def noted(self: SafetensorsFiles, name: str, start: int, stop: int) -> torch.Tensor:
        names.append(name)
        return read(self, name, start, stop)

    monkeypatch.setattr(SafetensorsFiles, "read", noted)
    return names


def quantised(model: Path, weight_dtype: str = "int8", **options: object) -> Path:
    spec = read_spec(model)
    return quantised_folder(tensor_source(model, spec.experts), spec, weight_dtype, "digest", **options)  # type: ignore[arg-type]


def files() -> list[str]:
    return sorted(path.name for path in user_cache.folder(user_cache.QUANTISED).iterdir() if path.name != "lock")


@pytest.mark.parametrize("weight_dtype", KINDS)
@pytest.mark.parametrize("family", ["llama-gqa", "llama-mha-tied-bias", "qwen2-moe", "gemma3n"])
def test_values_are_those_of_the_written_blocks(family: str, weight_dtype: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", family)
    spec = read_spec(tmp_path / "m")
    source = tensor_source(tmp_path / "m", spec.experts)
    folder = quantised_folder(source, spec, weight_dtype, "digest")
    held = {t.name: t for t in gguf.GGUFReader(folder / FILE).tensors}
    read, shapes = GGUFTensors(folder), {name: shape for name, _, shape in source.headers()}
    assert held.keys() == read.index.keys() <= shapes.keys()
    assert "model.embed_tokens.weight" in held or "model.language_model.embed_tokens.weight" in held
    for name, tensor in held.items():
        rows, own = shapes[name][0], source.read(name, 0, shapes[name][0]).float().numpy()
        kept = (
            own.ndim == 1
            or own.shape[1] % 32
            or name.split(".")[-2] in ("gate", "router", "shared_expert_gate", "modality_router")
        )
        assert tensor.tensor_type.name == ("F32" if kept else KINDS[weight_dtype]), name
        assert tuple(read.index[name].shape) == shapes[name]
        assert read.index[name].offset == tensor.data_offset
        assert read.index[name].num_bytes == tensor.n_bytes
        expected = dequantize(quantize(own, tensor.tensor_type), tensor.tensor_type)
        assert np.array_equal(dequantize(tensor.data, tensor.tensor_type).reshape(own.shape), expected), name
        assert np.array_equal(read.read(name, 0, rows).numpy().reshape(own.shape), expected), name


def test_a_file_is_written_once_for_each_dtype(tmp_path: Path, reads: list[str]) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    shares = list[float]()
    first = quantised(tmp_path / "m", progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert first.stat().st_mode & 0o077 == 0
    reads.clear()
    assert quantised(tmp_path / "m") == first
    assert reads == []
    assert quantised(tmp_path / "m", "int4") != first
    assert reads
    assert len(files()) == 2


def test_of_two_starts_at_once_one_writes(tmp_path: Path, reads: list[str]) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    second = ThreadPoolExecutor(1)
    futures = list[Future[Path]]()

    def begin(share: float) -> None:
        if not futures:
            futures.append(second.submit(quantised, tmp_path / "m"))

    folder = quantised(tmp_path / "m", progress=begin)
    assert futures[0].result(60) == folder
    assert len(reads) == len(set(reads))


def test_tensors_are_read_in_blocks_of_rows(tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    whole = (quantised(tmp_path / "m") / FILE).read_bytes()
    shutil.rmtree(user_cache.folder(user_cache.QUANTISED))
    reads.clear()
    monkeypatch.setattr(SafetensorsFiles, "block_bytes", 64 * 4 * 50)
    assert (quantised(tmp_path / "m") / FILE).read_bytes() == whole
    assert reads.count("model.embed_tokens.weight") == 7  # 320 rows, 50 at once


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_killed_process_leaves_nothing_that_is_used(share: float, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    child = os.fork()
    if child == 0:
        quantised(tmp_path / "m", progress=lambda done: os._exit(9) if done >= share else None)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    [left] = files()
    assert left.endswith(".part")
    folder = quantised(tmp_path / "m")
    assert is_intact(folder)
    assert files() == [folder.name]


@pytest.mark.parametrize("damage", ["a bit", "cut", "empty", "no file", "no index"])
def test_a_damaged_file_is_written_again(damage: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    folder = quantised(tmp_path / "m")
    file, content = folder / FILE, (folder / FILE).read_bytes()
    if damage == "no file":
        file.unlink()
    elif damage == "no index":
        (folder / quantise.GGUF_INDEX).unlink()
    else:
        bit = content[:-9] + bytes([content[-9] ^ 4]) + content[-8:]
        file.write_bytes({"a bit": bit, "cut": content[:-40], "empty": b""}[damage])
    assert quantised(tmp_path / "m") == folder
    assert file.read_bytes() == content


def test_a_full_disk_is_an_error_that_names_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", Mock(return_value=Mock(free=1 << 20)))
        with pytest.raises(UsageError, match=r"the file takes 0\.\d\d GiB, and 0\.00 GiB are free"):
            quantised(tmp_path / "m")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(UsageError, match="No space left on device") as found:
            quantised(tmp_path / "m")
    assert "models clear" in str(found.value.hint)
    assert files() == []


def test_the_files_are_removed_by_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    folder = quantised(tmp_path / "m")
    assert run(["models", "clear"]) == 0
    assert "removed" in capsys.readouterr().out
    assert not is_intact(folder)
    assert is_intact(quantised(tmp_path / "m"))


@pytest.mark.parametrize("kind", ["Q8_0", "F32"])
def test_a_quantised_gguf_file_is_refused_and_a_plain_one_is_not(kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "llama", kind)
    model = model_dir_of(tmp_path / "m.gguf")
    if kind == "F32":
        assert is_intact(quantised(model))
        return
    with pytest.raises(UsageError, match="is quantised already") as found:
        quantised(model)
    assert found.value.hint == "leave --weight-dtype out"
