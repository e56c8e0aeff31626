"""Interface of sources of weights, and the source over safetensors files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from cacheblend_kernels import RowTable
from safetensors import safe_open
from torch import Tensor

from cacheblend_cli.model.mapped_file import MappedFile
from cacheblend_cli.model.safetensors_header import StoredRange, safetensors_offsets

SMALL = 1 << 18  # elements
KINDS = {"F32": 0, "F16": 1, "BF16": 30}
"""dtype of the files whose rows are used in place -> number of the GGMLQuantizationType."""


class SafetensorsFiles:
    """Memory-mapped files of a checkpoint. Of two tensors with the same name, `read` returns the first."""

    block_bytes = 16 << 20  # of float32: a block is held twice for a moment, mapped and copied

    def __init__(self, files: list[Path]) -> None:
        self._files, self._file_of = files, dict[str, Path]()
        self._small, self._open = set[str](), dict[Path, Any]()  # small tensors are read from a file that stays open
        self._ranges, self._mapped = dict[Path, dict[str, StoredRange]](), dict[Path, MappedFile]()

    def headers(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        for file in self._files:
            self._ranges[file] = safetensors_offsets(file)
            for name, (dtype, shape, *_) in self._ranges[file].items():
                self._file_of.setdefault(name, file)
                if math.prod(shape) <= SMALL:
                    self._small.add(name)
                yield name, dtype, shape

    def read(self, name: str, start: int, stop: int, columns: slice | None = None) -> Tensor:
        """Read rows `start` to `stop`, optionally only some columns of a matrix. Large tensors get a temporary mapping,
        so that copied pages do not stay resident."""
        file = self._file_of[name]
        if name in self._small:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            rows: Tensor = self._open[file].get_slice(name)[start:stop]
            return rows if columns is None else rows[:, columns]
        with safe_open(file, framework="pt") as handle:
            part = handle.get_slice(name)
            return part[start:stop] if columns is None else part[start:stop, columns]

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        """Return columns `start` to `stop` of a matrix."""
        with safe_open(self._file_of[name], framework="pt") as handle:
            return handle.get_slice(name)[:, start:stop]

    def rows(self, name: str) -> RowTable | None:
        """Return the rows of a matrix, or of the matrices of a tensor, in the mapped file, or None."""
        file = self._file_of[name]
        stored = self._ranges[file][name]
        if stored.dtype not in KINDS or len(stored.shape) < 2:
            return None
        if file not in self._mapped:
            self._mapped[file] = MappedFile(file)
        mapped = self._mapped[file]
        shape = math.prod(stored.shape[:-1]), stored.shape[-1]
        return RowTable.stored(
            KINDS[stored.dtype], shape, mapped.address(stored.begin, stored.end - stored.begin), mapped
        )

    def whole(self, name: str) -> Tensor:
        """Return the tensor, of any shape, as a mapping: its pages are read on access."""
        with safe_open(self._file_of[name], framework="pt") as handle:
            return handle.get_tensor(name)


class TensorSource(Protocol):
    """Tensors by name, read in blocks of rows. block_bytes: preferred block size, as float32."""

    @property
    def block_bytes(self) -> int: ...

    def headers(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield (name, dtype as safetensors names it, shape) of every tensor. Raises UsageError on a damaged file."""
        ...

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of a tensor, valid until the next call."""
        ...

    def rows(self, name: str) -> RowTable | None:
        """Return the rows of a matrix where they are stored; None if its values are not stored row by row."""
        ...
