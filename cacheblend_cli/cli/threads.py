"""How long a thread of OpenMP's spins at a barrier before it sleeps. Imports nothing heavy: it comes before torch."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPIN_COUNT = "1000"
"""Of libgomp, whose own is some 300,000: beside busy programs a thread that spins takes the core from the one it waits for
(benchmarks/results/busy.md)."""


def spin_shortly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set a short spin, where the user has set none of the variables. libgomp reads it when it is loaded, with torch."""
    if not any(name in environment for name in VARIABLES):
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT
