"""Tensors of a GGUF file, dequantised as they are read. Only the requested rows are held in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cacheblend_kernels import RowTable, compiled
from cacheblend_kernels.row_table import BLOCKS, NUMBERS
from cacheblend_store.private_files import create
from torch import Tensor

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.mapped_file import MappedFile, overlap
from cacheblend_cli.model.model_files import GGUF_INDEX, LARGE_BYTES, read_object

BLOCK_BYTES = 4 << 20  # of float32: more is not faster, and takes memory besides the weights
MOST_DIMS = 4  # GGML_MAX_DIMS
ALIGNMENTS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I16": 2, "I32": 4, "I64": 8}
"""Kind -> alignment of its values in the file; blocks are bytes."""
REMOVE, RERUN = "remove the directory, and give the file", "run the command again, with the file as --model"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the file."""

    kind: str  # name of its GGMLQuantizationType
    shape: tuple[int, ...]  # torch's order, rows first
    offset: int  # bytes from the beginning of the file
    num_bytes: int
    # number of heads whose rows llama.cpp's converter reordered (RoPE's first and second half interleaved); 0: not
    # reordered
    permuted_heads: int = 0
    offset_of_norm: float = 0.0  # added by the converter, subtracted when read

    @property
    def row_bytes(self) -> int:
        """Size of a row, of which a vector has one."""
        return self.num_bytes if len(self.shape) == 1 else self.num_bytes // self.shape[0]

    def check(self) -> None:
        """Raise ValueError unless the bytes are those of the kind and the shape, which kernels rely on."""
        integers = (*self.shape, self.offset, self.num_bytes, self.permuted_heads)
        if any(type(n) is not int for n in integers) or type(self.offset_of_norm) not in (int, float):
            raise ValueError("its shape, offset and size are not whole numbers")
        if (num_bytes := bytes_of(self.kind, self.shape)) != self.num_bytes:
            raise ValueError(f"{self.kind} {list(self.shape)} has {num_bytes:,} bytes, not {self.num_bytes:,}")
        if self.offset < 0 or self.offset % ALIGNMENTS.get(self.kind, 1):
            raise ValueError(f"{self.kind} values do not begin at byte {self.offset:,}")
        if self.permuted_heads < 0 or (self.permuted_heads and self.shape[0] % (2 * self.permuted_heads)):
            raise ValueError(f"{self.shape[0]:,} rows are not {self.permuted_heads:,} heads of an even size")


def bytes_of(kind: str, shape: Sequence[int]) -> int:
    """Return the size of a tensor. shape: rows first. Raises ValueError for an unknown GGMLQuantizationType, and for a
    shape that it cannot have."""
    if kind in NUMBERS:  # without importing gguf
        _, size, values = BLOCKS[NUMBERS[kind]]
    else:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        if kind not in GGMLQuantizationType.__members__:
            raise ValueError(f"it has the unknown type {kind!r}")
        values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if not 0 < len(shape) <= MOST_DIMS or min(shape) < 1 or max(shape) >= 1 << 63:
        raise ValueError(f"it has the shape {list(shape[:8])}, which is not 1 to {MOST_DIMS} positive numbers")
    if shape[-1] % values:
        raise ValueError(f"its rows have {shape[-1]:,} values, and {kind} has blocks of {values}")
    return math.prod(shape) // values * size


def write_index(folder: Path, file: Path, status: os.stat_result, tensors: dict[str, StoredTensor]) -> None:
    """Write the index, the last file of a converted directory: if it exists, the others do too. status: of the file
    before it was read."""
    stored = {name: asdict(tensor) for name, tensor in tensors.items()}
    content = {"file": str(file), "identity": identity_of(status), "tensors": stored}
    create(folder / GGUF_INDEX, json.dumps(content).encode())


def identity_of(status: os.stat_result) -> list[int]:
    """Return what changes if a file is replaced by another one of the same name."""
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def is_readable(kind: Any) -> bool:
    """Return whether the gguf package dequantises a GGMLQuantizationType."""
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except (NotImplementedError, KeyError, ValueError):
        return False
    return True


class GGUFTensors:
    """Tensors of a converted directory, a `TensorSource`."""

    block_bytes = BLOCK_BYTES

    def __init__(self, folder: Path) -> None:
        """Map the file that a directory stands for. Raises UsageError if another file has its name now, or if a tensor
        of the index is not inside it."""
        path, name = folder / GGUF_INDEX, "file"
        content = read_object(path, LARGE_BYTES)
        try:
            self.file, identity = Path(content["file"]), content["identity"]
            self.index = dict[str, StoredTensor]()
            for name, tensor in content["tensors"].items():
                self.index[name] = StoredTensor(**tensor | {"shape": tuple(tensor["shape"])})
                self.index[name].check()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{path} is not a valid index: {name}: {error}", REMOVE) from error
        self.mapped = MappedFile(self.file)
        if identity != identity_of(self.mapped.status):
            raise UsageError(f"{self.file} was replaced or changed after it was read for {folder}", RERUN)
        for name, stored in self.index.items():
            if stored.offset + stored.num_bytes > self.mapped.size:
                raise UsageError(f"{path} does not fit {self.file}: {name} ends beyond it", REMOVE)
        if shared := overlap((t.offset, t.offset + t.num_bytes, name) for name, t in self.index.items()):
            raise UsageError(f"{path} is not a valid index: {shared[0]} and {shared[1]} overlap", REMOVE)
        self._scratch = torch.frombuffer(mmap(-1, BLOCK_BYTES), dtype=torch.float32)

    def headers(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield (name, dtype returned by `read`, shape)."""
        for name, tensor in self.index.items():
            yield name, "F32", tuple(tensor.shape)

    def rows(self, name: str) -> RowTable | None:
        """Return the rows of a matrix in the mapped file; None if compiled code does not read its type."""
        tensor = self.index[name]
        number = NUMBERS.get(tensor.kind)
        if number is None or len(tensor.shape) != 2:
            return None
        address = self.mapped.address(tensor.offset, tensor.num_bytes)
        table = RowTable.stored(number, tensor.shape, address, self.mapped)
        return table[_stored_rows(tensor, 0, len(table))] if tensor.permuted_heads else table

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop`, float32."""
        tensor = self.index[name]
        if not tensor.permuted_heads:
            read = self._rows(tensor, start, stop)
            return read - tensor.offset_of_norm if tensor.offset_of_norm else read
        # read whole heads, then select the wanted rows in their own order
        width = tensor.shape[0] // tensor.permuted_heads
        first, last = start // width * width, -(-stop // width) * width
        return self._rows(tensor, first, last)[_stored_rows(tensor, start, stop) - first]

    def _rows(self, tensor: StoredTensor, start: int, stop: int) -> Tensor:
        """Dequantise rows in stored order, float32."""
        if len(tensor.shape) == 1:  # norms and biases: a row of blocks, whatever they are stored as
            return dequantised(self._bytes(tensor, 0, 1), tensor.kind, self._scratch)[0, start:stop].clone()
        return dequantised(self._bytes(tensor, start, stop), tensor.kind, self._scratch)

    def _bytes(self, tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
        """Return stored rows [stop - start, row_bytes] uint8. They are read instead of mapped: a truncated file is an
        error, and its pages do not stay resident."""
        raw = np.empty((stop - start, tensor.row_bytes), np.uint8)
        with open(self.file, "rb") as stream:
            stream.seek(tensor.offset + start * tensor.row_bytes)
            if stream.readinto(raw.reshape(-1).data) < raw.nbytes:
                raise UsageError(f"{self.file} ends before its tensors do", "fetch it again")
        return raw


def _stored_rows(tensor: StoredTensor, start: int, stop: int) -> Tensor:
    """Return where rows `start` to `stop` of a tensor with permuted heads are stored."""
    wanted, width = torch.arange(start, stop), tensor.shape[0] // tensor.permuted_heads
    half, at = wanted % width // (width // 2), wanted % (width // 2)
    return wanted // width * width + 2 * at + half


def dequantised(raw: np.ndarray, name: str, scratch: Tensor) -> Tensor:
    """Return rows of a tensor in float32: raw [num_rows, num_bytes] uint8. name: its GGMLQuantizationType. scratch:
    fp32 memory that compiled code may use for the result."""
    if name in NUMBERS:
        _, num_bytes, values = BLOCKS[NUMBERS[name]]
        shape = len(raw), raw.shape[1] // num_bytes * values
        table = RowTable.stored(NUMBERS[name], shape, raw.ctypes.data, raw)
        found = compiled.restore_rows(table, torch.arange(len(raw)), out=scratch)
        if found is not None:
            return found
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(raw, GGMLQuantizationType[name]))
