"""The torch backend: any device, the reference of the others, and what the CPU runs on.

The pool of a single request is contiguous, so keys are attended over as a view and nothing is copied. Rows are
taken in tiles, each against the keys up to its last position: no N x N mask is ever made.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cacheblend_kernels.interface import AttentionMetadata, KernelBackend, KernelError

TILE_ROWS = 64  # measured on 2 CPU cores: 32 to 128 are within 10 % of each other

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class TorchBackend(KernelBackend):
    name = "torch"

    def prefill_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(q)
        cu_rows, kv_lens = meta.cu_rows.tolist(), meta.kv_lens.tolist()
        for seq in range(meta.num_seqs):
            rows = slice(cu_rows[seq], cu_rows[seq + 1])
            if rows.start == rows.stop:
                continue
            k, v = _keys_of(k_cache, v_cache, meta.block_table[seq], kv_lens[seq], meta.contiguous_slot)
            k, v = _unscaled(k, k_scale, q.dtype), _unscaled(v, v_scale, q.dtype)
            positions = meta.positions[rows]
            dense_from_zero = meta.dense and sliding_window is None and soft_cap is None and int(positions[0]) == 0
            if dense_from_zero:
                n = rows.stop - rows.start
                out[rows] = _full_causal(q[rows], k[:n], v[:n], scale)
            else:
                _scattered(q[rows], k, v, positions, out[rows], scale, sliding_window, soft_cap)
        return out

    def decode_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        kv_lens: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        contiguous_slot: int = -1,
        max_kv_len: int = 0,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(q)
        num_kv_heads = k_cache.shape[2]
        for seq, kv_len in enumerate(kv_lens.tolist()):
            k, v = _keys_of(k_cache, v_cache, block_table[seq], kv_len, contiguous_slot)
            k, v = _unscaled(k, k_scale, q.dtype), _unscaled(v, v_scale, q.dtype)
            if sliding_window is not None and kv_len > sliding_window:
                k, v = k[-sliding_window:], v[-sliding_window:]
            # The heads of a group are rows of one small matrix product: K and V are read once, not repeated.
            grouped = q[seq].view(1, num_kv_heads, -1, q.shape[-1])
            kt, vt = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
            out[seq] = _attend(grouped, kt, vt, None, scale, soft_cap).reshape(q.shape[1:])
        return out

    def rope_and_cache(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor | None:
        if k_scale is None or v_scale is None:
            _slots(k_cache).index_copy_(0, slot_mapping, self.rope(k, cos, sin).to(k_cache.dtype))
            _slots(v_cache).index_copy_(0, slot_mapping, v.to(v_cache.dtype))
        else:
            _write_float8(self.rope(k.float(), cos, sin), k_scale, k_cache, slot_mapping)
            _write_float8(v.float(), v_scale, v_cache, slot_mapping)
        return None if q is None else self.rope(q, cos, sin)

    def load_kv(
        self,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        first_slot: int = -1,
        k_zero: Tensor | None = None,
        v_zero: Tensor | None = None,
        group_size: int = 32,
        pool_k_scale: Tensor | None = None,
        pool_v_scale: Tensor | None = None,
    ) -> None:
        if k_scale is not None and v_scale is not None:
            k, v = dequantize(k, v, k_scale, v_scale, k_zero, v_zero, group_size, k_cache.shape[-1])
        if pool_k_scale is not None and pool_v_scale is not None:
            if first_slot >= 0:
                slot_mapping = torch.arange(first_slot, first_slot + k.shape[0], device=k.device)
            _write_float8(self.rope(k.float(), cos, sin), pool_k_scale, k_cache, slot_mapping)
            _write_float8(v.float(), pool_v_scale, v_cache, slot_mapping)
            return
        k_slots, v_slots = _slots(k_cache), _slots(v_cache)
        if first_slot >= 0:
            span = slice(first_slot, first_slot + k.shape[0])
            v_slots[span].copy_(v)
            if k.dtype == k_slots.dtype == torch.float32:
                _rope_into(k, cos, sin, k_slots[span])
            else:
                k_slots[span].copy_(self.rope(k.float(), cos, sin))
            return
        k_slots.index_copy_(0, slot_mapping, self.rope(k.float(), cos, sin).to(k_cache.dtype))
        v_slots.index_copy_(0, slot_mapping, v.to(v_cache.dtype))

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        _rope_into(x.float(), cos, sin, out)
        return out.to(x.dtype)

    def kv_deviation(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        kind: str = "kv",
    ) -> Tensor:
        if kind not in ("k", "v", "kv"):
            raise KernelError(f"unknown deviation {kind!r}", "known: k, v, kv")
        score = torch.zeros(k.shape[0], dtype=torch.float32, device=k.device)
        for fresh, cache, part in ((k, k_cache, "k"), (v, v_cache, "v")):
            if part in kind:
                old = _slots(cache).index_select(0, slot_mapping)
                score += (fresh.float() - old.float()).square().sum(dim=(1, 2))
        return score

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = residual.add_(x)
        return self.rms_norm(residual, weight, eps), residual

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "silu":
            return F.silu(gate).mul_(up)
        if activation not in _ACTIVATIONS:
            raise KernelError(f"unknown activation {activation!r}", f"known: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[activation](gate).mul_(up)


def dequantize(
    k: Tensor,
    v: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    k_zero: Tensor | None,
    v_zero: Tensor | None,
    group_size: int,
    head_dim: int,
) -> tuple[Tensor, Tensor]:
    """Stored K and V [num_rows, num_kv_heads, head_dim] in fp32, from the forms `KernelBackend.load_kv` lists."""
    if k.dtype == torch.float8_e4m3fn:
        return k.float() * k_scale[:, None], v.float() * v_scale[:, None]
    if k.dtype != torch.uint8 or k_zero is None or v_zero is None:
        raise KernelError(f"{k.dtype} with scales is no stored form", "float8_e4m3fn, or uint8 with zero points")
    if k.shape[-1] != head_dim:
        k, v = (torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2) for codes in (k, v))
    group = torch.arange(k.shape[0], device=k.device) // group_size
    return k.float() * k_scale[group] + k_zero[group], v.float() * v_scale + v_zero


def _unscaled(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Values of a float8 pool, [keys, num_kv_heads, head_dim]; another pool's as they are."""
    return x if scale is None else (x.float() * scale[:, None]).to(dtype)


def _write_float8(x: Tensor, scale: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """x [num_rows, num_kv_heads, head_dim] fp32 to its slots of a float8 pool, saturated."""
    codes = (x / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    _slots(cache).view(torch.uint8).index_copy_(0, slot_mapping, codes.view(torch.uint8))


def _slots(cache: Tensor) -> Tensor:
    """[num_blocks, block_size, heads, dim] -> [num_slots, heads, dim], a view."""
    return cache.view(-1, cache.shape[-2], cache.shape[-1])


def _keys_of(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_len: int, contiguous_slot: int
) -> tuple[Tensor, Tensor]:
    """K and V of one sequence, [kv_len, num_kv_heads, head_dim]: a view when its blocks are adjacent, else gathered."""
    if contiguous_slot >= 0:
        span = slice(contiguous_slot, contiguous_slot + kv_len)
        return _slots(k_cache)[span], _slots(v_cache)[span]
    num_blocks = -(-kv_len // k_cache.shape[1])
    blocks = block_table[:num_blocks].long()
    return _slots(k_cache[blocks])[:kv_len], _slots(v_cache[blocks])[:kv_len]


def _full_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Square causal attention of rows 0..n-1. q: [n, num_heads, head_dim]; k, v: [n, num_kv_heads, head_dim]."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        is_causal=True,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _scattered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    out: Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> None:
    """Rows in tiles, each against the keys from its first window start up to its last position. Writes `out`."""
    num_kv_heads, head_dim = k.shape[1], k.shape[2]
    group = q.shape[1] // num_kv_heads
    host = positions.tolist()
    for start in range(0, len(host), TILE_ROWS):
        stop = min(start + TILE_ROWS, len(host))
        lo = 0 if sliding_window is None else max(0, host[start] - sliding_window + 1)
        hi = host[stop - 1] + 1
        n = stop - start
        tile_pos = positions[start:stop, None]
        key_pos = torch.arange(lo, hi, device=q.device)[None]
        hidden = key_pos > tile_pos
        if sliding_window is not None:
            hidden |= key_pos <= tile_pos - sliding_window
        bias = torch.zeros(n, hi - lo, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
        tile_q = q[start:stop].view(n, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        tile_q = tile_q.reshape(1, num_kv_heads, group * n, head_dim)
        kt, vt = k[lo:hi].transpose(0, 1)[None], v[lo:hi].transpose(0, 1)[None]
        tile = _attend(tile_q, kt, vt, bias.repeat(group, 1), scale, soft_cap)
        out[start:stop] = tile.view(num_kv_heads, group, n, head_dim).permute(2, 0, 1, 3).reshape(n, -1, head_dim)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, soft_cap: float | None) -> Tensor:
    """softmax(cap(q k^T * scale) + bias) v. q: [1, heads, rows, dim]; k, v: [1, heads, keys, dim]."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    if soft_cap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    logits = (q.float() @ k.float().transpose(-1, -2)) * scale
    logits = soft_cap * torch.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + bias
    return (torch.softmax(logits, dim=-1) @ v.float()).to(q.dtype)


def _rope_into(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """out = x * cos + rotate_half(x) * sin, all fp32. x, out: [rows, heads, dim]; cos, sin: [rows, dim]."""
    half = x.shape[-1] // 2
    c, s = cos[:, None, :half], sin[:, None, :half]
    x1, x2 = x[..., :half], x[..., half:]
    torch.mul(x1, c, out=out[..., :half]).addcmul_(x2, s, value=-1)
    torch.mul(x2, c, out=out[..., half:]).addcmul_(x1, s)
