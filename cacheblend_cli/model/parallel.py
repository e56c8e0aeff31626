"""The part of a model that a rank computes, and its exchanges with other ranks. Here: all of it, and no exchange.

`rank_shard.RankShard` and `ranks.Ranks` have the same methods for tensor parallelism. They import torch.distributed and
are loaded with several ranks only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.tensor_source import TensorSource

if TYPE_CHECKING:
    from cacheblend_cli.model.adapter import Delta


class OneRank:
    """A rank without others: every exchange returns what it is given."""

    rank, size = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        return x

    def largest(self, x: Tensor) -> Tensor:
        """Return the maximum over the ranks."""
        return x

    def of_first(self, index: Tensor) -> Tensor:
        """Return rank 0's index, [n] int64."""
        return index

    def share(self, x: Tensor) -> None:
        """Overwrite x with rank 0's x."""

    @contextmanager
    def telling(self, message: msgspec.Struct) -> Iterator[None]:
        """Run a computation that the message requests of the other ranks."""
        yield


class Shard:
    """The part of a model on this rank. whole: the model's spec; own: the spec of the rank's part. is_whole: whether
    this rank computes the whole model."""

    is_whole = True
    ranks: OneRank

    def __init__(self, spec: ModelSpec) -> None:
        self.whole = self.own = spec
        self.ranks = OneRank()

    @property
    def vocabulary(self) -> tuple[int, int]:
        """Token ids whose embedding and logits are on this rank: (first, end)."""
        return 0, self.whole.vocab_size

    def gathered_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of all ranks, [n, vocab_size]. logits: this rank's, [n, own vocabulary]."""
        return logits

    def sum_of_kv(self, x: Tensor, layer: int) -> Tensor:
        """Sum over all KV heads of a layer. x: sum over this rank's KV heads; a head on several ranks counts once."""
        return x

    def first_head(self, layer: int) -> int:
        """Return the first of this rank's KV heads."""
        return 0

    def own_heads(self, x: Tensor, layer: int) -> Tensor:
        """Return this rank's KV heads. x: all KV heads, [n, num_kv_heads, ...] or [num_kv_heads]."""
        return x

    def all_heads(self, x: Tensor, layer: int) -> Tensor:
        """Return all KV heads, [n, num_kv_heads, head_dim]. x: this rank's, [n, own KV heads, head_dim]."""
        return x

    def tensors(self, source: TensorSource) -> TensorSource:
        """Return this rank's part of a checkpoint."""
        return source

    def deltas(self, deltas: dict[str, Delta]) -> dict[str, Delta]:
        """Return this rank's part of an adapter's updates, by name in the checkpoint."""
        return deltas
