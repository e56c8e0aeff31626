"""Encode K and V: exact dtypes, float8_e4m3, and the few-bit codecs int7 and int4. Kernels decode them.

Few-bit codecs encode in four steps:

1. Subtract the mean of K's channels over the chunk. K is stored before RoPE, where its channels have constant offsets
   that the mean removes (KVQuant, arXiv 2401.18079).
2. Rotate each head (`rotated`), so that no channel is an outlier (QuaRot, arXiv 2404.00456).
3. Divide each row (one token and head) by its own scale: its root mean square. If that clips the row and increases its
   error, the scale is chosen so that the largest value gets the largest level.
4. Replace each value by the nearest level for a normal distribution (TurboQuant, arXiv 2504.19874).

A row's error does not depend on other rows, so outlier tokens (attention sinks) are as accurate as others.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from cacheblend_store.errors import CodecError
from cacheblend_store.format.blobs import FLOAT8, PLAIN, blob_spec, encode_blob
from cacheblend_store.format.levels import PLANES, bits_of, levels_of

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
# Usual maximum of a row relative to its scale. A row that exceeds this and the largest level may be better with a wider
# scale.
_USUAL = 3.7
_CELLS = 1 << 14
CPU = torch.device("cpu")


def is_lossless(codec: str, dtype: torch.dtype) -> bool:
    """Return whether the codec stores KV of `dtype` without loss."""
    return codec == "float32" or str(dtype) == f"torch.{codec}"


def encode_kv(k: Tensor, v: Tensor, codec: str) -> bytes:
    """Return a blob of k and v, see `coded`."""
    spec, tensors = blob_spec(codec, *k.shape, v.shape[-1]), coded(k.cpu(), v.cpu(), codec)
    return encode_blob(spec, {name: _bytes(tensors[name]) for name in spec})


def coded(k: Tensor, v: Tensor, codec: str) -> dict[str, Tensor]:
    """Return the tensors of a blob of k and v on their device, see `coded_unchecked`. Waits for the device.

    Raises CodecError for infinities and NaNs in codecs that scale.
    """
    tensors, is_finite = coded_unchecked(k, v, codec, may_wait=k.is_cpu)
    check_finite(is_finite, codec)
    return tensors


def coded_unchecked(k: Tensor, v: Tensor, codec: str, *, may_wait: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a blob of k and v, and whether they could be encoded, for `check_finite`.

    k, v: [..., tokens, num_kv_heads, head_dim] (v's head_dim may differ), any float dtype, on one device; leading
    dimensions are layers, encoded independently. The flags are bool [..., 2], of K and V. may_wait: read flags, and
    compute the rare cases only where they occur; else on a GPU everything is queued, nothing waits.

    A GPU's sums are in another order than a CPU's: a scale or mean may differ in the last bit, and a value at the
    boundary of two levels may get the other one.
    """
    k, v = k.detach(), v.detach()
    if codec in PLAIN:
        dtype = DTYPES[PLAIN[codec]]
        return {"k": k.to(dtype), "v": v.to(dtype)}, k.new_ones(*k.shape[:-3], 2, dtype=torch.bool)
    tensors, is_finite = dict[str, Tensor](), []
    if codec in FLOAT8:
        for name, x in (("k", k), ("v", v)):
            tensors[name], tensors[f"{name}_scale"], own = _scaled(x.float())
            is_finite.append(own)
    else:
        k, v, bits = k.float(), v.float(), bits_of(codec, k.shape[-1], v.shape[-1])
        mean = k.mean(-3, keepdim=True).bfloat16()
        for name, x, num_bits in zip("kv", (k - mean.float(), v), bits, strict=True):
            tensors[name], tensors[f"{name}_scale"], own = _codes(x, num_bits, may_wait)
            is_finite.append(own)
        tensors["k_mean"] = mean
    return tensors, torch.stack(is_finite, -1)


def check_finite(is_finite: Tensor, codec: str) -> None:
    """Raise CodecError if a flag is not set: K or V has values that are not finite."""
    if not bool(is_finite.all()):
        raise CodecError(
            f"the KV has values that are not finite, or too large, which {codec} cannot store",
            "check the model and its --dtype; --kv-dtype exact stores anything",
        )


def _scaled(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x in float8_e4m3, the scales [..., heads] and whether all of them are finite."""
    dtype = torch.float8_e4m3fn
    most = torch.finfo(dtype).max
    scale = x.abs().amax((-3, -1)) / most
    is_finite, scale = scale.isfinite().all(-1), scale.clamp_min(1e-12)
    return (x / scale[..., None, :, None]).clamp(-most, most).to(dtype), scale, is_finite


def rotated(x: Tensor) -> Tensor:
    """Return x [..., dim] with its channels mixed by an orthonormal transform that is its own inverse.

    The sum and difference of the two halves are computed. Then a Hadamard transform is applied within each half, in
    blocks of the largest power of two that divides the half. If dim is a power of two, this is a Hadamard transform of
    the whole head; for dim 80 it covers 16 channels, for 96 it covers 32. An odd number of channels is not rotated.
    """
    dim = x.shape[-1]
    if dim % 2:
        return x
    half = dim // 2
    block, step = half & -half, half
    while step:
        pair = x.unflatten(-1, (-1, 2, step))
        x = torch.stack((pair[..., 0, :] + pair[..., 1, :], pair[..., 0, :] - pair[..., 1, :]), -2).flatten(-3)
        step = block // 2 if step == half else step // 2
    return x * (2 * block) ** -0.5


@cache
def level_table(bits: int, device: torch.device = CPU) -> Tensor:
    """Return the levels for `bits` bits, fp32 [2^bits]."""
    return torch.tensor(levels_of(bits), dtype=torch.float32).to(device)


@cache
def _grid(bits: int, device: torch.device) -> Tensor:
    """Return the code of the nearest level, uint8 [_CELLS], for cells of equal width over the range of the levels. Near
    the boundary between two levels, the choice is off by at most 1/64 of a step."""
    levels = level_table(bits)
    cells = torch.linspace(float(levels[0]), float(levels[-1]), _CELLS)
    return torch.bucketize(cells, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8).to(device)


@cache
def _middle(device: torch.device) -> Tensor:
    """Return the middle of the grid, as `addcmul` takes it on every device."""
    return torch.tensor(_CELLS / 2).to(device)


@cache
def _rotation(dim: int, device: torch.device) -> Tensor:
    """Return the matrix of `rotated`, fp32 [dim, dim]. Multiplying by it is faster than the transform."""
    return rotated(torch.eye(dim)).to(device)


def _codes(x: Tensor, bits: int, may_wait: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the packed codes and the scales of x [..., tokens, heads, dim], and whether all scales are finite."""
    levels = level_table(bits, x.device)
    rows = x if x.shape[-1] % 2 else x @ _rotation(x.shape[-1], x.device)
    scale = (rows.norm(dim=-1) * rows.shape[-1] ** -0.5).bfloat16()
    is_finite = scale.isfinite()
    if not (may_wait and bool(is_finite.all())):  # NaN has no place in the grid
        rows, scale = torch.where(is_finite[..., None], rows, 0.0), torch.where(is_finite, scale, 0.0)
    codes, largest = _nearest(rows, scale, bits), rows.abs().amax(-1)
    clipped = largest > scale.float() * levels[-1].clamp_min(_USUAL)
    if not may_wait:
        wide = (largest / levels[-1]).bfloat16()
        again, better = _if_better(rows, (codes, scale), wide, bits)
        better &= clipped
        codes, scale = torch.where(better[..., None], again, codes), torch.where(better, wide, scale)
    elif bool(clipped.any()):
        few, wide = rows[clipped], (largest[clipped] / levels[-1]).bfloat16()
        again, better = _if_better(few, (codes[clipped], scale[clipped]), wide, bits)
        codes[clipped] = torch.where(better[:, None], again, codes[clipped])
        scale[clipped] = torch.where(better, wide, scale[clipped])
    return _pack(codes, bits), scale, is_finite.flatten(-2).all(-1)


def _if_better(rows: Tensor, now: tuple[Tensor, Tensor], wide: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the codes of rows [..., dim] with scales `wide`, and for which rows their error is smaller. now: codes and
    scales."""
    levels, again = level_table(bits, rows.device), _nearest(rows, wide, bits)
    before, after = (
        torch.addcmul(rows, levels[codes.int()], scale.float()[..., None], value=-1).square().sum(-1)
        for codes, scale in (now, (again, wide))
    )
    return again, after < before


def _nearest(rows: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Return the codes of the levels nearest to rows [..., dim], uint8."""
    device = rows.device
    cells = (_CELLS - 1) / 2 / level_table(bits, device)[-1]
    by = cells / torch.where(scale > 0, scale, 1.0).float()
    at = torch.addcmul(_middle(device), rows, by[..., None]).clamp_(0, _CELLS - 1).long()
    return torch.index_select(_grid(bits, device), 0, at.flatten()).view(at.shape)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., dim] uint8 in the layout of `levels.PLANES`."""
    planes, shift, dim = [], 0, codes.shape[-1]
    for plane in PLANES[bits]:
        each = 8 // plane
        padded = torch.nn.functional.pad((codes >> shift) & (2**plane - 1), (0, -dim % each))
        parts = padded.unflatten(-1, (each, -1)).unbind(-2)
        packed = parts[0]
        for i, part in enumerate(parts[1:], 1):
            packed = packed | (part << (i * plane))
        planes.append(packed)
        shift += plane
    return torch.cat(planes, -1)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy().reshape(-1).data).cast("B")
