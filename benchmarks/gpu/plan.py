"""The plan of `gpu_check.py`: its parts, most valuable first, and their seconds. README.md has the same table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One or several processes that run a list of cases (`steps.py`)."""

    name: str
    seconds: float  # share of --minutes
    what: str
    processes: int = 1
    call: int = 1  # on which the part has its time; the parts of the second also get what the first has left


PLAN = (
    Part("ceilings", 20, "copy, bf16 product, host to device"),
    Part(
        "llama-3.1-8b",
        130,
        "full prefill, `query` .15 with the default codec, `hkvd` .15, both uncorrected, both with their KV in the pool, "
        "transformers; loading, decoding at batch 1, 8 and 32, first token, GPU busy share; longer prompts if time is left",
    ),
    Part("kernel checks", 60, "every kernel against fp64", processes=8),
    Part("llama-3.2-1b", 50, "the same for a small model"),
    Part(
        "kernel speeds",
        110,
        "attention and decode against their ceilings and SDPA, then peaks and correction, loading and the cache write",
    ),
    Part("families", 45, "small models of every family beside transformers in float64", processes=8, call=2),
    Part(
        "qwen3.5-0.8b",
        45,
        "a hybrid: full prefill, restored documents, transformers, decoding; its numbers beside transformers'",
        call=2,
    ),
    Part("command line", 40, "`precompute` and `ask` of the handbook model; the answers equal the CPU's", call=2),
)
CALLS = (1, 2)
PREPARATION_S = 100.0  # a machine's start and the transfer, before each call
AGAIN_S = 40.0  # of the second call, for what failed in the first
CLOSING_S = 5.0  # of each call: ending the last processes and writing the report
QUIET_S = 18.0  # a case that writes nothing for this long hangs; with ending the process, 20 s
SLOW_STARTS = {"start": 60.0, "model": 60.0, "precompute": 45.0, "transformers": 45.0, "command": 60.0}
"""Limits of what may write nothing for longer: imports and the CUDA context; weights, memory and warm-up; storing the
chunks' KV; transformers' import; a command. What they took is measured."""


def part_of(name: str) -> Part:
    return next(part for part in PLAN if part.name == name)


def minutes_of(call: int) -> float:
    """Return the minutes of a call's parts, of what is repeated, and of its end."""
    seconds = sum(part.seconds for part in PLAN if part.call == call) + AGAIN_S * (call > 1)
    return round((seconds + CLOSING_S) / 60, 2)


def weights(parts: Sequence[Part], again: bool) -> list[float]:
    """Return the seconds of each part. again: the cases to repeat have AGAIN_S together."""
    repeated = sum(part.seconds for part in parts if part.call == 1)
    return [part.seconds * AGAIN_S / repeated if again and part.call == 1 else part.seconds for part in parts]
