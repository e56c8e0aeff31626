"""bitsandbytes' weights: four bits that index a table (nf4, fp4), in blocks, and int8 by rows."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cacheblend_cli.model.families.quantisation import Quantisation
from cacheblend_cli.model.quantised.stored import RowwiseWeight, Shape, Stored

STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
PARTS = (
    "weight", "SCB", "weight_format", *STATES,
    *(f"weight.{part}" for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")),
)  # fmt: skip
INT8_MOST = 127


@dataclass(frozen=True)
class FourBits:
    """The weight as one row of values, two per byte, the first in the high half, with one scale per block. The scales
    may be quantised too: eight bits that index a table, in blocks, and one offset for all."""

    stored: Stored
    shape: Shape
    state: dict[str, Any]  # the JSON that bitsandbytes stores with the tensors

    def read(self, start: int, stop: int) -> Tensor:
        columns, block = self.shape[1], int(self.state["blocksize"])
        first, last = start * columns // 2, -(-stop * columns // 2)  # bytes
        of_storage = math.prod(self.stored.shape("weight")[1:]) * _BYTES[self.stored.parts["weight"][0]]
        begin = first // of_storage
        raw = self.stored.rows("weight", begin, -(-last // of_storage)).view(torch.uint8).flatten()
        raw = raw[first - begin * of_storage :][: last - first]
        values = torch.stack((raw >> 4, raw & 15), dim=1).flatten()[start * columns - 2 * first :]
        wanted = torch.arange(start * columns, stop * columns)
        table = self.stored.whole("weight.quant_map").float()
        scales = self._scales(start * columns // block, -(-stop * columns // block))
        found = table[values[: len(wanted)].int()] * scales[wanted // block - start * columns // block]
        return found.view(stop - start, columns)

    def _scales(self, first: int, last: int) -> Tensor:
        """Return the scales of blocks `first` to `last`, float32."""
        scales = self.stored.rows("weight.absmax", first, last)
        if "weight.nested_absmax" not in self.stored:
            return scales.float()
        of_blocks = torch.arange(first, last) // int(self.state["nested_blocksize"])
        table = self.stored.whole("weight.nested_quant_map").float()
        outer = self.stored.whole("weight.nested_absmax").float()
        return table[scales.int()] * outer[of_blocks] + float(self.state["nested_offset"])


@dataclass(frozen=True)
class EightBits:
    """int8, scaled by each row's largest value (SCB)."""

    stored: Stored
    shape: Shape

    def read(self, start: int, stop: int) -> Tensor:
        scales = self.stored.rows("SCB", start, stop).float() / INT8_MOST
        return self.stored.rows("weight", start, stop).float() * scales[:, None]


_BYTES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}  # four-bit values may be stored in tensors of another dtype


def bitsandbytes(stored: Stored, how: Quantisation) -> RowwiseWeight | None:
    """Return the weight, None if the module is not quantised. Raises UsageError if its tensors do not match."""
    state = next((name for name in STATES if name in stored), None)
    if state is not None:
        return _four_bits(stored, state)
    if "SCB" not in stored:
        return None
    rows, columns = stored.matrix("weight", "I8")
    stored.check("SCB", (rows,))
    if "weight_format" in stored and int(stored.whole("weight_format")) != 0:
        raise stored.damaged(
            "weight_format", f"it is {int(stored.whole('weight_format'))}, and only 0 (by rows) is read"
        )
    return EightBits(stored, (rows, columns))


def _four_bits(stored: Stored, name: str) -> RowwiseWeight:
    try:
        state = json.loads(bytes(stored.whole(name).tolist()))
        rows, columns = (int(n) for n in state["shape"])
        block = int(state["blocksize"])
        nested = [int(state["nested_blocksize"]), float(state["nested_offset"])] if _is_nested(stored) else [1]
    except (ValueError, TypeError, KeyError) as error:
        raise stored.damaged(name, f"it lacks the shape or block size of the weight ({error!r})") from error
    if min(rows, columns, block, nested[0]) < 1:
        raise stored.damaged(name, f"the weight's shape is {[rows, columns]}, in blocks of {block}")
    kind, shape = stored.parts.get("weight", ("", ()))
    if kind not in _BYTES or math.prod(shape) * _BYTES[kind] != -(-rows * columns // 2):
        raise stored.damaged("weight", f"it is {kind} {list(shape)}, and half of {rows * columns} bytes are implied")
    blocks = -(-rows * columns // block)
    stored.check("weight.quant_map", (16,))
    stored.check("weight.absmax", (blocks,), kinds=("U8",) if _is_nested(stored) else ("F32",))
    if _is_nested(stored):
        stored.check("weight.nested_quant_map", (256,))
        stored.check("weight.nested_absmax", (-(-blocks // int(nested[0])),))
    return FourBits(stored, (rows, columns), state)


def _is_nested(stored: Stored) -> bool:
    return "weight.nested_absmax" in stored
