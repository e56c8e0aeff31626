"""The plan of `gpu_check.py`: its parts, most valuable first, and their seconds. README.md has the same table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One or several processes that run the cases of a module of this package (`steps.py`)."""

    name: str
    module: str
    seconds: float  # share of --minutes
    what: str
    processes: int = 1


PLAN = (
    Part("ceilings", "ceilings", 20, "copy, bf16 product, host to device"),
    Part(
        "llama-3.1-8b",
        "end_to_end",
        200,
        "full prefill, `query` .15 with the default codec, `hkvd` .15, both uncorrected, both with their KV in the pool, "
        "`query` without the host cache and without graphs, transformers; kernels by name, gaps and stamps of the host; loading by threads; decoding "
        "at batch 1, 8 and 32, first token; longer prompts",
    ),
    Part("kernel checks", "checks", 60, "every kernel against fp64", processes=8),
    Part("llama-3.2-1b", "end_to_end", 60, "the same for a small model"),
    Part(
        "kernel speeds",
        "speeds",
        90,
        "attention against its ceilings, decoding and loading against the memory's, variants of the correction",
    ),
    Part("families", "families", 45, "small models of every family beside transformers in float64", processes=8),
    Part(
        "qwen3.5-0.8b",
        "hybrid",
        45,
        "a hybrid: full prefill, restored documents, transformers, decoding; its numbers beside transformers'",
    ),
    Part(
        "command line", "command_line", 40, "`precompute` and `ask` of the handbook model; the answers equal the CPU's"
    ),
)
CLOSING_S = 5.0  # ending the last processes and writing the report
QUIET_S = 18.0  # a case that writes nothing for this long hangs; with ending the process, 20 s
SLOW_STARTS = {"start": 60.0, "model": 60.0, "precompute": 45.0, "transformers": 45.0, "command": 60.0}
"""Limits of what may write nothing for longer: imports and the CUDA context; weights, memory and warm-up; storing the
chunks' KV; transformers' import; a command."""
MINUTES = round((sum(part.seconds for part in PLAN) + CLOSING_S) / 60, 2)
LARGE = "llama-3.1-8b"  # the model that is measured completely
