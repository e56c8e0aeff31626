"""Weights in int8: near the exact product, rows independent of each other, and KV of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_cli.errors import DeviceError, UsageError
from cacheblend_cli.model.linear import Int8Linear, check_weight_dtype, linear

CPU = torch.device("cpu")
Cli = Callable[..., Any]
needs_vnni = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="this CPU has no VNNI")


@needs_vnni
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 3, 33, 340])
def test_near_the_exact_product(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn(96, 64, generator=generator), torch.randn(96, generator=generator)
    x = torch.randn(rows, 64, generator=generator) * torch.logspace(-3, 2, rows)[:, None]
    made = linear(weight.to(dtype), bias.to(dtype), weight_dtype="int8")
    exact = x.to(dtype).double() @ weight.to(dtype).double().T
    error = (made(x.to(dtype)).double() - bias.to(dtype).double() - exact).norm(dim=1) / (exact.norm(dim=1) + 1)
    assert rows == 0 or error.max() < 0.02
    assert made(x.to(dtype)).dtype == dtype


@needs_vnni
def test_a_row_depends_on_no_other() -> None:
    generator = torch.Generator().manual_seed(0)
    made = Int8Linear(torch.randn(300, 128, generator=generator))
    x = torch.randn(70, 128, generator=generator)
    together = made(x)
    assert torch.equal(together, torch.cat([made(row[None]) for row in x]))
    assert torch.equal(together, torch.cat([made(part) for part in x.split(13)]))


@needs_vnni
def test_the_ends_of_the_range() -> None:
    weight = torch.eye(32)
    x = torch.zeros(4, 32)
    x[1, 3], x[2, 5], x[3] = 1e30, -7.0, torch.linspace(-1, 1, 32)
    out = Int8Linear(weight)(x)
    assert not out[0].any()
    assert torch.allclose(out, x, rtol=5e-3, atol=5e-3)


@needs_vnni
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_small_rows_are_as_exact_as_others(dtype: torch.dtype) -> None:
    """A row's scale is far smaller than what is in it, and float16 has few numbers there."""
    x = (torch.logspace(-6, -3, 40)[:, None] * torch.linspace(-1, 1, 32)).to(dtype)
    error = (Int8Linear(torch.eye(32).to(dtype))(x) - x).double().abs().amax(1)
    assert (error <= 0.01 * x.double().abs().amax(1) + 1e-7).all()


def test_unknown_weight_dtypes_and_int8_without_vnni_are_refused() -> None:
    with pytest.raises(UsageError, match="int3"):
        check_weight_dtype("int3", CPU)
    with pytest.raises(DeviceError, match="VNNI"):
        check_weight_dtype("int8", torch.device("cuda"))


@needs_vnni
def test_an_answer_with_int8_weights(cli: Cli, docs: Path) -> None:
    int8 = ("--weight-dtype", "int8")
    ids = cli("precompute", "docs", *int8, "-q").out.split()
    asked = ("ask", "alpha", "--chunks", ",".join(ids), "--max-tokens", "3", "--json", "--verify", *int8)
    answer = cli(*asked, "--ratio", "1", "--selector", "hkvd").records[0]
    assert {c["status"] for c in answer["chunks"]} <= {"exact", "blended"}
    assert answer["verify"]["kl"] < 1e-6  # whole numbers add up to the same in any order
    assert answer["verify"]["top1_agree"]
    refused = cli("ask", "alpha")
    assert refused.code == 3
    assert "--weight-dtype int8" in refused.err


@needs_vnni
def test_weight_dtype_can_be_configured(cli: Cli) -> None:
    assert cli("config", "set", "weight_dtype", "int8").code == 0
    shown = cli("config", "show", "--json").records[0]
    assert "int8" in json.dumps(shown)
