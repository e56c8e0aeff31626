"""Milliseconds of a product over the rows of a GGUF file, by kind: one row of x and 340, on one core, beside oneDNN.

    python benchmarks/weights.py [--outputs 8960] [--inputs 1536] [--rows 340] [--seconds 1]

A matrix of random blocks (`random_blocks.py`) per kind. One row is a decoded token (`compiled.decode_product`), 340 are
a blended prefill (`compiled.prefill_product`). oneDNN multiplies weights that it has packed. Median of the calls that
fit the seconds, after one to warm up; prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from cacheblend_kernels import compiled
from cacheblend_kernels.torch_attention import onednn_multiplies
from gguf import GGMLQuantizationType as Kind
from machine import machine_name
from random_blocks import FACTORS, random_rows
from torch import Tensor

KINDS = (*FACTORS, Kind.MXFP4, Kind.F16, Kind.BF16, Kind.F32)


def median_ms(call: Callable[[], Tensor | None], seconds: float) -> float | None:
    """Return the median milliseconds of a call; None if it computes nothing."""
    if call() is None:
        return None
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def row_table(kind: Kind, outputs: int, inputs: int) -> compiled.RowTable:
    memory = np.ascontiguousarray(random_rows(kind, outputs, inputs, np.random.default_rng(0)))
    addresses = memory.ctypes.data + memory.strides[0] * torch.arange(outputs)
    return compiled.RowTable(addresses, torch.full((outputs,), int(kind), dtype=torch.uint8), inputs, memory)


def onednn(dtype: torch.dtype, outputs: int, inputs: int) -> Callable[[Tensor], Tensor]:
    """Return the product with weights that oneDNN has packed."""
    packed = torch.ops.mkldnn._reorder_linear_weight((0.02 * torch.randn(outputs, inputs)).to(dtype))
    return lambda x: torch.ops.mkldnn._linear_pointwise(x.to(dtype), packed, None, "none", [], "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=int, default=8960)
    parser.add_argument("--inputs", type=int, default=1536)
    parser.add_argument("--rows", type=int, default=340)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = arguments.outputs, arguments.inputs
    one, many = torch.randn(1, arguments.inputs), torch.randn(arguments.rows, arguments.inputs)
    print(f"{machine_name()}, one core, {arguments.inputs:,} x {arguments.outputs:,}\n")
    print(f"| weights | MiB | 1 row, ms | {arguments.rows} rows, ms |\n|---|---|---|---|")

    def show(name: str, num_bytes: int, *calls: Callable[[], Tensor | None]) -> None:
        figures = (median_ms(call, arguments.seconds) for call in calls)
        cells = ("none" if ms is None else f"{ms:.2f}" for ms in figures)
        print(f"| {name} | {num_bytes / 2**20:.1f} | {' | '.join(cells)} |", flush=True)

    for dtype in filter(onednn_multiplies, (torch.float32, torch.bfloat16)):
        product = onednn(dtype, *shape)
        name = f"oneDNN {str(dtype).removeprefix('torch.')}, packed"
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        show(name, num_bytes, lambda p=product: p(one), lambda p=product: p(many))  # type: ignore[misc]
    for kind in KINDS:
        table = row_table(kind, *shape)
        show(
            kind.name,
            table.memory.nbytes,
            lambda t=table: compiled.decode_product(one, t),  # type: ignore[misc]
            lambda t=table: compiled.prefill_product(many, t),  # type: ignore[misc]
        )


if __name__ == "__main__":
    main()
