"""Settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.collection import check_kv_dtype
from cacheblend_cli.prompt.wording import check_prompt, parse_variables

POOL_DTYPES = ("auto", "float8_e4m3")
MOST_SWAP = 1 << 20  # GiB: a petabyte
DECODERS = ("auto", "torch", "llama.cpp")


@dataclass(frozen=True)
class EngineConfig:
    """model: a directory, a GGUF file, a hub id, smollm2 or handbook; None for smollm2 where it is installed, else
    handbook. lora: the directory of a LoRA adapter to merge into it. dtype, weight_dtype: see `Precision`. threads: CPU
    threads, None for torch's own choice.

    gpu_memory_utilization: share of a GPU's memory to use, weights included. swap_space: GiB of host memory for KV of
    answers that were preempted; where it is full, their KV is computed again. eager: decode without CUDA graphs.
    kv_pool_dtype: what K and V are kept in while a question is answered, "auto" for the compute dtype. prompt: the
    user's message with {chunks} and {question}, "" for the model's own or the default; system: the system prompt, ""
    for none; template_var: NAME=VALUE for the chat template. decode_with: torch, llama.cpp, or auto for the faster of
    the two where both can; decode_model: the GGUF file that llama.cpp decodes with, "" for the model's own.
    weights_cache_gb: disk for packed weights of all models (model/packed_cache.py), 0 for none. tensor_parallel:
    processes that compute the model together, each a part of it (ranks); 0: those that torchrun started, or one."""

    model: str | None = None
    lora: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    weight_dtype: str = "auto"
    attention_backend: str = "auto"
    block_size: int = 64
    threads: int | None = None
    gpu_memory_utilization: float = 0.9
    swap_space: float = 4.0
    kv_dtype: str = "auto"
    eager: bool = False
    kv_pool_dtype: str = "auto"
    prompt: str = ""
    system: str = ""
    template_var: tuple[str, ...] = ()
    decode_with: str = "auto"
    decode_model: str = ""
    weights_cache_gb: float = 4.0
    tensor_parallel: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise UsageError(f"block size {self.block_size} is not a power of two", "64 fits every backend")
        check_kv_dtype(self.kv_dtype)
        if self.kv_pool_dtype not in POOL_DTYPES:
            raise UsageError(f"unknown KV pool dtype {self.kv_pool_dtype!r}", f"known: {', '.join(POOL_DTYPES)}")
        if self.decode_with not in DECODERS:
            raise UsageError(f"unknown --decode-with {self.decode_with!r}", f"known: {', '.join(DECODERS)}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UsageError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization:g} is not above 0 and at most 1",
                "0.9 leaves a tenth of the GPU's memory to others",
            )
        if not 0 <= self.swap_space < MOST_SWAP:
            raise UsageError(
                f"--swap-space {self.swap_space:g} is not a number of GiB from 0 on",
                "4 is the default; with 0 no KV is swapped out",
            )
        parse_variables(self.template_var)
        if self.prompt:
            check_prompt(self.prompt)
