"""Choice of the compute dtype on CPUs: measured once per machine, not read from a list of CPUs.

bf16 products are twice as fast as fp32 on CPUs with native support, and several times slower where they are emulated.
"""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cacheblend_cli import user_cache
from cacheblend_cli.model.linear import Linear
from cacheblend_cli.model.spec import ModelSpec

FORMAT = 1
WORTH = 1.2  # speed-up with many rows below which the rounding is not worth it
ROWS = 256
ROUNDS = 3
MOST_WEIGHTS = 8 << 20


@dataclass(frozen=True)
class ProductSpeeds:
    """Seconds of one product with the model's widest weights, of ROWS rows and of one row, in fp32 and bf16."""

    fp32_many_s: float
    fp32_one_s: float
    bf16_many_s: float
    bf16_one_s: float

    def __str__(self) -> str:
        return (
            f"{ROWS} rows float32 {self.fp32_many_s * 1000:.3g} ms, bfloat16 {self.bf16_many_s * 1000:.3g} ms; "
            f"one row {self.fp32_one_s * 1000:.3g} and {self.bf16_one_s * 1000:.3g} ms"
        )

    @property
    def best(self) -> torch.dtype:
        faster = self.fp32_many_s / self.bf16_many_s >= WORTH and self.bf16_one_s <= 1.1 * self.fp32_one_s
        return torch.bfloat16 if faster else torch.float32


def cpu_dtype(spec: ModelSpec, stated: torch.dtype) -> torch.dtype:
    """bf16 for weights saved in bf16 if this CPU multiplies it faster; otherwise fp32, which rounds nothing."""
    return product_speeds(spec).best if stated == torch.bfloat16 else torch.float32


def product_speeds(spec: ModelSpec) -> ProductSpeeds:
    """Measured speeds for this machine, torch version and shape, cached on disk after the first call (about 0.1 s).

    One measurement serves all thread counts: otherwise `precompute` and `ask` with different --threads would use
    different dtypes.
    """
    shape = spec.hidden_size, spec.intermediate_size
    machine = cpu_name(), os.cpu_count(), torch.__version__
    path = user_cache.place("products", FORMAT, *machine, *shape)
    with suppress(ValueError, TypeError):
        return ProductSpeeds(**json.loads(user_cache.recall(path)))
    speeds = measure(spec)
    user_cache.keep(path, json.dumps(asdict(speeds)))
    return speeds


@torch.inference_mode()
def measure(spec: ModelSpec) -> ProductSpeeds:
    """Best of a few rounds, the dtypes alternating, so that other load affects both."""
    inputs = spec.hidden_size
    outputs = max(1, min(2 * spec.intermediate_size, MOST_WEIGHTS // inputs))
    weight, x = torch.ones(outputs, inputs), torch.ones(ROWS, inputs)
    products = {dtype: (Linear(weight.to(dtype)), x.to(dtype)) for dtype in (torch.float32, torch.bfloat16)}
    best: dict[tuple[torch.dtype, int], float] = {}
    for _ in range(ROUNDS + 1):  # the first one warms up
        for dtype, (linear, rows) in products.items():
            for count in (ROWS, 1):
                start = time.perf_counter()
                linear(rows[:count])
                seconds = time.perf_counter() - start
                best[dtype, count] = min(seconds, best.get((dtype, count), seconds))
    return ProductSpeeds(
        best[torch.float32, ROWS], best[torch.float32, 1], best[torch.bfloat16, ROWS], best[torch.bfloat16, 1]
    )


def cpu_name() -> str:
    """The CPU's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((s.split(":")[1].strip() for s in lines if s.startswith("model name")), platform.machine())
