"""Host time of each launch of a layer, on a machine without a GPU: everything up to the call of CUDA's driver.

    python benchmarks/gpu/host.py

Kernels are launched on CPU tensors by the backend and by Triton's launcher, whose compiled function does nothing.
Writes benchmarks/results/gpu_host.json, which `cost.py` reads.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_host.json"
sys.path[:0] = [str(ROOT / part) for part in ("", "benchmarks", "kernels", "store", "documents", "tests/support")]
REPEATS = 300
ROWS, KNOWN, LENGTH, CHUNKS = 64, 640, 4096, 8


class Compiled:
    """A compiled kernel that is not run."""

    function, packed_metadata = 0, (4, 1, 0, 0)

    def launch_metadata(self, *arguments: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        return None


class Driver:
    """A GPU of which only the architecture is known."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, 32)


def prepare() -> None:
    from cacheblend_kernels.triton_backend import backend, checks
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def compiled(self: Any, key: Any, signature: Any, device: int, *more: Any) -> Compiled:
        return self.device_caches[device][0].setdefault(key, Compiled())  # type: ignore[no-any-return]

    backend.interpreted = checks.interpreted = lambda: True  # CPU tensors are taken
    checks._INTERPRETER = contextlib.nullcontext()  # type: ignore[assignment]
    driver._active = Driver(90)  # type: ignore[attr-defined]
    JITFunction._do_compile = compiled  # type: ignore[method-assign]


def calls() -> dict[str, Callable[[], object]]:
    """Return the launches of a layer in the shape of an 8B."""
    from cacheblend_kernels import AttentionMetadata, AttentionParams, LayerCache, Regressed, RegressionPrior, Slots
    from cacheblend_kernels.triton_backend.backend import TritonBackend

    backend = TritonBackend(torch.device("cpu"), arch=90, num_sms=132)
    bf16 = partial(torch.zeros, dtype=torch.bfloat16)
    int32 = partial(torch.zeros, dtype=torch.int32)
    cache = LayerCache(bf16(LENGTH // 64, 64, 8, 128), bf16(LENGTH // 64, 64, 8, 128))
    q, k, v = bf16(ROWS, 48, 128).split((32, 8, 8), 1)
    meta = AttentionMetadata(
        torch.arange(LENGTH - ROWS, LENGTH), int32(2), int32(1, LENGTH // 64), int32(1), LENGTH, (-1,)
    )
    params, peaks = AttentionParams(128**-0.5), torch.zeros(LENGTH)
    slots = Slots(torch.arange(ROWS), *torch.zeros(2, ROWS, 128))
    x, weight, gate_up = bf16(ROWS, 4096), bf16(4096), bf16(ROWS, 2 * 14336)
    fresh = bf16(LENGTH, 8, 128)
    rows = Regressed(
        torch.arange(LENGTH), int32(CHUNKS + 1), int32(KNOWN), int32(CHUNKS + 1), torch.zeros(CHUNKS, KNOWN), 512
    )
    prior, rotation = RegressionPrior(2.0, 0.3, (8.0, 30.0), 0.5, 0.1, 0.8), tuple(torch.zeros(2, LENGTH, 128))
    return {
        "prefill_attention": lambda: backend.prefill_attention(q, cache, meta, params),
        "rope_and_cache": lambda: backend.rope_and_cache(q, k, v, cache, slots),
        "add_rms_norm": lambda: backend.add_rms_norm(x, x, weight, 1e-5),
        "act_and_mul": lambda: backend.act_and_mul(gate_up, "silu"),
        "attention_peaks": lambda: backend.attention_peaks(q, meta.positions, cache, meta, params, peaks),
        "correct_stale": lambda: backend.correct_stale(
            fresh[:KNOWN], fresh[:KNOWN], cache, rows, rotation, prior, False
        ),
    }


def microseconds(call: Callable[[], object]) -> float:
    """Return the least CPU time of one call."""
    call()
    best = float("inf")
    for _ in range(REPEATS):
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return best * 1e6


def main() -> None:
    import triton
    from machine import hardware

    torch.set_num_threads(1)
    prepare()
    mm = torch.mm
    torch.mm = lambda a, b: mm(a[:1, :1], b[:1, :1]).expand(len(a), b.shape[1])  # type: ignore[assignment]
    with torch.inference_mode():
        found = {name: round(microseconds(call), 1) for name, call in calls().items()}
    result = {"hardware": hardware(), "triton": triton.__version__, "torch": torch.__version__, "microseconds": found}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
