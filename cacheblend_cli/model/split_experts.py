"""Experts stored in one tensor, exposed as a source with one tensor per part of each expert.

gpt-oss: gate_up_proj [count, in, 2 * width] with gate and up interleaved, down_proj [count, width, out], transposed,
and their biases without the inputs. Gemma 4 (`stacked`): gate_up_proj [count, 2 * width, in], gate above up, down_proj
[count, out, width]. In MXFP4 (OCP Microscaling Formats, version 1.0) a weight is `_blocks` [count, out, in / 32, 16]
uint8, two 4-bit values in each, the first in the low bits, and `_scales` [count, out, in / 32], the exponent of the
block's factor, biased by 127.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from cacheblend_kernels import RowTable
from torch import Tensor

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.values import MOST_EXPERTS
from cacheblend_cli.model.tensor_source import TensorSource

MERGED = re.compile(r"(?P<base>.*\.experts\.)(?P<name>gate_up_proj|down_proj)(?P<kind>_bias|_blocks|_scales|)")
DIMENSIONS = {"_bias": 2, "": 3, "_blocks": 4}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
Header = tuple[str, str, tuple[int, ...]]


class _Part(NamedTuple):
    """Rows `first`, `first + step`, ... of an expert in a stored tensor."""

    stored: str
    kind: str
    expert: int
    first: int
    step: int
    num_rows: int


class SplitExperts:
    """A `TensorSource` over another one; other tensors are passed on. stacked: Gemma 4's layout, else gpt-oss's."""

    def __init__(self, source: TensorSource, stacked: bool) -> None:
        self._source, self._parts, self._stacked = source, dict[str, _Part](), stacked
        self.block_bytes = source.block_bytes

    def headers(self) -> Iterator[Header]:
        found = list(self._source.headers())
        shapes = {name: shape for name, _, shape in found}
        for name, kind, shape in found:
            match = MERGED.fullmatch(name)
            if match and match["kind"] == "_scales" and f"{match['base']}{match['name']}_blocks" in shapes:
                continue
            if match is None or len(shape) != DIMENSIONS.get(match["kind"]) or 0 in shape or shape[0] > MOST_EXPERTS:
                yield name, kind, shape
                continue
            if match["kind"] == "_blocks":
                scales = f"{match['base']}{match['name']}_scales"
                if shape[-1] != 16 or kind != "U8" or shapes.get(scales) != shape[:-1]:
                    raise UsageError(
                        f"the quantised tensor {name} is not read: its dtype or shape does not match {scales}",
                        "fetch the checkpoint again",
                    )
            yield from self._split(match, name, "F32" if match["kind"] == "_blocks" else kind, shape)

    def _split(self, match: re.Match[str], name: str, kind: str, shape: tuple[int, ...]) -> Iterator[Header]:
        plain = shape[1:] if self._stacked else shape[:0:-1]
        of_expert = {"_bias": shape[1:], "": plain, "_blocks": (shape[1], 32 * shape[-2])}[match["kind"]]
        names = ("gate_proj", "up_proj") if match["name"] == "gate_up_proj" else ("down_proj",)
        part_of = "bias" if match["kind"] == "_bias" else "weight"
        for expert in range(shape[0]):
            for first, part in enumerate(names):
                own = f"{match['base']}{expert}.{part}.{part_of}"
                rows = of_expert[0] // len(names)
                first_row, step = (first * rows, 1) if self._stacked else (first, len(names))
                self._parts[own] = _Part(name, match["kind"], expert, first_row, step, rows)
                yield own, kind, (rows, *of_expert[1:])

    def rows(self, name: str) -> RowTable | None:
        """Return the rows of an expert whose values are stored in their order: not transposed, not in MXFP4."""
        part = self._parts.get(name)
        if part is None:
            return self._source.rows(name)
        table = self._source.rows(part.stored) if self._stacked and not part.kind else None
        if table is None:
            return None
        of_expert = part.num_rows * (2 if "gate_up_proj" in part.stored else 1)
        first = part.expert * of_expert + part.first
        return table[first : first + part.num_rows]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        part = self._parts.get(name)
        if part is None:
            return self._source.read(name, start, stop)
        rows = slice(part.first + part.step * start, part.first + part.step * stop, part.step)
        held = self._source.read(part.stored, part.expert, part.expert + 1)[0]
        if part.kind != "_blocks":
            return held.T[rows] if held.dim() == 2 and not self._stacked else held[rows]
        scales = self._source.read(part.stored.removesuffix("_blocks") + "_scales", part.expert, part.expert + 1)[0]
        return dequantised(held[rows], scales[rows])


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """MXFP4 blocks [rows, in / 32, 16] and scales [rows, in / 32] uint8 -> [rows, in] fp32."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    values = torch.tensor(E2M1)[codes.long()]
    return torch.ldexp(values, scales.int()[..., None] - 127).flatten(1)
