"""KV of a prefilled prompt in the layout of other engines: K rotated, channels of a head in the checkpoint's order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.weights import head_order


@dataclass(frozen=True)
class LayerKV:
    """KV of a layer at positions start to start + n. The tensors may be the pool's memory: copy them to outlive the
    sequence."""

    start: int
    k: Tensor  # rotated, [n, num_kv_heads, head_dim]
    v: Tensor  # [n, num_kv_heads, head_dim]
    window: int | None = None  # positions that the layer's attention covers; None: all


@dataclass(frozen=True)
class KVReader:
    """KV of positions 0 to num_tokens, layer by layer, valid while the sequence holds its blocks. Iterates over the
    layers."""

    decoder: Decoder
    sequence: PagedSequence
    num_tokens: int
    # [head_dim] int64, index of each of the checkpoint's head channels among ours; None: the same order
    order: Tensor | None
    # per layer, extra rotation of the other engine's RoPE: radians per position, fp32 [head_dim]; None: no difference
    further: Sequence[Tensor | None] = ()

    @property
    def num_layers(self) -> int:
        """Number of layers with K and V of their own, which come first."""
        return self.decoder.spec.num_kv_layers

    @property
    def start(self) -> int:
        """First position whose KV is held. Above 0 if every layer has a window and the sequence has outgrown it."""
        return min(self.sequence.num_freed_blocks * self.sequence.pool.block_size, self.num_tokens)

    def layer(self, index: int) -> LayerKV:
        """Read a layer in the decoder's dtype, on the pool's device. A float8 pool is dequantised."""
        pool, start = self.sequence.pool, self.start
        if start == 0:
            slots = self.sequence.slots_to(self.num_tokens)
        else:
            slots = self.sequence.slots(torch.arange(start, self.num_tokens, device=pool.device))
        k, v = pool.read(index, slots)
        if self.further and (further := self.further[index]) is not None:
            angles = torch.outer(torch.arange(start, self.num_tokens, dtype=torch.float32), further).to(pool.device)
            k = self.decoder.layers[index].kernels.rope(k, angles.cos(), angles.sin())
        if self.order is not None:
            k = k.index_select(-1, self.order)
        dtype = self.decoder.dtype
        return LayerKV(start, k.to(dtype), v.to(dtype), self.decoder.layers[index].attention.sliding_window)

    def __iter__(self) -> Iterator[LayerKV]:
        return (self.layer(index) for index in range(self.num_layers))


class Connector(Protocol):
    """Takes one prompt for an engine that continues it. One object a prompt."""

    def hand_over(self, token_ids: Sequence[int], kv: KVReader) -> None:
        """Copy the prompt's KV. Called once, in the engine's thread. token_ids: the whole prompt. kv: KV of all its
        positions, valid during the call. An error raised here fails the request."""
        ...


def check_exportable(spec: ModelSpec, to: str) -> None:
    """Raise UsageError for a model whose KV no connector can write. to: the receiving engine."""
    if spec.recurrent:
        raise UsageError(
            f"the KV of a {spec.architecture} cannot be handed to {to}: its recurrent layers have states in place of K and V",
            "let cacheblend decode",
        )
    if spec.latent is not None:
        raise UsageError(
            f"the KV of a {spec.architecture} cannot be handed to {to}: the layout of latents and position keys (MLA) differs between "
            "engines and releases",
            "let cacheblend decode",
        )


def export(decoder: Decoder, sequence: PagedSequence, num_tokens: int) -> KVReader:
    """Return a reader of the KV of the sequence's first num_tokens positions. Layers are copied when they are read."""
    order = head_order(decoder.spec)
    index = None if order is None else torch.tensor(order, device=sequence.pool.device).argsort()
    return KVReader(decoder, sequence, num_tokens, index)
