"""Hooks into transformers' attention: its AttentionInterface and its mask interface.

A model with the attention implementation NAME calls `_attention` with q and k as rotated by its layer. It gets its
masks from `_mask`, which creates no tensor but keeps the rule that hides keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAME = "cacheblend"


@dataclass(frozen=True)
class Projected:
    """Arguments of a layer's attention."""

    q: Tensor  # [num_rows, num_heads, head_dim]
    k: Tensor  # [num_rows, num_kv_heads, head_dim]
    v: Tensor  # [num_rows, num_kv_heads, head_dim of V]
    scale: float | None  # as in `AttentionParams`; None: head_dim ** -0.5
    soft_cap: float | None
    sinks: Tensor | None  # [num_heads]


@dataclass(frozen=True)
class KeyRule:
    """A rule instead of a mask: transformers' function of batch, head, query and key, true for visible keys."""

    sees: Callable[..., Tensor]

    def window(self, length: int) -> int | None:
        """Return the number of positions that a position sees, including itself, in `length` positions; None = all.
        Raises ValueError if keys are hidden by another rule."""
        last = length - 1
        count = int(self._seen(last, length).sum())
        window = None if count == length else count
        for query in {0, 1, count - 1, count, count + 1, length // 3, length // 2, last}:
            if 0 <= query < length:
                keys = torch.arange(length)
                expected = keys <= query
                if window is not None:
                    expected &= keys > query - window
                if not torch.equal(self._seen(query, length), expected):
                    raise ValueError(f"position {query} sees other keys")
        return window

    def _seen(self, query: int, length: int) -> Tensor:
        """Return [length] bool."""
        none = torch.tensor(0)
        return self.sees(none, none, torch.tensor(query), torch.arange(length)).expand(length)


class Stopped(Exception):
    """Raised to end a layer after its projections."""

    def __init__(self, projected: Projected) -> None:
        super().__init__()
        self.projected = projected


_given: ContextVar[Tensor | None] = ContextVar("attention's output of the layer that is running", default=None)


@contextmanager
def giving(attended: Tensor) -> Iterator[None]:
    """Give layers that run in the context this attention output, [num_rows, num_heads, head_dim], and let them
    continue. Without it they end with `Stopped`."""
    token = _given.set(attended)
    try:
        yield
    finally:
        _given.reset(token)


def register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **named: Any
) -> tuple[Tensor, None]:
    """query, key, value: [1, heads, num_rows, head_dim]. Layers are called without a mask."""
    if attention_mask is not None:
        raise ValueError("its layers choose themselves which keys they see")
    given = _given.get()
    if given is None:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        raise Stopped(Projected(q, k, v, named.get("scaling"), named.get("softcap"), named.get("s_aux")))
    return given[None].to(query.dtype), None


def _mask(*, mask_function: Callable[..., Tensor], **named: Any) -> KeyRule:
    return KeyRule(mask_function)
