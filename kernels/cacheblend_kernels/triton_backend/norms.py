"""RMSNorm (arXiv 1910.07467), alone or fused with the residual add, and gated activations (GLU, arXiv 2002.05202)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheblend_kernels.triton_backend.checks import FLOATS, check, check_device, device_guard, once
from cacheblend_kernels.triton_backend.configs import padded

MAX_WIDTH = 32768
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
ACTIVATION_BLOCK = 1024


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    row_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    """ROWS rows of WIDTH: normalise in fp32, cast to x's dtype unless weight is fp32, times weight. Row i is head i %
    HEADS of row i // HEADS of x. ADD: residual += x first, in place; the rounded sum is normalised."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    at = (rows // HEADS * row_stride + rows % HEADS * head_stride)[:, None] + columns[None, :]
    packed = rows[:, None] * WIDTH + columns[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + packed, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(residual_ptr + packed, rounded, mask=mask)
        x = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0)
    normed = x * inverse[:, None]
    if weight.dtype != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    normed *= weight.to(tl.float32)[None, :]
    tl.store(out_ptr + packed, normed.to(out_ptr.dtype.element_ty), mask=mask)


def norm_tile(width: int) -> tuple[int, int, int]:
    """Return (BLOCK, ROWS, num_warps) for rows of `width` elements."""
    block = padded(width)
    rows = max(1, 1024 // block)
    return block, rows, 4 if block <= 2048 else 8 if block <= 8192 else 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of x as a new, packed tensor of x's dtype. x: [..., width] of 2 or 3 dimensions, the last one
    packed; weight: [width]."""
    _check_norm(x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, x, weight, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual += x in place (summed in fp32, rounded once); returns (rms_norm(residual), residual). x: [num_rows,
    width], rows may be strided; residual: [num_rows, width] packed, x's dtype."""
    _check_residual(x, residual)
    _check_norm(x, weight)
    out = torch.empty_like(residual)
    _launch_norm(x, residual, weight, out, eps)
    return out, residual


@once
def _check_residual(x: Tensor, residual: Tensor) -> None:
    check(x.dim() == 2 and x.shape == residual.shape, f"x is {list(x.shape)}, the residual {list(residual.shape)}")
    check(x.dtype == residual.dtype, f"x is {x.dtype}, the residual {residual.dtype}")
    check(residual.is_contiguous(), "the residual is not contiguous")
    check_device(x, residual)


@once
def _check_norm(x: Tensor, weight: Tensor) -> None:
    check(x.dim() in (2, 3), f"x has {x.dim()} dimensions", "2 or 3 are taken")
    check(x.numel() == 0 or x.stride(-1) == 1, f"x has strides {x.stride()}", "call .contiguous()")
    check(x.dtype in FLOATS, f"x is {x.dtype}", f"known: {', '.join(map(str, FLOATS))}")
    check(weight.shape == x.shape[-1:] and weight.is_contiguous(), f"weight is {list(weight.shape)}, x {list(x.shape)}")
    check(x.shape[-1] <= MAX_WIDTH, f"rows of {x.shape[-1]} numbers", f"at most {MAX_WIDTH}")
    check_device(x, weight)


def _launch_norm(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    """Launch the kernel. residual: x itself if nothing is added."""
    width = x.shape[-1]
    heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    num_rows = x.numel() // max(1, width)
    if num_rows == 0:
        return
    block, rows, warps = norm_tile(width)
    with device_guard(x):
        rms_norm_kernel[(-(-num_rows // rows),)](
            x, residual, weight, out, num_rows, x.stride(0), head_stride, eps,
            HEADS=heads, WIDTH=width, BLOCK=block, ROWS=rows, ADD=residual is not x, num_warps=warps,
        )  # fmt: skip


@triton.jit(do_not_specialize=["width"])
def act_and_mul_kernel(x_ptr, out_ptr, width, row_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """out = activation(gate) * up in fp32, rounded once. Grid (num_rows, parts); a row is [gate | up]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(x_ptr + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * row_stride + width + columns, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        gate = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # x sigmoid(2 y) = x (1 + tanh y) / 2
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out_ptr + row * width + columns, (gate * up).to(out_ptr.dtype.element_ty), mask=mask)


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up of gate_up [num_rows, 2 * intermediate], activation: one of ACTIVATIONS."""
    _check_gate(gate_up, activation)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    with device_guard(gate_up):
        act_and_mul_kernel[(num_rows, -(-width // ACTIVATION_BLOCK))](
            gate_up,
            out,
            width,
            gate_up.stride(0),
            ACTIVATION=activation,
            BLOCK=ACTIVATION_BLOCK,
            num_warps=4,
        )
    return out


@once
def _check_gate(gate_up: Tensor, activation: str) -> None:
    check(activation in ACTIVATIONS, f"unknown activation {activation!r}", f"known: {', '.join(ACTIVATIONS)}")
    check(gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, f"gate_up is {list(gate_up.shape)}")
    check(gate_up.dtype in FLOATS, f"gate_up is {gate_up.dtype}", f"known: {', '.join(map(str, FLOATS))}")
    check(gate_up.numel() == 0 or gate_up.stride(1) == 1, f"gate_up has strides {gate_up.stride()}")
    check_device(gate_up)
