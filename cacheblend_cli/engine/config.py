"""Settings of an engine. Imports no torch: wrong values are reported before it is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cacheblend_cli.errors import UsageError, check_known
from cacheblend_cli.prompt.wording import check_prompt, parse_variables
from cacheblend_cli.settings.fields import check_kv_dtype

POOL_DTYPES = ("auto", "float8_e4m3")
MOST_HOST = 1 << 20  # GiB: a petabyte
_DEVICES = "known: auto, cpu, cuda, cuda:N, mps"
_DEVICE = re.compile(r"auto|cpu(:0)?|cuda(:\d{1,4})?|mps(:0)?")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine, which its requests share."""

    model: str | None = None  # directory, GGUF file, hub id or name; None: smollm2 if installed, else handbook
    lora: str | None = None  # directory of a LoRA adapter to merge into the model
    device: str = "auto"
    dtype: str = "auto"  # see `Precision`, also for weight_dtype
    weight_dtype: str = "auto"
    attention_backend: str = "auto"
    block_size: int = 64
    threads: int | None = None  # CPU threads, None for torch's choice
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory to use, weights included
    swap_space: float = 4.0  # GiB of host memory for KV of preempted answers; KV beyond it is computed again
    host_cache: float | None = None  # GiB of host memory that keeps KV sent to a GPU; None: a share of what is free
    kv_dtype: str = "auto"  # codec of stored KV
    eager: bool = False  # decode without CUDA graphs
    kv_pool_dtype: str = "auto"  # of K and V while a question is answered, "auto" for the compute dtype
    prompt: str = ""  # user's message with {chunks} and {question}, "" for the model's own or the default
    system: str = ""  # system prompt
    template_var: tuple[str, ...] = ()  # NAME=VALUE for the chat template
    speculate: int | str = "auto"  # proposed tokens a step, off, or auto: on a CPU, as many as make it faster
    tensor_parallel: int = 0  # processes that share the model; 0: those that torchrun started, or one

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise UsageError(f"block size {self.block_size} is not a power of two", "64 fits every backend")
        check_kv_dtype(self.kv_dtype)
        if not _DEVICE.fullmatch(self.device):
            raise UsageError(f"unknown device {self.device!r}", _DEVICES)
        check_known("KV pool dtype", self.kv_pool_dtype, POOL_DTYPES)
        known = self.speculate in ("auto", "off") or (isinstance(self.speculate, int) and self.speculate > 0)
        if not known:
            raise UsageError(f"unknown --speculate {self.speculate!r}", "known: auto, off, or a number of tokens")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UsageError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization:g} is not a share above 0 and up to 1",
                "0.9 leaves a tenth of the GPU's memory free",
            )
        _check_host("swap-space", self.swap_space, "4 is the default, 0 turns swapping off")
        _check_host(
            "host-cache", self.host_cache or 0.0, "a quarter of the free memory is the default, 0 keeps nothing"
        )
        parse_variables(self.template_var)
        if self.prompt:
            check_prompt(self.prompt)


def _check_host(flag: str, size: float, hint: str) -> None:
    if not 0 <= size < MOST_HOST:
        raise UsageError(f"--{flag} {size:g} is not a number of GiB from 0 to {MOST_HOST:,}", hint)
