"""Packed weights give what plain ones give."""

from __future__ import annotations

import pytest
import torch

from cacheblend_cli.model.linear import Linear, can_pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 64])
def test_a_packed_product_is_the_plain_one(dtype: torch.dtype, bias: bool, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(48, 40, generator=generator), torch.randn(rows, 40, generator=generator)
    b = torch.randn(48, generator=generator) if bias else None
    cast = [None if t is None else t.to(dtype) for t in (weight, b, x)]
    own = Linear(cast[0], cast[1])  # type: ignore[arg-type]
    exact = cast[2].double() @ cast[0].double().T + (0 if cast[1] is None else cast[1].double())  # type: ignore[union-attr]
    out = own(cast[2])  # type: ignore[arg-type]
    assert out.dtype == dtype
    assert out.shape == (rows, 48)
    tolerance = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}[dtype]
    assert rows == 0 or (out.double() - exact).abs().max() <= tolerance
    assert own.packed == (can_pack(cast[0]) and dtype != torch.float16)  # type: ignore[arg-type]
    assert own.num_bytes == dtype.itemsize * (48 * 40 + (48 if bias else 0))
