"""The tensors of safetensors files, mapped and read in parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.model_files import AGAIN


class SafetensorsFiles:
    """The files of a checkpoint, mapped. Of a name that two files have, `read` gives the first one's."""

    block_bytes = 16 << 20  # of float32: a block is held twice for a moment, mapped and copied

    def __init__(self, files: list[Path]) -> None:
        self._files, self._file_of = files, dict[str, Path]()

    def headers(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        for file in self._files:
            try:
                with safe_open(file, framework="pt") as handle:
                    slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
                    found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
            except SafetensorError as error:
                raise UsageError(f"{file} is not a readable safetensors file: {error}", AGAIN) from error
            for name, (dtype, shape) in found.items():
                self._file_of.setdefault(name, file)
                yield name, dtype, shape

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Under a mapping of its own: pages that are copied do not stay resident."""
        with safe_open(self._file_of[name], framework="pt") as handle:
            rows: Tensor = handle.get_slice(name)[start:stop]
            return rows

    def mapped(self, name: str) -> Tensor | None:
        """The whole tensor in the file's dtype, its pages read when they are looked at."""
        return self.whole(name)

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        """Columns `start` to `stop` of a matrix."""
        with safe_open(self._file_of[name], framework="pt") as handle:
            part: Tensor = handle.get_slice(name)[:, start:stop]
            return part

    def whole(self, name: str) -> Tensor:
        """A small tensor, of any shape."""
        with safe_open(self._file_of[name], framework="pt") as handle:
            tensor: Tensor = handle.get_tensor(name)
            return tensor
