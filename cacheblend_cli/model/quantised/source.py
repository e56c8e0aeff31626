"""A quantised checkpoint as a source of plain tensors: rows are dequantised in float32 as they are read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from torch import Tensor

from cacheblend_cli.model.families.quantisation import Quantisation
from cacheblend_cli.model.quantised import bitsandbytes, packed, scaled
from cacheblend_cli.model.quantised.stored import Header, RowwiseWeight, Stored
from cacheblend_cli.model.tensor_source import SafetensorsFiles

Reader = Callable[[Stored, Quantisation], RowwiseWeight | None]
FORMATS: dict[str, tuple[tuple[str, ...], Reader]] = {
    "scaled": (scaled.PARTS, scaled.scaled),
    "gptq": (packed.PARTS, packed.packed),
    "awq": (packed.PARTS, packed.packed),
    "bitsandbytes": (bitsandbytes.PARTS, bitsandbytes.bitsandbytes),
}
"""By method: the tensors a module may have, and the function that makes rows from them."""


class DequantisedTensors:
    """A `TensorSource`. Tensors that are not quantised in the files are passed on, whatever the config says."""

    block_bytes = 4 << 20  # of float32: unpacking takes several times as much in addition

    def __init__(self, files: SafetensorsFiles, quantisation: Quantisation) -> None:
        self._files, self._how = files, quantisation
        self._rows: dict[str, RowwiseWeight] = {}

    def headers(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        names, read = FORMATS[self._how.method]
        suffixes = sorted((f".{part}" for part in names), key=len, reverse=True)
        modules: dict[str, dict[str, Header]] = defaultdict(dict)
        for name, kind, shape in self._files.headers():
            suffix = next((s for s in suffixes if name.endswith(s)), None)
            if suffix is None:
                yield name, kind, shape
            else:
                modules[name.removesuffix(suffix)][suffix[1:]] = kind, shape
        for module, parts in modules.items():
            rows = read(Stored(self._files, module, parts), self._how)
            if rows is not None:
                self._rows[f"{module}.weight"] = rows
                yield f"{module}.weight", "F32", rows.shape
                continue
            for part, (kind, shape) in parts.items():
                if part == "weight" or "weight" not in parts:
                    yield f"{module}.{part}", kind, shape

    def whole(self, name: str) -> Tensor | None:
        return None if name in self._rows else self._files.whole(name)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        rows = self._rows.get(name)
        return self._files.read(name, start, stop) if rows is None else rows.read(start, stop)
