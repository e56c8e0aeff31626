"""8-bit values with scales (transformers' fp8, compressed-tensors), and compressed-tensors' packed values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cacheblend_cli.model.families.quantisation import Quantisation
from cacheblend_cli.model.quantised.stored import FLOATS, RowwiseWeight, Shape, Stored, unpack

SCALES = ("weight_scale_inv", "weight_scale")
POWERS = ("U8", "F8_E8M0")  # dtypes of power-of-two scales: a byte holds the exponent plus 127
PARTS = (
    "weight", "weight_packed", "weight_shape", "weight_zero_point", *SCALES,
    "input_scale", "input_zero_point", "activation_scale",  # scales of activations, which are not quantised here
)  # fmt: skip


@dataclass(frozen=True)
class Scaled:
    """(values - zero point) * scale. There is one scale for all, per row, or per block of rows and columns."""

    stored: Stored
    how: Quantisation
    shape: Shape
    scale: str
    packed: bool

    def read(self, start: int, stop: int) -> Tensor:
        values = self._packed(start, stop) if self.packed else self.stored.rows("weight", start, stop).float()
        if "weight_zero_point" in self.stored:
            values -= self._spread(self._zero_points(), start, stop)
        scales = self.stored.whole(self.scale)
        if scales.dtype == torch.uint8:
            scales = torch.exp2(scales.float() - 127)
        return values.mul_(self._spread(scales.float(), start, stop))

    def _packed(self, start: int, stop: int) -> Tensor:
        values = unpack(self.stored.rows("weight_packed", start, stop), self.how.bits).flatten(1)
        return (values[:, : self.shape[1]] - 2 ** (self.how.bits - 1)).float()

    def _zero_points(self) -> Tensor:
        points = self.stored.whole("weight_zero_point")
        if self.packed and points.dtype == torch.int32:  # packed along the rows
            points = unpack(points.T, self.how.bits).flatten(1).T[: self.shape[0]] - 2 ** (self.how.bits - 1)
        return points.float()

    def _spread(self, grid: Tensor, start: int, stop: int) -> Tensor:
        """Expand a grid of scales or zero points to rows `start` to `stop`."""
        if grid.numel() == 1:
            return grid.reshape(1, 1)
        if self.how.block is None:
            return grid.reshape(-1, 1)[start:stop]
        of_rows = grid[torch.arange(start, stop) // self.how.block[0]]
        return of_rows.repeat_interleave(self.how.block[1], dim=1)[:, : self.shape[1]]


def scaled(stored: Stored, how: Quantisation) -> RowwiseWeight | None:
    """Return the weight, None if the module is not quantised. Raises UsageError if its tensors do not match."""
    packed = "weight_packed" in stored
    if not packed and not stored.parts.get("weight", ("", ()))[0].startswith(("F8_", "I8", "U8")):
        return None
    if not packed:
        shape: Shape = stored.matrix("weight", how.kind)
    else:
        rows, words = stored.matrix("weight_packed", "I32")
        shape = tuple(stored.whole("weight_shape").tolist()) if "weight_shape" in stored else ()
        if not how.packed or len(shape) != 2 or shape[0] != rows or words != -(-shape[1] * how.bits // 32):
            raise stored.damaged("weight_packed", f"it is [{rows}, {words}], and weight_shape says {list(shape)}")
    scale = next((name for name in SCALES if name in stored), SCALES[-1])
    grid: list[Shape] = [(), (1,), (shape[0],), (shape[0], 1)]
    if how.block is not None:
        grid = [(), (1,), (-(-shape[0] // how.block[0]), -(-shape[1] // how.block[1]))]
    stored.check(scale, *grid, kinds=(*FLOATS, *POWERS))
    if "weight_zero_point" in stored:
        points: list[Shape] = [*grid, (-(-shape[0] * how.bits // 32), grid[-1][1])] if packed else grid
        stored.check("weight_zero_point", *points, kinds=("I8", "I32", "I64", *FLOATS, how.kind))
    elif not how.symmetric:
        raise stored.damaged("weight_zero_point", "it is missing")
    return Scaled(stored, how, shape, scale, packed)
