"""KV deviation, RMSNorm, gated activations against fp64."""

from __future__ import annotations

import math

import pytest
import torch
from cacheblend_kernels import KernelError, LayerCache
from cacheblend_kernels.torch_backend import TorchBackend
from cacheblend_kernels.triton_backend.cache_ops import kv_deviation
from cacheblend_kernels.triton_backend.norms import act_and_mul, add_rms_norm, rms_norm
from cases import TOLERANCE, moved

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("kind", ["k", "v", "kv"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (9, 128), (3, 80)])
def test_deviation(heads: int, dim: int, dtype: torch.dtype, kind: str, device: torch.device) -> None:
    num_rows = 6
    fused = torch.randn(num_rows, 2 * heads, dim).to(dtype)
    caches = [torch.full((4, 8, heads, dim), torch.nan) for _ in range(2)]
    slots = torch.tensor([31, 0, 7, 8, 16, 2])
    want = torch.zeros(num_rows, dtype=torch.float64)
    for cache, fresh, part in zip(caches, fused.split(heads, dim=1), "kv", strict=True):
        old = torch.randn(num_rows, heads, dim).to(dtype)
        old[2] = fresh[2]
        cache.view(-1, heads, dim)[slots] = old.float()
        if part in kind:
            want += (fresh.double() - old.double()).square().sum((1, 2))
    rows = fused.to(device).split(heads, dim=1)
    got = kv_deviation(*rows, LayerCache(*(c.to(dtype).to(device) for c in caches)), slots.to(device), kind)
    assert got.dtype == torch.float32
    assert got[2] == 0
    torch.testing.assert_close(got.cpu().double(), want, atol=1e-4, rtol=1e-5)  # exact inputs: only the sum rounds


@pytest.mark.parametrize("kind", ["k", "v", "kv"])
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (9, 128), (3, 80)])
def test_deviation_from_a_float8_pool(heads: int, dim: int, kind: str, device: torch.device) -> None:
    k, v, k_scale, v_scale = (
        torch.randn(5, heads, dim),
        torch.randn(5, heads, dim),
        torch.rand(heads),
        torch.rand(heads),
    )
    pools = [torch.randn(4, 8, heads, dim).to(torch.float8_e4m3fn) for _ in range(2)]
    slots = torch.tensor([31, 0, 7, 8, 2])
    want = torch.zeros(5, dtype=torch.float64)
    for pool, scale, fresh, part in zip(pools, (k_scale, v_scale), (k, v), "kv", strict=True):
        old = pool.double().view(-1, heads, dim)[slots] * scale.double()[:, None]
        if part in kind:
            want += (fresh.double() - old).square().sum((1, 2))
    cache = LayerCache(*pools, k_scale, v_scale)
    got = kv_deviation(k.to(device), v.to(device), moved(cache, device), slots.to(device), kind)
    torch.testing.assert_close(got.cpu().double(), want, atol=1e-4, rtol=1e-5)
    reference = TorchBackend().kv_deviation(k, v, cache, slots, kind)
    torch.testing.assert_close(reference.double(), want, atol=1e-4, rtol=1e-5)


def test_deviation_of_no_rows_and_of_an_unknown_kind(device: torch.device) -> None:
    none, pool = torch.zeros(0, 2, 32, device=device), torch.zeros(1, 8, 2, 32, device=device)
    cache = LayerCache(pool, pool)
    slots = torch.zeros(0, dtype=torch.int64, device=device)
    assert kv_deviation(none, none, cache, slots).shape == (0,)
    with pytest.raises(KernelError, match="'q'"):
        kv_deviation(none, none, cache, slots, "q")


def norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 64), (3, 1000), (2, 2048), (1, 8200), (4, 3, 80), (3, 2, 128)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    wide = torch.randn(shape[0], 2 * shape[1], *shape[2:]).to(dtype)  # a slice of it: strided rows, as QK-norm sees
    x, weight = wide[:, : shape[1]], torch.randn(shape[-1]).to(dtype)
    out = rms_norm(wide.to(device)[:, : shape[1]], weight.to(device), 1e-5)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.cpu().double(), norm_reference(x, weight, 1e-5), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("triton", [True, False], ids=["triton", "torch"])
def test_a_weight_in_float32_is_rounded_once(dtype: torch.dtype, triton: bool, device: torch.device) -> None:
    """As Gemma's norms are: the product with 1 + weight is rounded to x's dtype, and nothing before it."""
    x, weight = torch.randn(5, 64).to(dtype), 1 + torch.randn(64)
    norm = rms_norm if triton else TorchBackend().rms_norm
    out = norm(x.to(device), weight.to(device), 1e-6).cpu()
    assert out.dtype == dtype
    wanted = norm_reference(x, weight, 1e-6)
    step = torch.finfo(dtype).eps / (1 if triton else 2)  # Triton's interpreter cuts bits off
    assert ((out.double() - wanted).abs() <= 1.001 * step * wanted.abs() + 1e-7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 1000, 2048])
def test_add_rms_norm(width: int, dtype: torch.dtype, device: torch.device) -> None:
    x, residual, weight = (torch.randn(*s).to(dtype) for s in ((7, width), (7, width), (width,)))
    moved = residual.clone().to(device)
    out, updated = add_rms_norm(x.to(device), moved, weight.to(device), 1e-6)
    assert updated is moved
    tolerance = TOLERANCE[dtype]
    total = x.double() + residual.double()
    torch.testing.assert_close(moved.cpu().double(), total, atol=tolerance, rtol=tolerance)
    want = norm_reference(moved.cpu(), weight, 1e-6)
    torch.testing.assert_close(out.cpu().double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("width", [7, 64, 1100])
def test_act_and_mul(activation: str, width: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = 3 * torch.randn(4, 2 * width).to(dtype)
    gate_up[0, 0], gate_up[1, 0] = 60.0, -60.0
    g, up = gate_up.double().chunk(2, dim=-1)
    if activation == "silu":
        g = g / (1 + torch.exp(-g))
    elif activation == "gelu":
        g = g * 0.5 * (1 + torch.erf(g / math.sqrt(2)))
    else:
        g = 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
    out = act_and_mul(gate_up.to(device), activation)
    torch.testing.assert_close(out.cpu().double(), g * up, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_refusals(device: torch.device) -> None:
    x = torch.randn(3, 64, device=device)
    with pytest.raises(KernelError, match="relu"):
        act_and_mul(x, "relu")
    with pytest.raises(KernelError, match="weight"):
        rms_norm(x, x[0, :32].contiguous(), 1e-5)
    with pytest.raises(KernelError, match="residual"):
        add_rms_norm(x, x[:2], x[0], 1e-5)
    with pytest.raises(KernelError, match="stride"):
        rms_norm(x.t(), x[:, 0].contiguous(), 1e-5)
