"""Prefill variants that the study compares and the tool does not offer, for `Setting.prefill`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from research import MeanShift
from torch import Tensor

from cacheblend_cli.blend.corrections import CORRECTIONS, old_kv
from cacheblend_cli.engine.engine import Engine, Prefilled
from cacheblend_cli.evaluation.settings import Prefill
from cacheblend_cli.kv import forward
from cacheblend_cli.kv.rows import Rows
from cacheblend_cli.model.decoder import DecoderLayer

_attend = forward.attend


@contextmanager
def swapped(module: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a module for the time of a `with` block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def bottom_right(*args: Any, **kwargs: Any) -> Prefilled:
    """Prefill under the mask of the published code and LMCache: row i of s sees all but the last s - 1 - i keys,
    whatever its position, so a chosen token sees later text (CacheBlend issue 21, LMCache issue 1152)."""
    with swapped(forward, "attend", _attend_bottom_right):
        return Engine.hold_prefill(*args, **kwargs)


def _attend_bottom_right(layer: DecoderLayer, q: Tensor, rows: Rows) -> Tensor:
    num_rows, kv_len = len(rows), rows.attention.max_kv_len
    positions = torch.arange(kv_len - num_rows, kv_len, device=q.device)
    return _attend(layer, q, replace(rows, attention=replace(rows.attention, positions=positions)))


def scaled_keys(factor: float) -> Prefill:
    """Return a prefill that multiplies the keys that are not recomputed: APE's attention temperature (arXiv 2502.05431,
    section 4.2). For settings with the correction "mean-shift", which it replaces."""

    class ScaledKeys(MeanShift):
        def apply(self, layer: DecoderLayer, k: Tensor, v: Tensor) -> None:
            keys, values = old_kv(layer, self._stale)
            forward.write_kv(layer, keys * factor, values, self._stale)

    def run(*args: Any, **kwargs: Any) -> Prefilled:
        with patch.dict(CORRECTIONS, {"mean-shift": ScaledKeys}):
            return Engine.hold_prefill(*args, **kwargs)

    return run
