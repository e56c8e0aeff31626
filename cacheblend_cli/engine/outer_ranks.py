"""Ranks that torchrun started. Imports no torch: every command looks here."""

from __future__ import annotations

import os
from collections.abc import Mapping

from cacheblend_cli.errors import UsageError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of torchrun


def outer_ranks(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """This process's rank and the number of ranks where torchrun, or whoever sets its variables, has started it; None elsewhere."""
    if not all(environment.get(name, "").strip() for name in VARIABLES) or environment["WORLD_SIZE"] == "1":
        return None
    try:
        return int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except ValueError as error:
        raise UsageError(
            f"RANK and WORLD_SIZE are not numbers: {error}", "unset them, or let torchrun set them"
        ) from error


def num_ranks(asked: int) -> int:
    """Ranks of --tensor-parallel `asked` here. Raises UsageError where torchrun has started another number of them."""
    outer = outer_ranks()
    if outer is not None and asked not in (1, outer[1]):
        raise UsageError(
            f"torchrun has started {outer[1]} ranks, and --tensor-parallel is {asked}", "leave one of them out"
        )
    return asked if outer is None else outer[1]
