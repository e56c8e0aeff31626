"""Base of quantised weight formats: a module's stored tensors, and the rows they encode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.tensor_source import SafetensorsFiles

Shape = tuple[int, ...]
Header = tuple[str, Shape]
"""dtype (safetensors' name) and shape of a stored tensor."""
FLOATS = ("F32", "F16", "BF16")


class RowwiseWeight(Protocol):
    """A weight that is dequantised row by row."""

    @property
    def shape(self) -> Shape:
        """[out, in]."""
        ...

    def read(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop`, [stop - start, in] float32."""
        ...


@dataclass(frozen=True)
class Stored:
    """The tensors of one module (a linear layer)."""

    files: SafetensorsFiles
    module: str
    parts: Mapping[str, Header]  # by name within the module, such as `weight` and `weight_scale`

    def __contains__(self, part: str) -> bool:
        return part in self.parts

    def shape(self, part: str) -> Shape:
        """Return the shape of a part. Raises UsageError if it is missing."""
        if part not in self.parts:
            raise self.damaged(part, "it is missing")
        return self.parts[part][1]

    def matrix(self, part: str, *kinds: str) -> tuple[int, int]:
        """Return rows and columns of a part that has one of these dtypes. Raises UsageError otherwise."""
        shape = self.shape(part)
        if self.parts[part][0] not in kinds or len(shape) != 2:
            raise self.damaged(part, f"it is {self.parts[part][0]} {list(shape)}, and a matrix of {kinds[0]} is read")
        return shape[0], shape[1]

    def check(self, part: str, *known: Shape, kinds: tuple[str, ...] = FLOATS) -> None:
        """Raise UsageError if a part has none of the shapes that the other parts imply, or another dtype."""
        if (shape := self.shape(part)) not in known:
            raise self.damaged(part, f"it has the shape {list(shape)}, and {list(known[-1])} is implied")
        if self.parts[part][0] not in kinds:
            raise self.damaged(part, f"it is {self.parts[part][0]}, and {', '.join(kinds)} is read")

    def rows(self, part: str, start: int, stop: int) -> Tensor:
        return self.files.read(f"{self.module}.{part}", start, stop)

    def columns(self, part: str, start: int, stop: int) -> Tensor:
        return self.files.columns(f"{self.module}.{part}", start, stop)

    def whole(self, part: str) -> Tensor:
        return self.files.whole(f"{self.module}.{part}")

    def damaged(self, part: str, reason: str) -> UsageError:
        return UsageError(
            f"the quantised tensor {self.module}.{part} is not read: {reason}",
            "fetch the checkpoint again, or use the one it was made from",
        )


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack [a, b] int32 to [a, b, values per int32] int32, the lowest bits first."""
    return (packed[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & (2**bits - 1)
