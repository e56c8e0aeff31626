"""The torch backend: for any device, the reference of the other backends, and the one used on CPUs.

A single request's blocks in the pool are contiguous, so its keys are a view of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from cacheblend_kernels import compiled
from cacheblend_kernels.interface import (
    PLANES,
    AttentionMetadata,
    AttentionParams,
    KernelBackend,
    KernelError,
    LatentHeads,
    LayerCache,
    Slots,
    StoredKV,
    packed_bytes,
)
from cacheblend_kernels.torch_attention import attend, decode_attention, latent_attention

FLOAT8_MAX = 448.0  # largest float8_e4m3fn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class TorchBackend(KernelBackend):
    name = "torch"
    has_latent_attention = True

    def prefill_attention(
        self, q: Tensor, cache: LayerCache, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        out = torch.empty_like(q)
        for rows, k, v in _sequences(cache, meta, q.dtype):
            out[rows] = attend(q[rows], k, v, meta.positions[rows], params)
        return out

    def decode_attention(
        self, q: Tensor, cache: LayerCache, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        fused = compiled.decode_attention(q, cache, meta, params)
        if fused is not None:
            return fused
        out = torch.zeros_like(q)
        for seq, kv_len in enumerate(meta.kv_lens.tolist()):
            k, v = _keys_of(cache, meta, seq, kv_len, q.dtype)
            out[seq] = decode_attention(q[seq], k, v, params)
        return out

    def latent_attention(
        self, q: Tensor, cache: LayerCache, meta: AttentionMetadata, params: AttentionParams, heads: LatentHeads
    ) -> Tensor:
        out = q.new_zeros(*q.shape[:2], heads.values.shape[1])
        for rows, k, latents in _sequences(cache, meta, q.dtype):
            out[rows] = latent_attention(q[rows], (k[:, 0], latents[:, 0]), meta.positions[rows], params, heads)
        return out

    def rope_and_cache(self, q: Tensor | None, k: Tensor, v: Tensor, cache: LayerCache, slots: Slots) -> Tensor | None:
        fused = compiled.rope_and_cache(q, k, v, cache, slots) if _rotates_alike() else None
        return self._rope_and_cache(q, k, v, cache, slots) if fused is None else fused[0]

    def _rope_and_cache(self, q: Tensor | None, k: Tensor, v: Tensor, cache: LayerCache, slots: Slots) -> Tensor | None:
        _write(cache.k, _rotated(k, slots.cos, slots.sin), cache.k_scale, slots.slots)
        _write(cache.v, v, cache.v_scale, slots.slots)
        return None if q is None else self.rope(q, slots.cos, slots.sin)

    def load_kv(self, stored: StoredKV, cache: LayerCache, slots: Slots) -> None:
        if not compiled.load_codes(stored, cache, slots):
            self._load_kv(stored, cache, slots)

    @staticmethod
    def _load_kv(stored: StoredKV, cache: LayerCache, slots: Slots) -> None:
        k, v = dequantized(stored, cache.k.shape[-1], cache.v.shape[-1])
        first, num_rows = slots.first_slot, k.shape[0]
        where = slots.slots if first < 0 else slice(first, first + num_rows)
        _write(cache.k, _rotated(k, slots.cos, slots.sin), cache.k_scale, where)
        _write(cache.v, v, cache.v_scale, where)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _rotated(x, cos, sin).to(x.dtype)

    def kv_deviation(self, k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor, kind: str = "kv") -> Tensor:
        if kind not in ("k", "v", "kv"):
            raise KernelError(f"unknown deviation {kind!r}", "known: k, v, kv")
        score = torch.zeros(k.shape[0], dtype=torch.float32, device=k.device)
        for part, fresh, pool, scale in (("k", k, cache.k, cache.k_scale), ("v", v, cache.v, cache.v_scale)):
            if part in kind:
                old = _unscaled(_slots(pool)[slots], scale, torch.float32)
                score += (fresh.float() - old.float()).square().sum(dim=(1, 2))
        return score

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        fused = compiled.rms_norm(x, weight, eps)
        return self._rms_norm(x, weight, eps) if fused is None else fused

    @staticmethod
    def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype) if weight.dtype == x.dtype else (weight * wide).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        fused = compiled.rms_norm(x, weight, eps, residual)
        if fused is not None:
            return fused, residual
        residual = residual.add_(x)
        return self._rms_norm(residual, weight, eps), residual

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        if activation == "silu" and (fused := compiled.silu_and_mul(gate_up)) is not None:
            return fused
        gate, up = gate_up.chunk(2, dim=-1)
        if activation not in ACTIVATIONS:
            raise KernelError(f"unknown activation {activation!r}", f"known: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[activation](gate).mul_(up)


def dequantized(stored: StoredKV, head_dim: int, v_head_dim: int) -> tuple[Tensor, Tensor]:
    """Return K and V [num_rows, num_kv_heads, head_dim]: unchanged, or in fp32 if they are stored with scales."""
    k, v, k_scale, v_scale = stored.k, stored.v, stored.k_scale, stored.v_scale
    if k_scale is None or v_scale is None:
        return k, v
    if k.dtype == torch.float8_e4m3fn:
        return k.float() * k_scale[..., None], v.float() * v_scale[..., None]
    k_mean, k_levels, v_levels = stored.k_mean, stored.k_levels, stored.v_levels
    if k.dtype != torch.uint8 or k_mean is None or k_levels is None or v_levels is None:
        raise KernelError(
            f"{k.dtype} with scales is not a stored format", "float8_e4m3fn, or uint8 with levels and a mean"
        )
    k, v = (
        mixed(levels[_codes(x, bits, dim).int()] * scale.float()[..., None])
        for x, scale, levels, bits, dim in (
            (k, k_scale, k_levels, stored.bits[0], head_dim),
            (v, v_scale, v_levels, stored.bits[1], v_head_dim),
        )
    )
    return k + k_mean.float(), v


def _codes(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack codes [..., dim] uint8, see `StoredKV`."""
    if packed.shape[-1] != packed_bytes(dim, bits):
        raise KernelError(f"{packed.shape[-1]} bytes are not {dim} codes of {bits} bits", "see StoredKV")
    codes, shift, first = packed.new_zeros(()), 0, 0
    for plane in PLANES[bits]:
        num_bytes = -(-dim * plane // 8)
        part = packed[..., first : first + num_bytes]
        codes = codes | torch.cat([(part >> at & (2**plane - 1)) << shift for at in range(0, 8, plane)], -1)[..., :dim]
        shift, first = shift + plane, first + num_bytes
    return codes


def mixed(x: Tensor) -> Tensor:
    """Hadamard transform of a head's channels [..., dim], its own inverse: sums and differences of the two halves, then
    in each half blocks of the largest power of two that divides it. An odd number of channels is left as it is."""
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


def _unscaled(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Dequantise values of a float8 pool, [keys, num_kv_heads, head_dim]; return values of other pools unchanged."""
    return x if scale is None else (x.float() * scale[:, None]).to(dtype)


def _write(pool: Tensor, rows: Tensor, scale: Tensor | None, where: Tensor | slice) -> None:
    """Write rows [num_rows, num_kv_heads, head_dim] to their slots of the K or V pool; float8 pools saturate."""
    if scale is not None:
        rows = (rows.float() / scale[:, None]).clamp(-FLOAT8_MAX, FLOAT8_MAX)
    rows, pool = rows.to(pool.dtype), _slots(pool)
    if scale is not None:  # float8 has no index_copy_
        rows, pool = rows.view(torch.uint8), pool.view(torch.uint8)
    if isinstance(where, slice):
        pool[where].copy_(rows)
    else:
        pool.index_copy_(0, where, rows)


def _slots(cache: Tensor) -> Tensor:
    """Reshape [num_blocks, block_size, heads, dim] to [num_slots, heads, dim], a view."""
    return cache.view(-1, cache.shape[-2], cache.shape[-1])


def _sequences(
    cache: LayerCache, meta: AttentionMetadata, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (rows, K, V) of each sequence that has rows, see `_keys_of`."""
    cu_rows = meta.cu_rows.tolist()
    for seq, kv_len in enumerate(meta.kv_lens.tolist()):
        rows = slice(cu_rows[seq], cu_rows[seq + 1])
        if rows.start != rows.stop:
            yield rows, *_keys_of(cache, meta, seq, kv_len, dtype)


def _keys_of(
    cache: LayerCache, meta: AttentionMetadata, seq: int, kv_len: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return K and V of one sequence, [kv_len, num_kv_heads, head_dim]: a view if its blocks are adjacent, else
    gathered. Values of a float8 pool are returned in `dtype`."""
    first = meta.contiguous_slots[seq] if meta.contiguous_slots else -1
    if first >= 0:
        span = slice(first, first + kv_len)
        k, v = _slots(cache.k)[span], _slots(cache.v)[span]
    else:
        blocks = meta.block_table[seq][: -(-kv_len // cache.k.shape[1])].long()
        k, v = _slots(cache.k[blocks])[:kv_len], _slots(cache.v[blocks])[:kv_len]
    return _unscaled(k, cache.k_scale, dtype), _unscaled(v, cache.v_scale, dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x * cos + rotate_half(x) * sin in fp32. x: [rows, heads, dim]; cos, sin: [rows, dim], halves equal."""
    x, cos, sin = x.float(), cos[:, None], sin[:, None, : x.shape[-1] // 2]
    out = x * cos
    (x1, x2), (out1, out2) = x.chunk(2, -1), out.chunk(2, -1)
    out1.addcmul_(x2, sin, value=-1)
    out2.addcmul_(x1, sin)
    return out


@cache
def _rotates_alike() -> bool:
    """Return whether the compiled code rotates like torch, to the bit. torch rotates stored K, and equal K have to stay
    equal. It depends on whether torch's build for this CPU fuses a product with a sum."""
    x, angles = torch.linspace(-7, 7, 512).sin().view(4, 2, 64), torch.linspace(0, 9, 128).view(4, 32).repeat(1, 2)
    caches = [LayerCache(torch.zeros(1, 4, 2, 64), torch.zeros(1, 4, 2, 64)) for _ in range(2)]
    slots = Slots(torch.arange(4), angles.cos(), angles.sin())
    if compiled.rope_and_cache(None, x, x, caches[0], slots) is None:
        return False
    TorchBackend()._rope_and_cache(None, x, x, caches[1], slots)
    return torch.equal(caches[0].k, caches[1].k)
