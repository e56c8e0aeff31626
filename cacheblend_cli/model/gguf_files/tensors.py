"""Tensors of a GGUF file, dequantised as they are read. Only the requested rows are held in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cacheblend_kernels import compiled
from cacheblend_kernels.row_table import RowTable
from cacheblend_store.private_files import create
from torch import Tensor

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.model_files import GGUF_INDEX, LARGE_BYTES, read_object

BLOCK_BYTES = 4 << 20  # of float32: more is not faster, and takes memory besides the weights


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


def write_index(folder: Path, file: Path, tensors: dict[str, StoredTensor]) -> None:
    """Write the index, the last file of a converted directory: if it exists, the others do too."""
    content = {"file": str(file), "tensors": {name: asdict(tensor) for name, tensor in tensors.items()}}
    create(folder / GGUF_INDEX, json.dumps(content).encode())


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
        content = read_object(folder / GGUF_INDEX, LARGE_BYTES)
        self.file = Path(content["file"])
        self.index = {name: StoredTensor(**tensor) for name, tensor in content["tensors"].items()}
        size = self.file.stat().st_size
        if any(min(t.offset, t.num_bytes) < 0 or t.offset + t.num_bytes > size for t in self.index.values()):
            raise UsageError(
                f"{folder / GGUF_INDEX} does not fit {self.file}", "remove the directory, and give the file"
            )
        self._scratch = torch.frombuffer(mmap(-1, BLOCK_BYTES), dtype=torch.float32)

    def headers(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield (name, dtype returned by `read`, shape)."""
        for name, tensor in self.index.items():
            yield name, "F32", tuple(tensor.shape)

    def whole(self, name: str) -> Tensor | None:
        """Return None: GGUF tensors have their own types and order, so they cannot be mapped."""
        return None

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop`, float32."""
        tensor = self.index[name]
        rows = tensor.shape[0]
        if not tensor.permuted_heads:
            read = self._rows(tensor, start, stop)
            return read - tensor.offset_of_norm if tensor.offset_of_norm else read
        # read whole heads, then select the wanted rows in their own order
        width = rows // tensor.permuted_heads
        first, last = start // width * width, -(-stop // width) * width
        wanted = torch.arange(start, stop)
        half, at = wanted % width // (width // 2), wanted % (width // 2)
        stored = wanted // width * width + 2 * at + half - first
        return self._rows(tensor, first, last)[stored]

    def _rows(self, tensor: StoredTensor, start: int, stop: int) -> Tensor:
        """Dequantise rows in stored order, float32."""
        if len(tensor.shape) == 1:  # norms and biases: a row of blocks, whatever they are stored as
            raw = np.empty((1, tensor.num_bytes), np.uint8)
            self._fill(raw, tensor.offset)
            return dequantised(raw, tensor.kind, self._scratch)[0, start:stop].clone()
        row_bytes = tensor.num_bytes // tensor.shape[0]
        raw = np.empty((stop - start, row_bytes), np.uint8)
        self._fill(raw, tensor.offset + start * row_bytes)
        return dequantised(raw, tensor.kind, self._scratch)

    def _fill(self, raw: np.ndarray, offset: int) -> None:
        """Read instead of mapping: a truncated file is an error, and its pages do not stay resident."""
        view, done = raw.reshape(-1).data, 0
        with open(self.file, "rb", buffering=0) as stream:
            while done < len(view):
                count = os.preadv(stream.fileno(), [view[done:]], offset + done)
                if count == 0:
                    raise UsageError(f"{self.file} ends before its tensors do", "fetch it again")
                done += count


def dequantised(raw: np.ndarray, name: str, scratch: Tensor) -> Tensor:
    """Return rows of a tensor in float32: raw [num_rows, num_bytes] uint8. name: its GGMLQuantizationType. scratch:
    fp32 memory that compiled code may use for the result."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind, found = GGMLQuantizationType[name], None
    if (block := compiled.GGUF_BLOCKS.get(kind)) is not None and raw.shape[1] % block[0] == 0:
        table = RowTable.of(torch.from_numpy(raw), kind, raw.shape[1] // block[0] * block[1])
        found = compiled.restore_rows(table, torch.arange(len(raw)), out=scratch)
    return torch.from_numpy(dequantize(raw, kind)) if found is None else found
