"""Rows of a matrix where they are stored, in the types of model files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
"""Numbers of the GGMLQuantizationTypes of plain numbers."""
BLOCKS = {
    0: ("F32", 4, 1), 1: ("F16", 2, 1), 30: ("BF16", 2, 1), 2: ("Q4_0", 18, 32), 3: ("Q4_1", 20, 32), 6: ("Q5_0", 22, 32),
    7: ("Q5_1", 24, 32), 8: ("Q8_0", 34, 32), 10: ("Q2_K", 84, 256), 11: ("Q3_K", 110, 256), 12: ("Q4_K", 144, 256),
    13: ("Q5_K", 176, 256), 14: ("Q6_K", 210, 256), 20: ("IQ4_NL", 18, 32), 23: ("IQ4_XS", 136, 256), 39: ("MXFP4", 17, 32),
}  # fmt: skip
"""Number of a GGMLQuantizationType that compiled code reads -> its name, and bytes and values of a block."""
NUMBERS = {name: number for number, (name, *_) in BLOCKS.items()}


@dataclass(frozen=True)
class RowTable:
    """A matrix [num_rows, width] whose rows stay in a mapped file or in memory.

    addresses: of each row, [num_rows] int64; kinds: number of the GGMLQuantizationType of each row, [num_rows] uint8;
    memory: what the addresses point into, kept alive by the table; factor: multiplies every value.
    """

    addresses: Tensor
    kinds: Tensor
    width: int
    memory: object
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.addresses), self.width

    def __len__(self) -> int:
        return len(self.addresses)

    def __getitem__(self, rows: slice | Tensor) -> RowTable:
        """Return a table of some rows; rows: a slice, or indices [n] int64."""
        addresses, kinds = self.addresses[rows].contiguous(), self.kinds[rows].contiguous()
        return RowTable(addresses, kinds, self.width, self.memory, self.factor)

    def columns(self, start: int, stop: int) -> RowTable | None:
        """Return a table of columns of a table of one kind; None if they do not begin and end with a block."""
        kind = int(self.kinds[0]) if len(self) else 0
        _, num_bytes, values = BLOCKS[kind]
        if start % values or stop % values or (self.kinds != kind).any():
            return None
        addresses = self.addresses + start // values * num_bytes
        return RowTable(addresses, self.kinds, stop - start, self.memory, self.factor)

    @staticmethod
    def stored(kind: int, shape: tuple[int, ...], address: int, memory: object) -> RowTable:
        """Return a table of a stored matrix of one kind, [num_rows, width]."""
        num_rows, width = shape
        _, num_bytes, values = BLOCKS[kind]
        addresses = address + torch.arange(num_rows) * (width // values * num_bytes)
        return RowTable(addresses, torch.full((num_rows,), kind, dtype=torch.uint8), width, memory)

    @staticmethod
    def of(matrix: Tensor) -> RowTable:
        """Return a table of a matrix in memory, [num_rows, width] in one of KINDS, contiguous."""
        assert matrix.is_cpu and matrix.is_contiguous(), "rows follow each other in the memory of the host"  # noqa: PT018
        return RowTable.stored(KINDS[matrix.dtype], matrix.shape, matrix.data_ptr(), matrix)

    @staticmethod
    def cat(tables: Sequence[RowTable]) -> RowTable:
        """Return the rows of several tables of one width and factor, one after the other."""
        first = tables[0]
        if len(tables) == 1:
            return first
        addresses, kinds = (torch.cat([getattr(t, name) for t in tables]) for name in ("addresses", "kinds"))
        return RowTable(addresses, kinds, first.width, [table.memory for table in tables], first.factor)
