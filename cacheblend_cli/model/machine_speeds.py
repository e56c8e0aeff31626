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
from functools import cache, partial
from pathlib import Path

import msgspec
import torch
from cacheblend_kernels import compiled
from torch import Tensor

from cacheblend_cli import user_cache
from cacheblend_cli.model.linear import STEADY_ROWS, Int8Linear, Linear, Product
from cacheblend_cli.model.spec import ModelSpec

FORMAT = 1
WORTH = 1.2  # minimum speed-up to leave the default: a disturbed measurement must not change the computation
NO_SLOWER = 1.1
ROWS = 256
LEAST_ROUNDS, MOST_S = 3, 0.25  # rounds after the first, which warms up; seconds after which no further round begins
AGREE = 1.1  # measuring ends when a candidate's second best time is within this ratio of its best
MOST_WEIGHTS = 4 << 20
COLD = 8  # products measured in turn, so that their weights are not in the CPU's cache
LEAST_WEIGHTS = 1 << 20  # minimum elements of the widest product for measuring the layout of weights

_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")

Run = Callable[[], object]
Runs = Mapping[str, tuple[Run, Run]]
_RECORD = msgspec.json.Decoder(dict[str, tuple[float, float]])


@dataclass(frozen=True)
class CandidateSpeeds:
    """Best seconds of each candidate in two cases. The first candidate is the default."""

    cases: tuple[str, str]  # names of the two cases in messages
    seconds: Mapping[str, tuple[float, float]]

    def __str__(self) -> str:
        parts = (
            f"{case} " + ", ".join(f"{name} {times[i] * 1000:.3g} ms" for name, times in self.seconds.items())
            for i, case in enumerate(self.cases)
        )
        return "; ".join(parts)

    @property
    def best(self) -> str:
        """Return a candidate WORTH times as fast in the first case and no slower in the second; else the default."""
        default, *others = self.seconds
        fit = [n for n in others if self.gain(n, 0) >= WORTH and self.gain(n, 1) * NO_SLOWER >= 1]
        return max(fit, key=lambda name: self.gain(name, 0), default=default)

    def best_in(self, case: int) -> str:
        """Return a candidate WORTH times as fast as the default in this case, ignoring the other; else the default."""
        default = next(iter(self.seconds))
        fastest = max(self.seconds, key=lambda name: self.gain(name, case))
        return fastest if self.gain(fastest, case) >= WORTH else default

    def gain(self, name: str, case: int) -> float:
        """Return the speed-up over the default."""
        return next(iter(self.seconds.values()))[case] / self.seconds[name][case]


def cpu_dtype(spec: ModelSpec, stated: torch.dtype) -> torch.dtype:
    """Return bf16 for weights saved in bf16 if this CPU multiplies it faster; otherwise fp32, which rounds nothing.
    CPUs without native bf16 take several times as long as in fp32."""
    faster = stated == torch.bfloat16 and product_speeds(spec).best == "bfloat16"
    return torch.bfloat16 if faster else torch.float32


def product_speeds(spec: ModelSpec) -> CandidateSpeeds:
    """Measure products with the model's widest weights in fp32 and bf16."""

    def candidates() -> Runs:
        return {_name(dtype): _rows(Linear, *_widest(spec, dtype), 1) for dtype in (torch.float32, torch.bfloat16)}

    return _kept("products", (f"{ROWS} rows", "one row"), ("float32", "bfloat16"), _width(spec), candidates)


def layout_speeds(spec: ModelSpec, dtype: torch.dtype) -> CandidateSpeeds:
    """Measure the products of `product_speeds` with weights in oneDNN's layout and in the file's layout."""

    def candidates() -> Runs:
        weight, x = _widest(spec, dtype)
        return {n: _rows(partial(Linear, pack=n == "packed"), weight, x, STEADY_ROWS) for n in ("packed", "plain")}

    cases = (f"{ROWS} rows", f"{STEADY_ROWS} rows")
    return _kept("layouts", cases, ("packed", "plain"), (*_width(spec), dtype), candidates)


def int8_speeds(spec: ModelSpec, dtype: torch.dtype) -> CandidateSpeeds:
    """Measure the same products with int8 weights. Few rows, as in decoding, read their weights from memory."""

    def candidates() -> Runs:
        weight, x = _widest(spec, dtype)
        return {
            n: _rows(make, weight, x, STEADY_ROWS, COLD) for n, make in ((_name(dtype), Linear), ("int8", Int8Linear))
        }

    shape = *_width(spec), dtype, compiled.ABI
    return _kept("int8", ("prefill", "decode"), (_name(dtype), "int8"), shape, candidates)


def weight_layout(spec: ModelSpec, dtype: torch.dtype) -> str:
    """Return the layout of weights in a dtype: "packed" or "plain"."""
    if dtype not in (torch.float32, torch.bfloat16) or spec.hidden_size * spec.intermediate_size < LEAST_WEIGHTS:
        return "packed"
    return layout_speeds(spec, dtype).best


def why_int8_does_not_pay(spec: ModelSpec, dtype: torch.dtype) -> str | None:
    """Return a message for users if int8 weights gain nothing on this machine in decoding or in prefill; else None."""
    speeds = int8_speeds(spec, dtype)
    vain = [case for i, case in enumerate(speeds.cases) if speeds.best_in(i) != "int8"]
    if not vain:
        return None
    gains = " and ".join(f"{speeds.gain('int8', i):.2f} times as fast in {case}" for i, case in enumerate(speeds.cases))
    return (
        f"--weight-dtype int8 is not faster for {' and '.join(vain)} on this machine: its products are {gains} as those in "
        f"{_name(dtype)} (measured once). Without it the model also loads sooner"
    )


def describe(spec: ModelSpec, dtype: torch.dtype, weight_dtype: str) -> dict[str, str]:
    """Return the times (measured now if necessary) and the choices."""
    products = product_speeds(spec)
    found = {"products": f"{products}: {products.best} for weights saved in bfloat16"}
    if weight_dtype == "int8":
        speeds = int8_speeds(spec, dtype)
        gains = (
            f"{'pays' if speeds.best_in(i) == 'int8' else 'gains little'} in {case}"
            for i, case in enumerate(speeds.cases)
        )
        found["int8"] = f"{speeds}: {', '.join(gains)}"
    elif spec.hidden_size * spec.intermediate_size >= LEAST_WEIGHTS:
        layouts = layout_speeds(spec, dtype)
        found["weights"] = f"{layouts}: {layouts.best}"
    return found


def cpu_name() -> str:
    return next((s.split(":")[1].strip() for s in _cpu_info() if s.startswith("model name")), platform.machine())


def cpu_features() -> list[str | None]:
    """Return the CPU's instruction sets, and the user's limit for oneDNN."""
    flags = next((line for line in _cpu_info() if line.startswith(("flags", "Features"))), "")
    return [flags, *(os.environ.get(name) for name in _VARIABLES)]


@cache
def _cpu_info() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _kept(
    kind: str, cases: tuple[str, str], names: tuple[str, ...], shape: tuple[object, ...], candidates: Callable[[], Runs]
) -> CandidateSpeeds:
    """Return the stored record of this kind and shape, or measure and store it. The first process's record counts."""
    machine = cpu_name(), *cpu_features(), os.cpu_count(), torch.__version__
    path = user_cache.place(kind, FORMAT, *machine, *map(str, shape))
    if text := user_cache.recall(path):
        if (seconds := _read(text, names)) is not None:
            return CandidateSpeeds(cases, seconds)
        with suppress(OSError):
            path.unlink()
    measured = measure(candidates())
    kept = user_cache.settle(path, msgspec.json.encode(measured).decode())
    return CandidateSpeeds(cases, _read(kept, names) or measured)


def _read(text: str, names: tuple[str, ...]) -> dict[str, tuple[float, float]] | None:
    """Return the seconds of a record of these candidates; None for any other text."""
    try:
        seconds = _RECORD.decode(text)
    except msgspec.DecodeError:
        return None
    return seconds if tuple(seconds) == names and all(s > 0 for times in seconds.values() for s in times) else None


@torch.inference_mode()
def measure(candidates: Runs) -> dict[str, tuple[float, float]]:
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


def _rows(make: Callable[[Tensor], Product], weight: Tensor, x: Tensor, few: int, count: int = 1) -> tuple[Run, Run]:
    """Return runs of a product with all rows, and of `count` products (each with its own copy of the weights) with few
    rows."""
    products = [make(weight) for _ in range(count)]
    return lambda: products[0](x), lambda: [product(x[:few]) for product in products]


def _widest(spec: ModelSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return random weights of the widest product, and its input of ROWS rows."""
    inputs, outputs = _width(spec)
    weight = torch.empty(outputs, inputs).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    return weight.to(dtype), torch.ones(ROWS, inputs, dtype=dtype)


def _width(spec: ModelSpec) -> tuple[int, int]:
    """Return inputs and outputs of the widest product, limited to MOST_WEIGHTS weights."""
    inputs = spec.hidden_size
    return inputs, max(1, min(2 * spec.intermediate_size, MOST_WEIGHTS // inputs))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
