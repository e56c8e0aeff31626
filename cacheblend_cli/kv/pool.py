"""The paged KV cache: a pool of blocks for each layer, and the sequences that hold blocks of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from cacheblend_kernels import LayerCache
from torch import Tensor
from torch.nn.functional import pad

from cacheblend_cli.errors import DeviceError
from cacheblend_cli.kv.block_allocator import BlockAllocator
from cacheblend_cli.kv.block_table import BlockSpace, BlockTable
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.kv_scales import KVScales
from cacheblend_cli.model.spec import ModelSpec

if TYPE_CHECKING:
    from cacheblend_cli.kv.block_states import BlockState, BlockStates
    from cacheblend_cli.model.states import StateLayout

    Swapped = tuple[list[Tensor], dict[int, BlockState]]


class KVPool(BlockSpace):
    """K and V of every layer, each [num_blocks, block_size, num_kv_heads, head_dim]. xformers requires block_size % 64
    = 0. With latent attention K is the position key and V the latent.

    With scales the pool is float8_e4m3fn, whatever dtype says. layers: one `LayerCache` per layer, as kernels take it;
    a layer that uses another layer's K and V has that layer's.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: KVScales | None = None,
        state_layout: StateLayout | None = None,
    ) -> None:
        dtype = dtype if scales is None else torch.float8_e4m3fn
        self.block_size, self.device = block_size, device
        self._is_latent = any(len(shape) > 2 for shape in spec.kv_shapes)
        self._own = _layer_caches(spec.kv_shapes, (num_blocks, block_size), dtype, device, scales)
        self.layers = [self._own[spec.kv_layer(layer)] for layer in range(spec.num_layers)]
        self.allocator = BlockAllocator(num_blocks)
        self.states: BlockStates | None = None  # of a hybrid's recurrent layers
        if state_layout is not None:
            from cacheblend_cli.kv.block_states import BlockStates

            self.states = BlockStates(block_size, state_layout, self.allocator)
        self.layer_graphs: Callable[..., bool] | None = None  # `LayerGraphs` of prefills over this pool

    @classmethod
    def of(cls, decoder: Decoder, num_blocks: int, block_size: int) -> KVPool:
        """Create a pool for answering, in the decoder's dtype, or float8 if the decoder has KV scales."""
        of = decoder.own_spec, num_blocks, block_size, decoder.dtype, decoder.device
        return cls(*of, decoder.kv_scales, decoder.state_layout)

    def read(self, layer: int, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return K (rotated) and V of slots [n] int64 at a layer, fp32 [n, num_kv_heads, head_dim]. A slice of an fp32
        pool returns views of the pool."""
        cache = self.layers[layer]
        return self.read_k(layer, slots), _values(cache.v, cache.v_scale, slots)

    def read_k(self, layer: int, slots: slice | Tensor) -> Tensor:
        """Return K as in `read`."""
        cache = self.layers[layer]
        return _values(cache.k, cache.k_scale, slots)

    def keys(self, layer: int, slots: slice | Tensor) -> Tensor:
        """Return the keys to multiply with `DecoderLayer.to_keys` of a query, fp32 [n, num_kv_heads, dim]: K (rotated);
        with latent attention the position key and the latent."""
        return torch.cat(self.read(layer, slots), -1) if self._is_latent else self.read_k(layer, slots)

    @property
    def tensors(self) -> list[Tensor]:
        """K and V of every layer that has its own."""
        return [t for cache in self._own for t in (cache.k, cache.v)]

    @property
    def raw(self) -> list[Tensor]:
        """Return `tensors`, with float8 viewed as bytes: not every operation supports float8."""
        return [t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in self.tensors]

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        src, dst = upload(source, self.device), upload(target, self.device)
        for held in self.raw:
            held.index_copy_(0, dst, held.index_select(0, src))
        if self.states is not None:
            self.states.copy(source, target)

    def swap_out(self, blocks: Sequence[int]) -> Swapped:
        """Return copies of the blocks on the host: K and V of every layer, each [num_blocks, block_size, num_kv_heads,
        head_dim], and the states there. They are queued on the compute stream, before later writes to the blocks."""
        index = upload(blocks, self.device)
        parts = [to_host(held.index_select(0, index)) for held in self.raw]
        return parts, {} if self.states is None else self.states.take_out(blocks)

    def swap_in(self, blocks: Sequence[int], swapped: Swapped) -> None:
        """Write swapped-out KV into the same number of blocks."""
        index = upload(blocks, self.device)
        for held, part in zip(self.raw, swapped[0], strict=True):
            held.index_copy_(0, index, part.to(self.device, non_blocking=True))
        if self.states is not None:
            self.states.put_back(blocks, swapped[1], self.device)

    def new_sequence(self, num_tokens: int) -> PagedSequence:
        """Return a sequence with room for num_tokens. Raises DeviceError, naming what fits, when the pool is too
        small."""
        self.check_fits(num_tokens)
        return PagedSequence(self, self.allocator.allocate(self.blocks_for(num_tokens)))

    def check_fits(self, num_tokens: int) -> None:
        """Raise DeviceError, naming what fits, if the pool has no room for num_tokens."""
        if self.blocks_for(num_tokens) > self.allocator.num_free:
            raise DeviceError(
                f"prompt and answer take {num_tokens} tokens of KV; the {self.allocator.num_free} free blocks on {self.device} "
                f"hold {self.allocator.num_free * self.block_size}",
                "ask with fewer chunks or a smaller --max-tokens, or raise --gpu-memory-utilization",
            )


def _layer_caches(
    shapes: Sequence[tuple[int, ...]],
    blocks: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    scales: KVScales | None,
) -> list[LayerCache]:
    """Allocate the pool of each layer. On a GPU, layers of one shape are evenly spaced in one allocation, so that one
    launch loads several. Elsewhere each layer has its own: malloc gives large ones back, and a prompt's pool would cost
    page faults."""
    if device.type != "cuda":
        of_scales = ((None,) * len(shapes),) * 2 if scales is None else (scales.k, scales.v)
        pools = (
            [torch.empty(*blocks, heads, dims[at], dtype=dtype, device=device) for heads, *dims in shapes]
            for at in (0, -1)
        )
        return [LayerCache(*parts) for parts in zip(*pools, *of_scales, strict=True)]
    caches = dict[int, LayerCache]()
    for shape in set(shapes):
        heads, *dims = shape
        layers = [layer for layer, other in enumerate(shapes) if other == shape]
        parts = [torch.empty(len(layers), *blocks, heads, dims[at], dtype=dtype, device=device) for at in (0, -1)]
        if scales is not None:  # rows of 16 bytes
            own = (torch.stack([of[layer] for layer in layers]) for of in (scales.k, scales.v))
            parts += [pad(stacked, (0, -heads % 4))[:, :heads] for stacked in own]
        caches |= {layer: LayerCache(*(part[at] for part in parts)) for at, layer in enumerate(layers)}
    return [caches[layer] for layer in range(len(shapes))]


def _values(held: Tensor, scale: Tensor | None, slots: slice | Tensor) -> Tensor:
    every = held.flatten(0, 1)
    rows = (every[slots] if isinstance(slots, slice) else every.index_select(0, slots)).float()
    return rows if scale is None else rows * scale[:, None]


def bytes_per_token(decoder: Decoder) -> float:
    """Return the bytes per token of a pool, all layers."""
    return decoder.own_spec.kv_bytes_per_token(decoder.dtype.itemsize if decoder.kv_scales is None else 1)


class PagedSequence(BlockTable):
    """A block table and its slots on the pool's device: position p is in slot blocks[p // block_size] * block_size + p
    % block_size."""

    def __init__(self, pool: KVPool, blocks: list[int], num_freed_blocks: int = 0) -> None:
        self.pool = pool
        super().__init__(pool, blocks, num_freed_blocks)

    def _changed(self) -> None:
        own = self.owned
        first = own[0] if own else 0
        adjacent = first >= self.num_freed_blocks and own == list(range(first, first + len(own)))
        self.contiguous_slot = (first - self.num_freed_blocks) * self.pool.block_size if adjacent else -1
        self._block_table: Tensor | None = None

    @property
    def block_table(self) -> Tensor:
        """Block table on the device, [num_blocks] int32."""
        if self._block_table is None:
            self._block_table = upload(self.blocks, self.pool.device, torch.int32)
        return self._block_table

    def slots(self, positions: Tensor) -> Tensor:
        """Return the slot mapping of positions [n] int64."""
        if self.contiguous_slot >= 0:
            return positions + self.contiguous_slot
        size = self.pool.block_size
        return self.block_table.long()[positions // size] * size + positions % size

    def slots_to(self, num_tokens: int) -> slice | Tensor:
        """Return the slots of positions 0:num_tokens: a slice, which copies nothing, if the blocks are adjacent."""
        first = self.contiguous_slot
        if first >= 0:
            return slice(first, first + num_tokens)
        return self.slots(torch.arange(num_tokens, device=self.pool.device))


class SequenceView(PagedSequence):
    """Non-owning view of blocks. The owner grows and frees them, and never shares a block that is written to."""

    def ensure(self, num_tokens: int) -> None:
        assert self.pool.blocks_for(num_tokens) <= len(self.blocks)

    def make_writable(self, start: int, end: int) -> None:
        return

    def give_back(self, count: int) -> None:
        return

    def release(self) -> None:
        return


def upload(values: Sequence[float] | Tensor, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return host values [n] as a tensor on `device`. On CUDA the copy goes through pinned memory and is queued;
    nothing waits."""
    if device.type != "cuda":
        return torch.as_tensor(values, dtype=dtype, device=device)
    return torch.as_tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


def to_host(part: Tensor) -> Tensor:
    """Return a copy on the host: on CUDA queued and in pinned memory; on a CPU the tensor itself."""
    if not part.is_cuda:
        return part.cpu()
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return host.copy_(part, non_blocking=True)
