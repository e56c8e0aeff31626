"""Levels of the few-bit codecs: Lloyd-Max levels for the standard normal distribution. This module does not import
torch."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from statistics import NormalDist

BITS = {"int8": (8, 8), "int7": (7, 6), "int6": (7, 5), "int4": (5, 3), "int3": (3, 3)}
"""Codec -> (bits per value of K, bits per value of V). Attention is more sensitive to K. int8, int6 and int3 are codecs
of earlier versions, of which only the sizes of stored blobs are computed."""
_LATENT = {"int8": (8, 8), "int7": (7, 7), "int6": (6, 6), "int4": (4, 4), "int3": (3, 3)}
"""The same for latent attention. Its latents are stored as V, but they also act as keys."""
PLANES = {8: (8,), 7: (4, 2, 1), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1)}
"""Bits of a code -> bits of each plane that a row of codes is packed into, low bits first. A plane of p bits takes
ceil(dim * p / 8) bytes. Byte j holds the codes of channels j, j + num_bytes, j + 2 * num_bytes, ..., from the low bits
up."""
_STEPS = 1 << 12  # Lloyd iterations times number of levels: with many levels the initial guess is already close


def bits_of(codec: str, head_dim: int, v_head_dim: int = 0) -> tuple[int, int]:
    """Return (bits per value of K, bits per value of V). v_head_dim: 0 or head_dim, except for latent attention."""
    return (BITS if v_head_dim in (0, head_dim) else _LATENT)[codec]


def packed_bytes(dim: int, bits: int) -> int:
    """Return the bytes of a packed row of `dim` codes."""
    return sum(-(-dim * plane // 8) for plane in PLANES[bits])


@cache
def levels_of(bits: int) -> tuple[float, ...]:
    """Return the 2^bits levels in order: centroids of their intervals (Lloyd 1982, Max 1960), made symmetric."""
    normal, count = NormalDist(), 2**bits
    levels = [math.sqrt(3) * normal.inv_cdf((i + 0.5) / count) for i in range(count)]  # asymptotically optimal
    for _ in range(_STEPS // count):
        edges = [-math.inf, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
        levels = [
            (normal.pdf(low) - normal.pdf(high)) / (normal.cdf(high) - normal.cdf(low)) for low, high in pairwise(edges)
        ]
    return tuple((high - low) / 2 for low, high in zip(reversed(levels), levels, strict=True))
