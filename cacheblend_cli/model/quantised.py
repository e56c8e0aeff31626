"""Quantised checkpoints as sources of plain tensors: rows are dequantised in float32 as they are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from cacheblend_kernels import RowTable
from torch import Tensor

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.quantisation import Quantisation
from cacheblend_cli.model.tensor_source import SafetensorsFiles
from cacheblend_cli.model.weight_map import Shape

PartHeader = tuple[str, Shape]
"""dtype (safetensors' name) and shape of a stored tensor."""
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Stored:
    """The tensors of one module (a linear layer)."""

    files: SafetensorsFiles
    module: str
    parts: Mapping[str, PartHeader]  # by name within the module, such as `weight` and `weight_scale`

    def __contains__(self, part: str) -> bool:
        return part in self.parts

    def shape(self, part: str) -> Shape:
        """Return the shape of a part. Raises UsageError if it is missing."""
        if part not in self.parts:
            raise self.damaged(part, "it is missing")
        return self.parts[part][1]

    def matrix(self, part: str, kind: str) -> tuple[int, int]:
        """Return rows and columns of a part. Raises UsageError if it has another dtype."""
        shape = self.shape(part)
        if self.parts[part][0] != kind or len(shape) != 2:
            raise self.damaged(part, f"expected a matrix of {kind}, got {self.parts[part][0]} {list(shape)}")
        return shape[0], shape[1]

    def check(self, part: str, *known: Shape, kinds: tuple[str, ...] = FLOATS) -> None:
        """Raise UsageError if a part has none of the shapes that the other parts imply, or another dtype."""
        if (shape := self.shape(part)) not in known:
            raise self.damaged(part, f"expected shape {list(known[-1])}, got {list(shape)}")
        if self.parts[part][0] not in kinds:
            raise self.damaged(part, f"expected {' or '.join(kinds)}, got {self.parts[part][0]}")

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


@dataclass(frozen=True)
class QuantisedWeight(ABC):
    """A weight that is dequantised row by row. shape: [out, in]."""

    stored: Stored
    how: Quantisation
    shape: Shape

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop`, [stop - start, in] float32."""


# GPTQ and AWQ: [in, out], packed in int32, with a scale and a zero point per group of inputs and output.

PACKED_PARTS = ("qweight", "qzeros", "scales", "g_idx")
# Positions of eight columns in an int32: they are packed 0, 2, 4, 6, 1, 3, 5, 7.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class Packed(QuantisedWeight):
    """GPTQ packs values along the inputs and zero points along the outputs; AWQ packs both along the outputs."""

    def read(self, start: int, stop: int) -> Tensor:
        values, zeros = self._gptq(start, stop) if self.how.method == "gptq" else self._awq(start, stop)
        groups, scales = self._groups(), self.stored.columns("scales", start, stop).float()
        return ((values - zeros[groups]).float() * scales[groups]).T

    def _groups(self) -> Tensor:
        if "g_idx" in self.stored:
            return self.stored.whole("g_idx").long()
        size = self.how.group_size
        return torch.arange(self.shape[1]) // (self.shape[1] if size == -1 else size)

    def _gptq(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return values [in, rows] and zeros [groups, rows]."""
        bits, most = self.how.bits, 2**self.how.bits - 1
        values = unpack(self.stored.columns("qweight", start, stop), bits).transpose(1, 2).flatten(0, 1)
        stored = unpack(self.stored.whole("qzeros"), bits).flatten(1)
        # The zero point of symmetric weights is the middle, whatever version the config states: some tools wrote
        # version 2 and stated version 1.
        offset = 0 if self.how.symmetric and bool((stored == 2 ** (bits - 1)).all()) else self.how.zero_offset
        return values, (stored[:, start:stop] + offset) & most

    def _awq(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        first, last = start // 8, -(-stop // 8)
        cut = slice(start - 8 * first, stop - 8 * first)
        values, zeros = (
            unpack(self.stored.columns(part, first, last), 4)[..., AWQ_ORDER].flatten(1)[:, cut]
            for part in ("qweight", "qzeros")
        )
        return values, zeros


def _packed(stored: Stored, how: Quantisation) -> QuantisedWeight:
    rows, columns = stored.matrix("qweight", "I32")
    per, gptq = 32 // how.bits, how.method == "gptq"
    inputs, outputs = (rows * per, columns) if gptq else (rows, columns * per)
    groups = 1 if how.group_size == -1 else -(-inputs // how.group_size)
    stored.check("qzeros", (groups, outputs // per), kinds=("I32",))
    stored.check("scales", (groups, outputs))
    if "g_idx" in stored:
        stored.check("g_idx", (inputs,), kinds=("I32", "I64"))
        named = stored.whole("g_idx")
        if not 0 <= int(named.min()) <= int(named.max()) < groups:
            raise stored.damaged("g_idx", f"it names group {int(named.max())} of {groups}")
    return Packed(stored, how, (outputs, inputs))


# 8-bit values with scales (transformers' fp8, compressed-tensors), and compressed-tensors' packed values.

SCALES = ("weight_scale_inv", "weight_scale")
POWERS = ("U8", "F8_E8M0")  # dtypes of power-of-two scales: a byte holds the exponent plus 127
SCALED_PARTS = (
    "weight", "weight_packed", "weight_shape", "weight_zero_point", *SCALES,
    "input_scale", "input_zero_point", "activation_scale",  # scales of activations, which are not quantised here
)  # fmt: skip


@dataclass(frozen=True)
class Scaled(QuantisedWeight):
    """(values - zero point) * scale. There is one scale for all, per row, or per block of rows and columns."""

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


def _scaled(stored: Stored, how: Quantisation) -> QuantisedWeight | None:
    packed = "weight_packed" in stored
    if not packed and not stored.parts.get("weight", ("", ()))[0].startswith(("F8_", "I8", "U8")):
        return None
    if not packed:
        shape: Shape = stored.matrix("weight", how.kind)
    else:
        rows, words = stored.matrix("weight_packed", "I32")
        shape = tuple(stored.whole("weight_shape").tolist()) if "weight_shape" in stored else ()
        if not how.packed or len(shape) != 2 or shape[0] != rows or words != -(-shape[1] * how.bits // 32):
            raise stored.damaged("weight_packed", f"it is [{rows}, {words}]; weight_shape says {list(shape)}")
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


Reader = Callable[[Stored, Quantisation], QuantisedWeight | None]
"""Returns the weight of a module, None if it is not quantised. Raises UsageError if its tensors do not match."""
FORMATS: dict[str, tuple[tuple[str, ...], Reader]] = {
    "scaled": (SCALED_PARTS, _scaled),
    "gptq": (PACKED_PARTS, _packed),
    "awq": (PACKED_PARTS, _packed),
}
"""By method: the tensors a module may have, and the function that makes a weight of them."""


class DequantisedTensors:
    """A `TensorSource`. Tensors that are not quantised in the files are passed on, even if the config says
    otherwise."""

    block_bytes = 4 << 20  # of float32: unpacking takes several times as much in addition

    def __init__(self, files: SafetensorsFiles, quantisation: Quantisation) -> None:
        self._files, self._how = files, quantisation
        self._rows: dict[str, QuantisedWeight] = {}

    def headers(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        names, read = FORMATS[self._how.method]
        suffixes = sorted((f".{part}" for part in names), key=len, reverse=True)
        modules: dict[str, dict[str, PartHeader]] = defaultdict(dict)
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

    def rows(self, name: str) -> RowTable | None:
        return None if name in self._rows else self._files.rows(name)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        rows = self._rows.get(name)
        return self._files.read(name, start, stop) if rows is None else rows.read(start, stop)
