"""Scales of a float8 KV pool."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class KVScales:
    """k, v: for each layer [num_kv_heads] fp32. The pool holds float8_e4m3fn codes: K (rotated) and V divided by them."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
