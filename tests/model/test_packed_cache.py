"""Packed weights on disk: a start that maps them computes what a start that packs does."""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cacheblend_kernels.torch_attention import onednn_multiplies
from checkpoints import write_checkpoint

from cacheblend_cli import user_cache
from cacheblend_cli.cli.main import run
from cacheblend_cli.engine import runtime
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.model import linear, packed_cache, weights
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.linear import Int8Linear
from cacheblend_cli.model.loading import LoadedModel, Precision, load_model
from cacheblend_cli.model.packed_file import members_of

CPU = torch.device("cpu")
PLENTY = 1 << 30
needs_vnni = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="a CPU without VNNI")
needs_bf16 = pytest.mark.skipif(not onednn_multiplies(torch.bfloat16), reason="a CPU for which oneDNN packs no bf16")


@pytest.fixture(autouse=True)
def _small_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of tiny models count as large ones."""
    monkeypatch.setattr(weights, "OWN_MAPPING", 1 << 10)
    cache = packed_cache.PackedCache
    monkeypatch.setattr("cacheblend_cli.model.loading.PackedCache", lambda *args: cache(*args, least_bytes=1))


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the weights that were packed."""
    packed: list[tuple[int, ...]] = []

    def noted(init: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, weight: torch.Tensor, *args: Any, **more: Any) -> None:
            if not weight.is_meta:
                packed.append(tuple(weight.shape))
            init(self, weight, *args, **more)

        return __init__

    for kind in (linear.Linear, linear.Int8Linear):
        monkeypatch.setattr(kind, "__init__", noted(kind.__init__))
    return packed


def load(path: Path, precision: Precision) -> LoadedModel:
    """The model, and what is written beside is written."""
    model = load_model(path, "m", CPU, precision, "torch")
    for thread in threading.enumerate():
        if thread.name == "cacheblend-packed":
            thread.join()
    return model


def products(decoder: Decoder) -> list[torch.Tensor]:
    """What every product of the decoder gives for the same rows."""
    found = []
    for _, product in sorted((n, p) for n, p in members_of(decoder) if not isinstance(p, torch.Tensor)):
        columns = product.weight.shape[0 if isinstance(product, Int8Linear) else 1]
        rows = torch.randn(5, columns, generator=torch.Generator().manual_seed(1))
        found.append(product(rows.to(decoder.dtype)))
    return found


def files() -> list[Path]:
    folder = user_cache.folder(user_cache.PACKED_WEIGHTS)
    return sorted(folder.iterdir()) if folder.is_dir() else []


@pytest.mark.parametrize(
    ("family", "dtype", "weight_dtype"),
    [
        ("qwen2", "float32", "auto"),
        pytest.param("llama-mha-tied-bias", "bfloat16", "int8", marks=needs_vnni),
        pytest.param("starcoder2", "bfloat16", "auto", marks=needs_bf16),
        ("gemma4", "float32", "auto"),
        pytest.param("youtu", "bfloat16", "auto", marks=needs_bf16),
        pytest.param("gemma3n", "bfloat16", "auto", marks=needs_bf16),
    ],
)
def test_a_second_start_packs_nothing_and_computes_the_same(
    family: str, dtype: str, weight_dtype: str, tmp_path: Path, packings: list[tuple[int, ...]]
) -> None:
    write_checkpoint(tmp_path / "m", family)
    plain = products(load(tmp_path / "m", Precision(dtype, weight_dtype)).decoder)
    first = load(tmp_path / "m", Precision(dtype, weight_dtype, PLENTY))
    packings.clear()
    second = load(tmp_path / "m", Precision(dtype, weight_dtype, PLENTY))
    assert [shape for shape in packings if math.prod(shape) * 2 >= weights.OWN_MAPPING] == []
    assert len(files()) == 1
    for found in (products(first.decoder), products(second.decoder)):
        assert all(map(torch.equal, plain, found))
        assert len(found) == len(plain)
    assert second.fingerprint == first.fingerprint
    heads = [layer.latent_heads for layer in second.decoder.layers]
    assert not any(of_layer.keys.is_meta for of_layer in heads if of_layer is not None)


@pytest.mark.parametrize(
    "damage", ["a bit", "layout", "shape", "header's end", "cut", "cut by a byte", "empty", "another file"]
)
def test_a_damaged_file_is_packed_and_written_anew(
    damage: str, tmp_path: Path, packings: list[tuple[int, ...]]
) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    plain = products(load(tmp_path / "m", Precision("float32", "auto", PLENTY)).decoder)
    [file] = files()
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(
        {
            "a bit": content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :],
            "layout": content.replace(b'"layout": "', b'"layout": "x', 1),
            "shape": content.replace(b'"shape": [', b'"shape": {', 1),
            "header's end": content[:8] + b"\xff" * 8 + content[16:],
            "cut": content[:middle],
            "cut by a byte": content[:-1],
            "empty": b"",
            "another file": b"x" * len(content),
        }[damage]
    )
    packings.clear()
    assert all(map(torch.equal, plain, products(load(tmp_path / "m", Precision("float32", "auto", PLENTY)).decoder)))
    assert packings
    assert file.read_bytes() == content


def test_what_is_not_packed_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "onednn_multiplies", lambda dtype: False)
    read_again = []
    monkeypatch.setattr(packed_cache.PackedCache, "_keep", lambda *args: read_again.append(args))
    write_checkpoint(tmp_path / "m", "llama-gqa")
    load(tmp_path / "m", Precision("bfloat16", "auto", PLENTY))
    assert read_again == files() == []


def test_other_weights_in_the_same_place_are_another_file(tmp_path: Path) -> None:
    found = []
    for seed in (0, 1):
        write_checkpoint(tmp_path / "m", "llama-gqa", seed)
        found.append(products(load(tmp_path / "m", Precision("float32", "auto", PLENTY)).decoder))
    assert len(files()) == 2
    assert not torch.equal(found[0][0], found[1][0])


def test_files_stay_within_the_limit_and_the_oldest_goes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    load(tmp_path / "m", Precision("float32", "auto", PLENTY))
    [oldest] = files()
    size = oldest.stat().st_size
    write_checkpoint(tmp_path / "n", "llama-gqa", 1)
    load(tmp_path / "n", Precision("float32", "auto", size + size // 2))
    assert files() == [oldest]  # it was used today: models used in turn are not written in turn
    os.utime(oldest, (1, 1))
    left = oldest.with_name(f"{oldest.name}.123")  # by a process that was killed
    left.write_bytes(b"half")
    os.utime(left, (1, 1))
    now = oldest.with_name(f"{oldest.name}.456")  # by one that writes
    now.write_bytes(b"half")
    load(tmp_path / "n", Precision("float32", "auto", size + size // 2))
    assert now in files()
    now.unlink()
    [other] = files()
    assert other != oldest
    load(tmp_path / "m", Precision("float32", "auto", size // 2))
    assert files() == [other]  # one that is larger than the limit removes nothing


def test_what_one_start_uses_stays_when_it_is_removed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    plain = products(load(tmp_path / "m", Precision("float32", "auto", PLENTY)).decoder)
    decoder = load(tmp_path / "m", Precision("float32", "auto", PLENTY)).decoder
    [file] = files()
    file.unlink()
    assert all(map(torch.equal, plain, products(decoder)))


def test_the_cache_is_cleared_by_a_command(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "llama-gqa")
    load(tmp_path / "m", Precision("float32", "auto", PLENTY))
    assert files()
    assert run(["models", "clear"]) == 0
    assert files() == []
    assert run(["models", "clear"]) == 0


def test_a_file_that_is_given_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def endless(path: Path, products: object, stopped: Callable[[], bool]) -> None:
        path.write_bytes(b"half")
        begun.set()
        while not stopped():
            os.sched_yield()
        raise packed_cache.PackedMismatch("stopped")

    monkeypatch.setattr(packed_cache, "write", endless)
    write_checkpoint(tmp_path / "m", "llama-gqa")
    load_model(tmp_path / "m", "m", CPU, Precision("float32", "auto", PLENTY), "torch")
    assert begun.wait(20)
    [writer] = packed_cache.writers()
    assert writer.size > 10_000
    assert writer.path.parent.name == "packed"
    writer.stop()
    assert files() == []


def test_weights_larger_than_the_cache_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "TOLD_FROM", 10_000)
    write_checkpoint(tmp_path / "m", "qwen2")
    assert load(tmp_path / "m", Precision("float32", "auto", 10_000)).uncached_bytes > 10_000
    assert "weights_cache_gb" in told(tmp_path / "m", 1e-5)
    assert load(tmp_path / "m", Precision("float32", "auto", PLENTY)).uncached_bytes == 0
    assert told(tmp_path / "m", 1.0) == ""
    monkeypatch.setattr(shutil, "disk_usage", Mock(return_value=Mock(free=20_000)))
    write_checkpoint(tmp_path / "n", "qwen2", seed=1)
    assert "weights_cache_gb" in told(tmp_path / "n", 1.0)


def told(path: Path, limit_gb: float) -> str:
    notes = list[str]()
    Runtime.load(EngineConfig(model=str(path), dtype="float32", weights_cache_gb=limit_gb), say=notes.append)
    return " ".join(notes)
