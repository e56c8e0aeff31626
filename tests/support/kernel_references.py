"""What kernels are held against, in fp64 and sharing no code with any backend: stored forms and what they stand for, the
rotation, and outputs that start as NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from cacheblend_kernels import StoredKV
from torch import Tensor

PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FLOAT8 = {"fp8": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
CODECS = (*PLAIN, *FLOAT8, "int8", "int4")


def stored_kv(
    codec: str,
    num_rows: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    *,
    group_size: int = 32,
    nan: bool = False,
    seed: int = 0,
) -> StoredKV:
    """Random K and V as a codec stores them. Of float8 every code occurs in turn, NaNs and infinities only if asked
    for."""
    gen = torch.Generator(device).manual_seed(seed)
    shape = (num_rows, num_kv_heads, head_dim)
    if codec in PLAIN:
        return StoredKV(*(torch.randn(shape, device=device, generator=gen).to(PLAIN[codec]) for _ in range(2)))
    if codec in FLOAT8:
        codes = (torch.arange(num_rows * num_kv_heads * head_dim, device=device) % 256).view(shape)
        if not nan:
            codes[codes % 128 >= (127 if codec == "fp8" else 124)] = 0
        k = codes.to(torch.uint8)
        most = 448 / torch.finfo(FLOAT8[codec]).max  # values are of one size, whatever the codec
        scales = [(0.01 + torch.rand(num_kv_heads, device=device, generator=gen)) * most for _ in range(2)]
        return StoredKV(k.view(FLOAT8[codec]), k.flip(0).view(FLOAT8[codec]), *scales)
    width, top = (head_dim, 255) if codec == "int8" else (head_dim // 2, 15)
    sizes = {"k": (-(-num_rows // group_size), num_kv_heads, head_dim), "v": (num_rows, num_kv_heads, 1)}
    made = {}
    for part, size in sizes.items():
        codes = torch.randint(0, 256, (num_rows, num_kv_heads, width), device=device, generator=gen)
        made[part] = codes.to(torch.uint8)
        made[f"{part}_scale"] = torch.rand(size, device=device, generator=gen) / top
        made[f"{part}_zero"] = torch.randn(size, device=device, generator=gen)
    return StoredKV(**made, group_size=group_size)


def decoded(stored: StoredKV, head_dim: int) -> tuple[Tensor, Tensor]:
    """K and V [num_rows, num_kv_heads, head_dim] in fp64 that `stored` stands for."""
    k, v = stored.k, stored.v
    wide = {name: t.double() for name, t in vars(stored).items() if isinstance(t, Tensor) and name not in "kv"}
    if k.dtype in FLOAT8.values():
        k, v = (x.float().double() * wide[f"{p}_scale"][:, None] for p, x in (("k", k), ("v", v)))
    elif k.dtype == torch.uint8:
        if k.shape[-1] != head_dim:
            k, v = (torch.stack((x % 16, x // 16), -1).flatten(-2) for x in (k, v))
        group = torch.arange(k.shape[0], device=k.device) // stored.group_size
        k = k.double() * wide["k_scale"][group] + wide["k_zero"][group]
        v = v.double() * wide["v_scale"] + wide["v_zero"]
    return k.double(), v.double()


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
