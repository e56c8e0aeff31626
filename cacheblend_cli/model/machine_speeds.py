"""Select computation variants by their speed on this machine, measured once, when first needed, and cached.

Choices do not depend on the CPU's name. A record per CPU, torch version and shape serves all thread counts and
processes, so that cold, warm and batched answers are computed in the same way.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import torch
from cacheblend_kernels import RowTable, compiled
from torch import Tensor

from cacheblend_cli import user_cache
from cacheblend_cli.model.linear import Linear, MappedLinear, decoding, linear
from cacheblend_cli.model.spec import ModelSpec

FORMAT = 1
WORTH = 1.2  # minimum speed-up to leave the default: a disturbed measurement must not change the computation
NO_SLOWER = 1.1
ROWS = 256
LEAST_ROUNDS, MOST_S = 3, 0.25  # rounds after the first, which warms up; seconds after which no further round begins
AGREE = 1.1  # measuring ends when a candidate's second best time is within this ratio of its best
MOST_WEIGHTS = 4 << 20

_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")

Run = Callable[[], object]
CASES = (f"{ROWS} rows", "one row")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # the first is the default
_RECORD = msgspec.json.Decoder(dict[str, tuple[float, float]])


@dataclass(frozen=True)
class CandidateSpeeds:
    """Best seconds of each candidate in both CASES. The first candidate is the default."""

    seconds: Mapping[str, tuple[float, float]]

    def __str__(self) -> str:
        parts = (
            f"{case} " + ", ".join(f"{name} {times[i] * 1000:.3g} ms" for name, times in self.seconds.items())
            for i, case in enumerate(CASES)
        )
        return "; ".join(parts)

    @property
    def best(self) -> str:
        """Return a candidate WORTH times as fast in the first case and no slower in the second; else the default."""
        default, *others = self.seconds
        fit = [n for n in others if self.gain(n, 0) >= WORTH and self.gain(n, 1) * NO_SLOWER >= 1]
        return max(fit, key=lambda name: self.gain(name, 0), default=default)

    def gain(self, name: str, case: int) -> float:
        """Return the speed-up over the default."""
        return next(iter(self.seconds.values()))[case] / self.seconds[name][case]


def cpu_dtype(spec: ModelSpec, stated: torch.dtype) -> torch.dtype:
    """Return bf16 for weights saved in bf16 if this CPU multiplies it faster; otherwise fp32, which rounds nothing.
    CPUs without native bf16 take several times as long as in fp32."""
    faster = stated == torch.bfloat16 and product_speeds(spec).best == "bfloat16"
    return torch.bfloat16 if faster else torch.float32


def product_speeds(spec: ModelSpec) -> CandidateSpeeds:
    """Return the stored speeds of products with the model's widest weights in DTYPES, or measure and store them. The
    first process's record counts."""
    inputs = spec.hidden_size
    outputs = max(1, min(2 * spec.intermediate_size, MOST_WEIGHTS // inputs))
    machine = cpu_name(), *cpu_features(), os.cpu_count(), torch.__version__
    path = user_cache.place("products", FORMAT, *machine, str(inputs), str(outputs), str(compiled.ABI))
    if text := user_cache.recall(path):
        if (seconds := _read(text)) is not None:
            return CandidateSpeeds(seconds)
        with suppress(OSError):
            path.unlink()
    measured = measure(_products(inputs, outputs))
    kept = user_cache.settle(path, msgspec.json.encode(measured).decode())
    return CandidateSpeeds(_read(kept) or measured)


def describe(spec: ModelSpec) -> dict[str, str]:
    """Return the times (measured now if necessary) and the choice."""
    products = product_speeds(spec)
    return {"products": f"{products}: {products.best} for weights saved in bfloat16"}


def cpu_name() -> str:
    return next((s.split(":")[1].strip() for s in _cpu_info() if s.startswith("model name")), platform.machine())


def cpu_features() -> list[str | None]:
    """Return the CPU's instruction sets, and the user's limits."""
    flags = next((line for line in _cpu_info() if line.startswith(("flags", "Features"))), "")
    return [flags, *(os.environ.get(name) for name in _VARIABLES)]


@cache
def _cpu_info() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _read(text: str) -> dict[str, tuple[float, float]] | None:
    """Return the seconds of a record of DTYPES; None for any other text."""
    try:
        seconds = _RECORD.decode(text)
    except msgspec.DecodeError:
        return None
    return seconds if [*seconds] == [*DTYPES] and all(s > 0 for times in seconds.values() for s in times) else None


@torch.inference_mode()
def measure(candidates: Mapping[str, tuple[Run, Run]]) -> dict[str, tuple[float, float]]:
    """Return the best CPU seconds of one thread for each candidate in both cases. CPU time is independent of other
    programs on the cores and of the number of threads. Candidates take turns until the best two times of each agree."""
    times: dict[tuple[str, int], list[float]] = {(name, case): [] for name in candidates for case in range(2)}
    begin, rounds, threads = time.thread_time(), 0, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        while rounds <= LEAST_ROUNDS or (time.thread_time() - begin < MOST_S and not all(map(_agree, times.values()))):
            for (name, case), found in times.items():
                start = time.thread_time()
                candidates[name][case]()
                if rounds:  # the first warms up
                    found.append(time.thread_time() - start)
            rounds += 1
    finally:
        torch.set_num_threads(threads)
    return {name: (min(times[name, 0]), min(times[name, 1])) for name in candidates}


def _agree(times: list[float]) -> bool:
    best, second = sorted(times)[:2]
    return second <= AGREE * best


def _products(inputs: int, outputs: int) -> dict[str, tuple[Run, Run]]:
    """Return runs of products with random weights saved in bfloat16, held as a model computing in each dtype does."""
    weight = torch.empty(outputs, inputs).uniform_(-1, 1, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x = torch.ones(ROWS, inputs)
    return {
        name: _runs(linear(RowTable.of(weight) if compiled.multiplies(dtype) else weight.to(dtype)), x.to(dtype))
        for name, dtype in DTYPES.items()
    }


def _runs(product: Linear | MappedLinear, x: Tensor) -> tuple[Run, Run]:
    """Return runs of a product with all rows of a prompt, and with one row of a decode step."""

    def decode() -> None:
        with decoding(True):
            product(x[:1])

    return lambda: product(x), decode
