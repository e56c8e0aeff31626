"""Matrix products with a model's weights: by torch, or by compiled code in the types of the model's file."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from cacheblend_kernels import RowTable, compiled
from torch import Tensor

CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "64"}
"""Capacity of two caches per product shape: compiled oneDNN products (half a MiB each), and torch's descriptions of
them (a quarter of a MiB each). Each number of rows is a shape, and both caches default to 1,024 entries: a long-running
engine would fill them (benchmarks/results/soak.md)."""
STEADY_ROWS = 4
"""Rows of each batch where torch multiplies on a CPU: with more or fewer it may sum a row in another order."""
Weight = Tensor | RowTable


class Role(threading.local):
    """What this thread computes: decode steps, or prompts.

    Products in a file's types are made in one of two ways, by role and never by the number of rows: the same row has
    the same result alone and in any batch."""

    decodes = False


ROLE = Role()


@contextmanager
def decoding(decodes: bool) -> Iterator[None]:
    """Set this thread's role."""
    before, ROLE.decodes = ROLE.decodes, decodes
    try:
        yield
    finally:
        ROLE.decodes = before


def bound_caches(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set CACHES unless the user has set them. They are read at the first product."""
    for name, capacity in CACHES.items():
        if name.replace("ONEDNN_", "DNNL_") not in environment:  # the older name, which oneDNN reads too
            environment.setdefault(name, capacity)


class Linear:
    """x -> x W^T + b by torch. weight: [out, in]; bias: [out] or None, both in the compute dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias, self.num_outputs = weight, bias, len(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, in]. Returns [num_rows, out]."""
        return F.linear(x, self.weight, self.bias)


class MappedLinear:
    """x -> x W^T + b by compiled code, with weights where they are stored, usually in the model's file.

    Prompts: weights are unpacked tile by tile. Quantised weights are multiplied with x rounded to 15 bits: in decode
    steps with one scale for each 32 values; of prompts in float32, with AVX512-VNNI, or AVX2 without AVX-512, with one
    for each 128. A row's result never depends on other rows.
    table: W, [out, in]; bias: [out] in the compute dtype, or None.
    """

    def __init__(self, table: RowTable, bias: Tensor | None = None) -> None:
        self.table, self.bias = table, None if bias is None else bias.contiguous()
        self.num_outputs = len(table)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, in]. Returns [num_rows, out]."""
        product = compiled.decode_product if ROLE.decodes else compiled.prefill_product
        out = product(x, self.table, self.bias)
        if out is None:  # tables are made only where `compiled.multiplies`
            raise MemoryError("a matrix product has no memory for its scratch")
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor | None:
        """Return silu(gate) * up of prompts, [num_rows, out / 2], without storing what it multiplies; None in decode
        steps, and for a width that compiled code does not support. W: [gate, up]."""
        return None if ROLE.decodes else compiled.prefill_product(x, self.table, self.bias, gated=True)


class Embedding:
    """Rows of a matrix by token id. weight: [num_tokens, width]."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight

    def __len__(self) -> int:
        return len(self.weight)

    def __call__(self, token_ids: Tensor, dtype: torch.dtype, columns: slice | None = None) -> Tensor:
        """Return rows [num_rows, width], or some of their columns. token_ids: [num_rows] int64."""
        if isinstance(self.weight, Tensor):
            return F.embedding(token_ids, self.weight if columns is None else self.weight[:, columns]).to(dtype)
        whole = self.weight[token_ids]
        part = None if columns is None else whole.columns(columns.start, columns.stop)
        rows = compiled.restore_rows(whole if part is None else part, torch.arange(len(token_ids)), dtype)
        assert rows is not None, "tables are made only where `compiled.multiplies`"
        return rows if columns is None or part is not None else rows[:, columns]


def linear(weight: Weight, bias: Tensor | None = None) -> Linear | MappedLinear:
    """Return the product with this weight."""
    return MappedLinear(weight, bias) if isinstance(weight, RowTable) else Linear(weight, bias)
