"""References for kernels, in fp64 and without code of any backend: stored forms and what they stand for,
the rotation, and outputs that start as NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from cacheblend_kernels import StagedChunk, StagedTensor, StoredKV, StoredLayers, layers_table
from cacheblend_kernels.interface import STORED
from torch import Tensor

PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BITS = {"int7": (7, 6), "int4": (5, 3)}
CODECS = (*PLAIN, "fp8", *BITS)
PLANES = {7: (4, 2, 1), 6: (4, 2), 5: (4, 1), 3: (2, 1)}


def stored_kv(
    codec: str,
    num_rows: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    *,
    nan: bool = False,
    seed: int = 0,
) -> StoredKV:
    """Random K and V as a codec stores them.

    Of float8 every code occurs in turn, NaNs only if asked for.
    """
    gen = torch.Generator(device).manual_seed(seed)
    shape = (num_rows, num_kv_heads, head_dim)
    if codec in PLAIN:
        return StoredKV(*(torch.randn(shape, device=device, generator=gen).to(PLAIN[codec]) for _ in range(2)))
    if codec == "fp8":
        codes = (torch.arange(num_rows * num_kv_heads * head_dim, device=device) % 256).view(shape)
        if not nan:
            codes[codes % 128 == 127] = 0
        k = codes.to(torch.uint8)
        scales = [0.01 + torch.rand(1, num_kv_heads, device=device, generator=gen) for _ in range(2)]
        k, v = (x.view(torch.float8_e4m3fn) for x in (k, k.flip(0)))
        return StoredKV(k, v, *scales)
    sizes = [sum(-(-head_dim * plane // 8) for plane in PLANES[bits]) for bits in BITS[codec]]
    codes = [torch.randint(0, 256, (*shape[:2], size), device=device, generator=gen) for size in sizes]
    scales = [torch.rand(shape[:2], device=device, generator=gen).bfloat16() / 2 for _ in range(2)]
    mean = torch.randn(1, *shape[1:], device=device, generator=gen).bfloat16()
    levels = [torch.randn(2**bits, device=device, generator=gen) for bits in BITS[codec]]
    return StoredKV(*(c.to(torch.uint8) for c in codes), *scales, mean, *levels)


def stored_chunks(
    codec: str, lengths: Sequence[int], num_layers: int, num_kv_heads: int, head_dim: int, device: torch.device,
    *, seed: int = 0,
) -> list[list[StoredKV]]:  # fmt: skip
    """Return `stored_kv` of chunks of these lengths, at each layer, with levels of the codec in common."""
    chunks = [
        [
            stored_kv(codec, length, num_kv_heads, head_dim, device, seed=(seed + at) * num_layers + layer)
            for layer in range(num_layers)
        ]
        for at, length in enumerate(lengths)
    ]
    levels = {name: getattr(chunks[0][0], name) for name in ("k_levels", "v_levels")}
    return [[replace(stored, **levels) for stored in chunk] for chunk in chunks]


def stored_layers(chunks: Sequence[Sequence[StoredKV]], first_head: int = 0) -> StoredLayers:
    """Pack chunks, each with its K and V of every layer, into one buffer, whose other bytes are 255: NaN in any
    format."""
    staged, size = [], 0
    for first, *_ in chunks:
        tensors, start = {}, size
        for name in STORED:
            if (t := getattr(first, name)) is not None:
                of_heads = first.k.dtype == torch.float8_e4m3fn and "scale" in name
                tensors[name] = StagedTensor(start, t.dtype, tuple(t.shape[of_heads:]))
                start += -(-t.nbytes // 64) * 64
        staged.append(StagedChunk(tensors, start - size))
        size += (start - size) * len(chunks[0])
    device = chunks[0][0].k.device
    data = torch.full((size,), 255, dtype=torch.uint8, device=device)
    for chunk, layers in zip(staged, chunks, strict=True):
        for at, stored in enumerate(layers):
            for name, t in chunk.tensors.items():
                t.at(data, at * chunk.layer_bytes).copy_(getattr(stored, name).view(t.shape))
    counts = torch.tensor([chunk.num_rows for chunk in staged])
    row_chunks = torch.repeat_interleave(torch.arange(len(staged)), counts).int().to(device)
    table = torch.tensor(layers_table(staged)).to(device)
    levels = chunks[0][0].k_levels, chunks[0][0].v_levels
    return StoredLayers(data, tuple(staged), table, row_chunks, *levels, first_head)


def decoded(stored: StoredKV, head_dim: int) -> tuple[Tensor, Tensor]:
    """K and V [num_rows, num_kv_heads, head_dim] in fp64 that `stored` stands for."""
    k, v = stored.k, stored.v
    if k.dtype == torch.float8_e4m3fn:
        assert stored.k_scale is not None
        assert stored.v_scale is not None
        return k.float().double() * stored.k_scale[..., None], v.float().double() * stored.v_scale[..., None]
    if k.dtype == torch.uint8:
        assert stored.k_mean is not None
        k = _of_codes(k, stored.k_scale, stored.k_levels, head_dim)
        v = _of_codes(v, stored.v_scale, stored.v_levels, head_dim)
        return k + stored.k_mean.double(), v
    return k.double(), v.double()


def _of_codes(packed: Tensor, scale: Tensor | None, levels: Tensor | None, dim: int) -> Tensor:
    """Levels of each code, looked up one by one, times the scale and a Hadamard matrix (Sylvester's) of each block of
    channels."""
    assert scale is not None
    assert levels is not None
    bits, first, codes = len(levels).bit_length() - 1, 0, packed.new_zeros(*packed.shape[:2], dim, dtype=torch.int64)
    shift = 0
    for plane in PLANES[bits]:
        num_bytes = -(-dim * plane // 8)
        for channel in range(dim):
            byte = packed[..., first + channel % num_bytes].long()
            codes[..., channel] += ((byte // 2 ** (channel // num_bytes * plane)) % 2**plane) << shift
        first, shift = first + num_bytes, shift + plane
    values = levels.double()[codes] * scale.double()[..., None]
    half = dim // 2
    size = 2 * (half & -half)
    matrix = torch.zeros(dim, dim, dtype=torch.float64)
    where = [(c // half, c % half // (size // 2), c % half % (size // 2)) for c in range(dim)]  # half, block, place
    for i, (half_i, block_i, at_i) in enumerate(where):
        for j, (half_j, block_j, at_j) in enumerate(where):
            if block_i == block_j:
                matrix[i, j] = (-1.0) ** ((at_i & at_j).bit_count() + half_i * half_j)
    return values @ matrix.to(values.device) / size**0.5


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """fp64 rotate-half RoPE of [num_rows, heads, head_dim]."""
    x, half = x.double(), x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.double()[:, None] + turned * sin.double()[:, None]


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Every tensor a wrapper allocates starts as NaN: what a kernel forgets to write shows."""
    kept = torch.empty, torch.empty_like

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() and tensor.element_size() > 1 else tensor

        return call

    torch.empty, torch.empty_like = map(poisoned, kept)
    try:
        yield
    finally:
        torch.empty, torch.empty_like = kept
