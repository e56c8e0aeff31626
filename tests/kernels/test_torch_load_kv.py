"""Stored K and V into the pool by the torch backend, on CPU: every form, whole and short groups, tables of either kind."""

from __future__ import annotations

import pytest
import torch
from cacheblend_kernels.torch_backend import BLOCK_VALUES, TorchBackend
from torch import Tensor

GROUP = 4
FORMS = ("float32", "float16", "bfloat16", "float8", "int8", "int4")


def stored(form: str, num_rows: int, heads: int, dim: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """(what load_kv takes, K and V they stand for in fp64), value by value."""
    if form == "float8":  # every code occurs, NaNs among them
        codes = (torch.arange(num_rows * heads * dim) % 256).to(torch.uint8).view(num_rows, heads, dim)
        k, v = codes.view(torch.float8_e4m3fn), codes.flip(0).view(torch.float8_e4m3fn)
        scale = torch.rand(2, heads) + 0.1
        tensors = {"k": k, "v": v, "k_scale": scale[0], "v_scale": scale[1]}
        return tensors, *(t.double() * s.double()[:, None] for t, s in ((k, scale[0]), (v, scale[1])))
    if not form.startswith("int"):
        k, v = torch.randn(2, num_rows, heads, dim).to(getattr(torch, form))
        return {"k": k, "v": v}, k.double(), v.double()
    codes = torch.randint(0, 256 if form == "int8" else 16, (2, num_rows, heads, dim)).double()
    groups = -(-num_rows // GROUP)
    k_scale, k_zero = torch.randn(2, groups, heads, dim)
    v_scale, v_zero = torch.randn(2, num_rows, heads, 1)
    of_row = torch.arange(num_rows) // GROUP
    wanted = codes[0] * k_scale[of_row] + k_zero[of_row], codes[1] * v_scale + v_zero
    packed = codes.to(torch.uint8)
    if form == "int4":
        packed = packed[..., 0::2] | (packed[..., 1::2] << 4)
    scales = {"k_scale": k_scale, "k_zero": k_zero, "v_scale": v_scale, "v_zero": v_zero}
    return {"k": packed[0], "v": packed[1], **scales}, *wanted


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("num_rows", "heads", "dim"), [(1, 2, 64), (3, 1, 16), (9, 2, 64), (5, 3, 80), (BLOCK_VALUES // 128 + 6, 2, 64)]
)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("run", [False, True])
def test_load_kv(form: str, num_rows: int, heads: int, dim: int, wide: bool, run: bool) -> None:
    torch.manual_seed(0)
    backend = TorchBackend()
    tensors, k_value, v_value = stored(form, num_rows, heads, dim)
    angle = torch.randn(num_rows, dim // 2)
    cos, sin = (torch.cat((t, t), 1) for t in (angle.cos(), angle.sin()))
    tables = backend.rope_tables(cos, sin, heads) if wide else (cos, sin)
    num_slots = -(-num_rows // 8) * 8 + 16
    slots = torch.arange(11, 11 + num_rows) if run else torch.randperm(num_slots)[:num_rows]
    caches = [torch.full((num_slots // 8, 8, heads, dim), 7.0) for _ in range(2)]
    k, v = tensors.pop("k"), tensors.pop("v")
    backend.load_kv(k, v, *tables, *caches, slots, first_slot=11 if run else -1, group_size=GROUP, **tensors)
    low, high = k_value.chunk(2, -1)
    c, s = angle.double().cos()[:, None], angle.double().sin()[:, None]
    rotated = torch.cat((low * c - high * s, high * c + low * s), -1)
    untouched = torch.ones(num_slots, dtype=torch.bool)
    untouched[slots] = False
    for cache, wanted in zip(caches, (rotated, v_value), strict=True):
        flat = cache.view(num_slots, heads, dim).double()
        torch.testing.assert_close(flat[slots], wanted, atol=1e-4, rtol=1e-5, equal_nan=True)
        assert (flat[untouched] == 7.0).all()
