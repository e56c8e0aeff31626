"""Random rows of GGUF tensors."""

from __future__ import annotations

import numpy as np
import torch
from cacheblend_kernels.row_table import BLOCKS, RowTable
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

SCALES_AT = {10: (80, 82), 11: (108,), 14: (208,), 12: (0, 2), 13: (0, 2), 3: (0, 2), 7: (0, 2)}


def rows_of(kind: int, num_rows: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows with scales as in models, zero, negative and subnormal ones among them: (bytes, values in fp64)."""
    numbers = np.random.default_rng(seed * 100 + kind)
    _, size, values = BLOCKS[kind]
    if values == 1:
        full = torch.from_numpy(numbers.standard_normal((num_rows, width)).astype(np.float32))
        stored = full.to({0: torch.float32, 1: torch.float16, 30: torch.bfloat16}[kind])
        return stored.view(torch.uint8), stored.double()
    raw = numbers.integers(0, 256, (num_rows, width // values, size), dtype=np.uint8)
    if kind == 39:
        raw[..., 0] = numbers.integers(115, 130, raw.shape[:2])
    for at in () if kind == 39 else SCALES_AT.get(kind, (0,)):
        scales = numbers.choice([1e-2, -3e-3, 0.0, -0.0, 1e-5, 4e-2], raw.shape[:2]).astype(np.float16)
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    raw = raw.reshape(num_rows, -1)
    return torch.from_numpy(raw), torch.from_numpy(dequantize(raw, GGMLQuantizationType(kind))).double()


def table_of_bytes(raw: torch.Tensor, kind: int, width: int) -> RowTable:
    """A table of rows of blocks in memory, of any kind. raw: [num_rows, num_bytes] uint8, contiguous."""
    addresses = raw.data_ptr() + torch.arange(len(raw)) * raw.shape[1]
    return RowTable(addresses, torch.full((len(raw),), kind, dtype=torch.uint8), width, raw)
