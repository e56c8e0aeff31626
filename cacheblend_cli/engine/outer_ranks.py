"""Ranks started by torchrun. Imports no torch: commands check this first."""

from __future__ import annotations

import os
from collections.abc import Mapping

from cacheblend_cli.errors import UsageError

# Set by torchrun, and by other launchers, which may start processes for another purpose.
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = "TORCHELASTIC_RUN_ID"  # of torchrun alone


def outer_ranks(tensor_parallel: int, environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return (rank, number of ranks) if torchrun started this process, or if another launcher that sets VARIABLES
    started `tensor_parallel` processes; else None. tensor_parallel: the setting; 1: one process, 0: not set. Raises
    UsageError if RANK or WORLD_SIZE is not a number."""
    if tensor_parallel == 1 or not all(environment.get(name, "").strip() for name in VARIABLES):
        return None
    size = environment["WORLD_SIZE"].strip()
    if size == "1" or not (environment.get(TORCHRUN) or size == str(tensor_parallel)):
        return None
    try:
        return int(environment["RANK"]), int(size)
    except ValueError as error:
        raise UsageError(
            f"RANK and WORLD_SIZE are not numbers: {error}", "unset them, or let torchrun set them"
        ) from error


def num_ranks(tensor_parallel: int) -> int:
    """Return the number of ranks of a model. Raises UsageError if torchrun started a different number."""
    outer = outer_ranks(tensor_parallel)
    if outer is None:
        return max(1, tensor_parallel)
    if tensor_parallel not in (0, outer[1]):
        raise UsageError(
            f"torchrun started {outer[1]} ranks, but --tensor-parallel is {tensor_parallel}",
            "omit one of them",
        )
    return outer[1]
