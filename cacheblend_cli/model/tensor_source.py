"""Interface of sources of weights, and the source over safetensors files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor

from cacheblend_cli.model.safetensors_header import safetensors_offsets

SMALL = 1 << 18  # elements


class SafetensorsFiles:
    """Memory-mapped files of a checkpoint. Of two tensors with the same name, `read` returns the first."""

    block_bytes = 16 << 20  # of float32: a block is held twice for a moment, mapped and copied

    def __init__(self, files: list[Path]) -> None:
        self._files, self._file_of = files, dict[str, Path]()
        self._small, self._open = set[str](), dict[Path, Any]()  # small tensors are read from a file that stays open

    def headers(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        for file in self._files:
            for name, (dtype, shape, *_) in safetensors_offsets(file).items():
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

    def whole(self, name: str) -> Tensor | None:
        """Return the tensor as a mapping of its file, in its dtype; None if it is not stored as plain numbers."""
        ...
