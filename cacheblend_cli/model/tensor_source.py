"""Where weights are read from: safetensors files, quantised or not, or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from cacheblend_cli.model.checkpoint_files import checkpoint_files, is_converted
from cacheblend_cli.model.families.quantisation import FIELD, Quantisation, read_quantisation
from cacheblend_cli.model.model_files import read_object
from cacheblend_cli.model.split_experts import SplitExperts
from cacheblend_cli.model.tensor_files import SafetensorsFiles


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

    def mapped(self, name: str) -> Tensor | None:
        """The whole tensor as a mapping of its file, in the file's dtype; None where it is not there as plain numbers."""
        ...


def tensor_source(model_dir: Path) -> TensorSource:
    """The weights of a model directory. Raises as `checkpoint_files`."""
    if is_converted(model_dir):
        from cacheblend_cli.model.gguf_files.tensors import GGUFTensors

        return GGUFTensors(model_dir)
    files = SafetensorsFiles(checkpoint_files(model_dir))
    quantisation = quantisation_of(model_dir)
    if quantisation is None or quantisation.method == "mxfp4":
        return SplitExperts(files)
    from cacheblend_cli.model.quantised.source import DequantisedTensors

    return DequantisedTensors(files, quantisation)


def quantisation_of(model_dir: Path) -> Quantisation | None:
    """How a checkpoint's weights are quantised, as its config.json says; None: they are not."""
    config = read_object(model_dir / "config.json")
    inner = config.get("text_config")
    return read_quantisation(config.get(FIELD) or (inner.get(FIELD) if isinstance(inner, dict) else None))
