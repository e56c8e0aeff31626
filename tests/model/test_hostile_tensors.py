"""Tensors whose bytes are not what the header or the index says are refused before a kernel reads them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import write_checkpoint
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.gguf_files.reader import CheckedReader
from cacheblend_cli.model.gguf_files.tensors import GGUFTensors
from cacheblend_cli.model.locate import resolve_model
from cacheblend_cli.model.safetensors_header import MOST_HEADER_BYTES, safetensors_offsets


@pytest.fixture
def small(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_tensor("first", gguf.quantize(np.ones((3, 64), np.float32), gguf.GGMLQuantizationType.Q8_0),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    writer.add_tensor("second", np.ones((2, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "m.gguf"


def entry(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A tensor's entry of the header."""
    head = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


FIRST, SECOND = entry(b"first", (64, 3), 8, 0), entry(b"second", (8, 2), 0, 256)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (FIRST, entry(b"first", (64, 3), 8, 64), "first and second overlap"),
        (SECOND, entry(b"second", (8, 2), 0, 0), "second and first overlap"),
        (SECOND, entry(b"second", (8, 2), 0, 300), "second begins at byte 300, not at a multiple of 64"),
        (SECOND, entry(b"second", (8, 2), 0, 2**63), "its header promises"),
        (SECOND, entry(b"second", (8, 2), 0, 2**64 - 64), "its header promises"),
        (SECOND, entry(b"second", (8, 2**61), 0, 256), "its header promises"),
        (SECOND, entry(b"second", (2**63, 2), 0, 256), r"second: it has the shape \[2, 9223372036854775808\]"),
        (SECOND, entry(b"second", (8, 0), 0, 256), r"second: it has the shape \[0, 8\]"),
        (SECOND, entry(b"second", (8, 2), 99, 256), "second: 99 is not a valid GGMLQuantizationType"),
        (FIRST, entry(b"first", (48, 3), 8, 0), "first: its rows have 48 values, and Q8_0 has blocks of 32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_header_with_other_tensors(small: Path, old: bytes, new: bytes, told: str) -> None:
    CheckedReader(small)
    content = small.read_bytes()
    assert content.count(old) == 1
    small.write_bytes(content.replace(old, new))
    with pytest.raises((ValueError, EOFError), match=told):
        CheckedReader(small)


def test_a_file_cut_anywhere(small: Path, tmp_path: Path) -> None:
    content = small.read_bytes()
    for size in [*range(0, len(content) - 64, 64), len(content) - 64]:
        (tmp_path / "cut.gguf").write_bytes(content[:size])
        with pytest.raises((ValueError, EOFError)) as refused:
            CheckedReader(tmp_path / "cut.gguf")
        assert size == 0 or isinstance(refused.value, EOFError), size


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_checkpoint(folder / "m", "llama-gqa")
    write_gguf(folder / "m", folder / "m.gguf", "llama", "Q8_0")
    return folder / "m.gguf"


def test_a_model_cut_anywhere(model: Path, tmp_path: Path) -> None:
    """Twenty cuts of a whole model, through the command's own way."""
    content = model.read_bytes()
    for size in range(64, len(content), len(content) // 20 // 64 * 64):
        (tmp_path / "cut.gguf").write_bytes(content[:size])
        with pytest.raises(UsageError, match=r"cut\.gguf is truncated"):
            resolve_model(str(tmp_path / "cut.gguf"))


NAME = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"kind": "Q9_9"}, "unknown type 'Q9_9'"),
        ({"kind": 8}, "unknown type 8"),
        ({"kind": "F32"}, "F32 .* bytes, not"),
        ({"offset": -32}, "do not begin at byte -32"),
        ({"offset": 10**12}, "ends beyond it"),
        ({"offset": 2**63}, "ends beyond it"),
        ({"offset": 1.5}, "not whole numbers"),
        ({"num_bytes": 1}, "bytes, not 1$"),
        ({"shape": []}, "it has the shape"),
        ({"shape": [0, 64]}, "it has the shape"),
        ({"shape": [2**64, 64]}, "it has the shape"),
        ({"shape": [1, 1, 1, 1, 64]}, "it has the shape"),
        ({"shape": [64, 63]}, "blocks of 32"),
        ({"shape": [2**40, 2**20]}, "bytes, not"),
        ({"shape": ["64", 64]}, "index"),
        ({"shape": None}, "is not a valid index"),
        ({"permuted_heads": 5}, "are not 5 heads"),
        ({"permuted_heads": -1}, "are not -1 heads"),
        ({"more": 1}, "is not a valid index"),
    ],
)
def test_an_index_with_other_tensors(model: Path, values: dict[str, Any], told: str) -> None:
    check_index(model, lambda content: content["tensors"][NAME].update(values), told)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda c: c.pop("file"), "is not a valid index"),
        (lambda c: c.pop("identity"), "is not a valid index"),
        (lambda c: c.update(tensors=[]), "is not a valid index"),
        (lambda c: c.update(file="/dev/zero"), "/dev/zero is not a regular file"),
        (lambda c: c.update(identity=[0, 0, 0]), "was replaced or changed"),
        (lambda c: c["tensors"].update(more=c["tensors"][NAME]), "overlap"),
    ],
)
def test_an_index_of_something_else(model: Path, change: Callable[[dict[str, Any]], object], told: str) -> None:
    check_index(model, change, told)


def check_index(model: Path, change: Callable[[dict[str, Any]], object], told: str) -> None:
    path = resolve_model(str(model)) / "gguf.json"
    before = path.read_text()
    content = json.loads(before)
    GGUFTensors(path.parent)
    change(content)
    path.write_text(json.dumps(content))
    try:
        with pytest.raises(UsageError, match=told) as refused:
            GGUFTensors(path.parent)
        assert refused.value.hint
    finally:
        path.write_text(before)


@pytest.mark.parametrize("way", ["shorter", "replaced", "written to"])
def test_another_file_of_the_same_name(model: Path, tmp_path: Path, way: str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(model.read_bytes())
    folder = resolve_model(str(file))
    GGUFTensors(folder)
    if way == "shorter":
        os.truncate(file, 1000)
    elif way == "replaced":
        (tmp_path / "new").write_bytes(model.read_bytes())
        os.utime(tmp_path / "new", ns=(0, file.stat().st_mtime_ns))
        (tmp_path / "new").replace(file)
    else:
        os.utime(file, ns=(0, 0))
    with pytest.raises(UsageError, match=r"m\.gguf was replaced or changed after it was read"):
        GGUFTensors(folder)


def test_offsets_of_safetensors_are_those_of_the_package(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(4, dtype=torch.bfloat16), "none": torch.zeros(0, 2),
               "scalar": torch.tensor(3, dtype=torch.uint8)}  # fmt: skip
    save_file(tensors, tmp_path / "m", {"format": "pt"})
    content, found = (tmp_path / "m").read_bytes(), safetensors_offsets(tmp_path / "m")
    for name, tensor in load_file(tmp_path / "m").items():
        _, shape, begin, end = found[name]
        assert shape == tensor.shape
        assert content[begin:end] == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert found["a"].dtype == "BF16"


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


def tensor(begin: Any, end: Any, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 2**64 - 1) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 2) + b"{x",
        struct.pack("<Q", 2) + b"\xff\xff",
        struct.pack("<Q", 2) + b"[]",
        header(a=tensor(0, 8)) + bytes(7),
        header(a=tensor(0, 8)) + bytes(9),
        header(a=tensor(0, 8), b=tensor(4, 12)) + bytes(12),
        header(a=tensor(0, 8), b=tensor(9, 17)) + bytes(17),
        header(a=tensor(1, 9)) + bytes(9),
        header(a=tensor(0, 8, [3])) + bytes(8),
        header(a=tensor(8, 0)) + bytes(8),
        header(a=tensor(0, 8, [2**62, 2**62])) + bytes(8),
        header(a=tensor(0, 8, [10**18] * 1000)) + bytes(8),
        header(a=tensor(0, 1, [3], "F4")) + bytes(1),
        header(**{"a" * MOST_HEADER_BYTES: tensor(0, 8)}) + bytes(8),
        *(header(a=made) + bytes(8) for made in (
            tensor(0, 8, dtype="F33"), tensor(0, 8, dtype=["F32"]), tensor(0, 8, [-2]), tensor(0, 8, [True, 2]),
            tensor(0, 8, [2.0]), tensor(0, 8, 2), tensor(-8, 0), tensor("0", "8"), tensor(0, None), [], 3, {},
            ["F32", [2], [0, 8]],
        )),
    ],
)  # fmt: skip
def test_a_safetensors_header_with_other_offsets(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(UsageError) as refused:
        safetensors_offsets(tmp_path / "m")
    assert refused.value.message.startswith(f"{tmp_path}/m is not a readable safetensors file: ")
