"""Memory, cores and speed of this machine, for `cacheblend init`."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median

from cacheblend_cli.model.host_memory import total_memory

_SECONDS = 0.5
_MOST_BYTES = 512 << 20  # beyond the caches, as a model's weights are
_ROWS_A_THREAD, _WIDTH, _KIND = 512, 2048, "Q4_K"  # of a matrix


@dataclass(frozen=True)
class Machine:
    """Memory, CPU cores and speed of a machine."""

    memory_bytes: int  # host memory
    cores: int  # usable CPU cores
    gpu_bytes: int = 0  # memory of the largest GPU, 0 without one
    bytes_per_s: float = 0.0  # quantised weights that the CPU multiplies for a token; 0 if not measured


def detect() -> Machine:
    """Read memory (a container's limit included), cores and GPU memory of this machine, and measure the CPU's products
    if there is no GPU: about 3 s, most of which are torch's import."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_bytes, gpu_bytes = total_memory(), _gpu_bytes()
    return Machine(
        memory_bytes, cores, gpu_bytes, 0.0 if gpu_bytes else _bytes_per_s(min(_MOST_BYTES, memory_bytes // 8))
    )


def _gpu_bytes() -> int:
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    import torch

    if not torch.cuda.is_available():
        return 0
    return max(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))


def _bytes_per_s(room: int) -> float:
    """Return the bytes of weights that a decode step multiplies in a second, measured over matrices in about `room`
    bytes; 0 without compiled products. Each thread multiplies its own matrices, and the median product counts, so that
    other programs that run change little."""
    import torch
    from cacheblend_kernels import RowTable, compiled
    from cacheblend_kernels.row_table import BLOCKS, NUMBERS

    if not compiled.multiplies(torch.float32):
        return 0.0
    kind, num_threads = NUMBERS[_KIND], torch.get_num_threads()
    _, block_bytes, values = BLOCKS[kind]
    row_bytes = _WIDTH // values * block_bytes
    num_rows = max(1, min(_ROWS_A_THREAD * num_threads, room // num_threads // row_bytes))
    memory = mmap.mmap(-1, max(num_threads, room // (num_rows * row_bytes)) * num_rows * row_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, 0x11, len(memory))  # unwritten pages would all be the same page of zeros
    starts = range(address, address + len(memory), num_rows * row_bytes)
    matrices = [RowTable.stored(kind, (num_rows, _WIDTH), start, memory) for start in starts]
    end = time.perf_counter() + _SECONDS

    def seconds_of(thread: int) -> list[float]:
        x, seconds = torch.ones(1, _WIDTH), list[float]()
        for matrix in cycle(matrices[thread::num_threads]):
            begin = time.perf_counter()
            compiled.decode_product(x, matrix)
            seconds.append(time.perf_counter() - begin)
            if begin > end:
                break
        return seconds

    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num_threads) as pool:
            measured = [seconds for of_thread in pool.map(seconds_of, range(num_threads)) for seconds in of_thread]
    finally:
        torch.set_num_threads(num_threads)
    return num_threads * num_rows * row_bytes / median(measured)
