"""Where weights are read from: safetensors files, or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.checkpoint_files import checkpoint_files, is_converted
from cacheblend_cli.model.model_files import AGAIN


class TensorSource(Protocol):
    """Tensors by name, read in blocks of rows. block_bytes: of float32, that it is best read in."""

    @property
    def block_bytes(self) -> int: ...

    def headers(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype as safetensors names it, shape) of every tensor. Raises UsageError on a damaged file."""
        ...

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a tensor."""
        ...


def tensor_source(model_dir: Path) -> TensorSource:
    """The weights of a model directory. Raises as `checkpoint_files`."""
    if is_converted(model_dir):
        from cacheblend_cli.model.gguf_files.tensors import GGUFTensors

        return GGUFTensors(model_dir)
    return SafetensorsFiles(checkpoint_files(model_dir))


class SafetensorsFiles:
    """The files of a checkpoint, mapped. Of a name that two files have, `read` gives the first one's."""

    block_bytes = 32 << 20

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
