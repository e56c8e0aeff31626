"""Fill a Triton cache for a GPU's architecture on a machine without one:

    TRITON_CACHE_DIR=/tmp/cache python tools/gpu_kernels.py [--arch 90] [--part 0/2] [--used FILE]

Kernels are launched on CPU tensors by the kernel checks and by the engine's warm-up for each model of the plan. They
and Triton's C launchers are compiled for a driver that knows only the architecture, and not run.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
import triton
from cacheblend_kernels.triton_backend import backend as triton_backend
from cacheblend_kernels.triton_backend import checks
from cacheblend_kernels.triton_backend.backend import TritonBackend
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build, driver
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import JITFunction

CPU = torch.device("cpu")
NUM_SMS = 132  # of an H100 and an H200
MODELS = ("llama-3.1-8b", "llama-3.2-1b", "handbook")
HYBRID = "qwen3.5-0.8b"
ROOM = 4  # blocks of the pool that a warm-up takes
LAYERS, VOCABULARY = 2, 512  # of the models that are launched: no kernel depends on them


class Driver:
    """A GPU of which only the architecture is known."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self._arch, 32)


class UsedCache(FileCacheManager):
    """A cache that knows which of its folders were used."""

    used: ClassVar[set[str]] = set()

    def __init__(self, key: str, *args: Any, **options: Any) -> None:
        super().__init__(key, *args, **options)
        self.used.add(key)


@contextlib.contextmanager
def compiling(arch: int, folder: Path) -> Iterator[None]:
    """Compile launches on CPU tensors instead of running them. folder: for temporary files."""
    run = JITFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        build_launcher(kernel)
        return kernel

    replaced = [
        *((module, "interpreted", lambda: True) for module in (triton_backend, checks)),  # CPU tensors are taken
        (checks, "_INTERPRETER", contextlib.nullcontext()),  # compile in several threads
        (JITFunction, "run", launch),
        (driver, "_active", Driver(arch)),
        (build, "_load_module_from_path", lambda name, path: Unloaded()),  # loading needs a GPU's driver
        (triton.knobs.nvidia, "libcuda_path", libcuda_stub(folder)),
        (triton.knobs.cache, "manager_class", UsedCache),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


class Unloaded:
    """A C module that is built and not loaded."""

    def __getattr__(self, name: str) -> None:
        return None


def build_launcher(kernel: Any) -> None:
    """Build the C launcher of a kernel's signature, where Triton has one, and its module for the CUDA driver."""
    if hasattr(nvidia, "make_launcher"):
        nvidia.CudaUtils()
        nvidia.CudaLauncher(kernel.src, kernel.metadata)


def libcuda_stub(folder: Path) -> str:
    """Return a folder with an empty libcuda.so.1, which launchers are linked to."""
    command = ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True)
    return str(folder)


def works(arch: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield every kernel check, and every model's warm-up."""
    from gpu import checks as kernel_checks
    from gpu.families import settings_of

    backend = TritonBackend(CPU, arch=arch, num_sms=NUM_SMS)
    for name in MODELS:
        yield name, lambda name=name: warm_up_model(name, backend)
    yield HYBRID, lambda: warm_up_hybrid(backend)
    for model, attention_backend in settings_of(torch.device("cuda")):
        if attention_backend == "triton":
            yield model.name, lambda model=model: warm_up_family(model, backend)
    kernel_checks._backends = lambda device: [backend]
    kernel_checks.attention_reference = lambda inputs, params: inputs.q
    kernel_checks.row_error = lambda got, want: 0.0
    for name, check in kernel_checks.checks_of(CPU, tiny=False):
        yield name, lambda name=name, check=check: raise_failed(name, check())


def raise_failed(name: str, row: dict[str, Any]) -> None:
    if not row["ok"]:
        raise RuntimeError(f"{name}: {row['message']}")


def warm_up_model(name: str, backend: TritonBackend) -> None:
    """Launch what the engine's warm-up launches for a model with few layers and a small vocabulary."""
    from gpu.model import random_model, read_config

    from cacheblend_cli.engine.worker.memory import warm_up
    from cacheblend_cli.kv.pool import KVPool

    config = {**read_config(name), "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    decoder = random_model(name, config, CPU, torch.bfloat16, backend).decoder
    spec, pool = decoder.spec, KVPool.of(decoder, ROOM, 64)
    warm_up(decoder, pool)
    q = torch.zeros(1, spec.num_heads, spec.head_dim, dtype=torch.bfloat16)
    backend.warm_up(q, pool.layers[0], decoder.layers[0].attention, spec.max_context)


def warm_up_family(model: Any, backend: TritonBackend) -> None:
    """Launch what the engine's warm-up launches for a small model (`hub_models.HubModel`)."""
    with tempfile.TemporaryDirectory() as folder:
        model.write(Path(folder) / "model")
        warm_up_checkpoint(Path(folder) / "model", backend, "float32", block_size=16)


def warm_up_hybrid(backend: TritonBackend) -> None:
    """Launch what the engine's warm-up launches for HYBRID's heads: its kernels depend on nothing else."""
    from gpu.hybrid import NARROW, write_random

    with tempfile.TemporaryDirectory() as folder:
        write_random(Path(folder) / "model", HYBRID, NARROW, CPU, torch.bfloat16)
        warm_up_checkpoint(Path(folder) / "model", backend, "bfloat16", block_size=64)


def warm_up_checkpoint(path: Path, backend: TritonBackend, dtype: str, block_size: int) -> None:
    from cacheblend_cli.engine.worker.memory import warm_up
    from cacheblend_cli.kv.pool import KVPool
    from cacheblend_cli.model import loading
    from cacheblend_cli.model.description import Precision

    select, loading._kernels = loading._kernels, lambda *_: backend
    try:
        decoder = loading.load_model(path, path.name, CPU, Precision(dtype), "triton").decoder
    finally:
        loading._kernels = select
    pool = KVPool.of(decoder, max(ROOM, 256 // block_size), block_size)
    warm_up(decoder, pool)
    for layer, cache in zip(decoder.layers, pool.layers, strict=True):
        q = torch.zeros(1, decoder.spec.num_heads, cache.k.shape[-1], dtype=decoder.dtype)
        backend.warm_up(q, cache, layer.attention, decoder.spec.max_context)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--part", default="0/1", help="share of the work, for several processes")
    parser.add_argument("--used", type=Path, help="file for the names of the cache's folders that were used")
    arguments = parser.parse_args()
    number, count = map(int, arguments.part.split("/"))
    failed = 0
    with tempfile.TemporaryDirectory() as folder, compiling(arguments.arch, Path(folder)):
        for name, work in islice(works(arguments.arch), number, None, count):
            try:
                work()
            except Exception as error:
                failed += 1
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    if arguments.used is not None:
        arguments.used.write_text("\n".join(sorted(UsedCache.used)), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
