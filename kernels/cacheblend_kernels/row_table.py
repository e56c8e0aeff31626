"""Weights by rows: each row's address and kind, so that rows of several tensors and kinds make one weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowTable:
    """Rows of a weight where they lie, in a mapped file or in memory."""

    addresses: Tensor  # [num_outputs] int64
    kinds: Tensor  # [num_outputs] uint8, numbers of GGMLQuantizationType
    width: int  # values of each row
    memory: object  # kept alive: the addresses point into it

    def __post_init__(self) -> None:
        for tensor, dtype in ((self.addresses, torch.int64), (self.kinds, torch.uint8)):
            assert tensor.dtype == dtype
            assert tensor.shape == (len(self.kinds),)
            assert tensor.is_cpu
            assert tensor.is_contiguous()

    @classmethod
    def of(cls, raw: Tensor, kind: int, width: int) -> RowTable:
        """Return a table of rows in memory. raw: [num_rows, num_bytes] uint8, contiguous."""
        num_rows, num_bytes = raw.shape
        addresses = raw.data_ptr() + num_bytes * torch.arange(num_rows)
        return cls(addresses, torch.full((num_rows,), kind, dtype=torch.uint8), width, raw)
