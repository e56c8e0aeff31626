"""The torch backend: any device, the reference of the others, and what the CPU runs on.

The pool of a single request is contiguous, so keys are attended over as a view and nothing is copied. Rows are
taken in tiles, each against the keys up to its last position: no N x N mask is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from cacheblend_kernels import compiled_load
from cacheblend_kernels.interface import AttentionMetadata, KernelBackend, KernelError

TILE_ROWS = 64  # measured on 2 CPU cores: 32 to 128 are within 10 % of each other
BLOCK_VALUES = 1 << 17  # of K in one step of loading on a CPU: large enough to be worth the calls, and still cached

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
        if pool_k_scale is not None and pool_v_scale is not None:
            if k_scale is not None and v_scale is not None:
                k, v = dequantize(k, v, k_scale, v_scale, k_zero, v_zero, group_size, k_cache.shape[-1])
            if first_slot >= 0:
                slot_mapping = torch.arange(first_slot, first_slot + k.shape[0], device=k.device)
            rotated = torch.empty(k.shape, dtype=torch.float32, device=k.device)
            _rope_rows(k.float(), cos, sin, rotated)
            _write_float8(rotated, pool_k_scale, k_cache, slot_mapping)
            _write_float8(v.float(), pool_v_scale, v_cache, slot_mapping)
            return
        scales = (k_scale, k_zero, v_scale, v_zero)
        if compiled_load.load_kv(k, v, cos, sin, k_cache, v_cache, slot_mapping, first_slot, scales, group_size):
            return
        k_slots, v_slots = _slots(k_cache), _slots(v_cache)
        for rows in _blocks(k.shape[0], k_slots.shape[1] * k_slots.shape[2], group_size, k.device):
            own_k, own_v = _dequantized_rows(
                rows, k, v, k_scale, v_scale, k_zero, v_zero, group_size, k_cache.shape[-1]
            )
            if first_slot >= 0 and k_slots.dtype == torch.float32:
                span = slice(first_slot + rows.start, first_slot + rows.stop)
                _rope_rows(own_k.float(), _taken(cos, rows), _taken(sin, rows), k_slots[span])
                v_slots[span].copy_(own_v)
                continue
            rotated = torch.empty(own_k.shape, dtype=torch.float32, device=k.device)
            _rope_rows(own_k.float(), _taken(cos, rows), _taken(sin, rows), rotated)
            if first_slot >= 0:
                span = slice(first_slot + rows.start, first_slot + rows.stop)
                k_slots[span].copy_(rotated)
                v_slots[span].copy_(own_v)
            else:
                k_slots.index_copy_(0, slot_mapping[rows], rotated.to(k_cache.dtype))
                v_slots.index_copy_(0, slot_mapping[rows], own_v.to(v_cache.dtype))

    def rope_tables(self, cos: Tensor, sin: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor]:
        num_rows, head_dim = cos.shape
        short_loops = cos.device.type == "cpu" and head_dim <= 64  # in a broadcast
        if not short_loops or compiled_load.compiled_function() is not None:
            return cos, sin
        half = (num_rows, num_kv_heads, head_dim // 2)
        return (
            cos[:, None].expand(num_rows, num_kv_heads, head_dim).contiguous(),
            sin[:, None, : half[2]].expand(half).contiguous(),
        )

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        _rope_rows(x.float(), cos, sin, out)
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
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        if kind not in ("k", "v", "kv"):
            raise KernelError(f"unknown deviation {kind!r}", "known: k, v, kv")
        score = torch.zeros(k.shape[0], dtype=torch.float32, device=k.device)
        for fresh, cache, scale, part in ((k, k_cache, k_scale, "k"), (v, v_cache, v_scale, "v")):
            if part in kind:
                old = _unscaled(_slots(cache)[slot_mapping], scale, torch.float32)
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
        return _float8_values(k) * k_scale[:, None], _float8_values(v) * v_scale[:, None]
    if k.dtype != torch.uint8 or k_zero is None or v_zero is None:
        raise KernelError(f"{k.dtype} with scales is no stored form", "float8_e4m3fn, or uint8 with zero points")
    if k.shape[-1] != head_dim:
        k, v = _nibbles(k), _nibbles(v)
    values = k.float()
    whole = k.shape[0] // group_size
    grouped = values[: whole * group_size].view(whole, group_size, *k.shape[1:])
    torch.addcmul(k_zero[:whole, None], grouped, k_scale[:whole, None], out=grouped)
    if len(k_scale) > whole:  # the last group is short
        rest = values[whole * group_size :]
        torch.addcmul(k_zero[whole], rest, k_scale[whole], out=rest)
    return values, torch.addcmul(v_zero, v.float(), v_scale)


def _dequantized_rows(
    rows: slice,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_zero: Tensor | None,
    v_zero: Tensor | None,
    group_size: int,
    head_dim: int,
) -> tuple[Tensor, Tensor]:
    """K and V of the rows, which begin at a group: as they are, or in fp32 where there are scales."""
    if k_scale is None or v_scale is None:
        return _taken(k, rows), _taken(v, rows)
    if k_zero is not None and v_zero is not None:
        groups = slice(rows.start // group_size, -(-rows.stop // group_size))
        k_scale, k_zero, v_scale, v_zero = k_scale[groups], k_zero[groups], v_scale[rows], v_zero[rows]
    return dequantize(k[rows], v[rows], k_scale, v_scale, k_zero, v_zero, group_size, head_dim)


def _blocks(num_rows: int, row_values: int, group_size: int, device: torch.device) -> Iterator[slice]:
    """Rows to load at a time, whole groups of them; all at once where no cache has to hold them."""
    step = max(1, BLOCK_VALUES // row_values // group_size) * group_size if device.type == "cpu" else max(1, num_rows)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _taken(x: Tensor, rows: slice) -> Tensor:
    """x[rows], itself where that is all of it: a loader asks often, and a view takes a microsecond."""
    return x if rows.stop - rows.start == x.shape[0] else x[rows]


def _nibbles(packed: Tensor) -> Tensor:
    """Codes [..., head_dim] uint8 of [..., head_dim / 2] bytes, the even ones from the low four bits.

    In passes that a CPU vectorises: byte b as 16 bits (b << 4 | b) & 0x0F0F holds the low code, then the high one.
    """
    pairs = packed.to(torch.int16)
    pairs |= pairs << 4
    pairs &= 0x0F0F
    return pairs.view(torch.uint8)


def _float8_values(codes: Tensor) -> Tensor:
    """float8_e4m3fn -> fp32. On a CPU through float16, whose bits it has with an exponent that is smaller by 8: torch's
    own conversion takes the values one by one there. A NaN, which no codec writes, stays one."""
    if codes.device.type != "cpu":
        return codes.float()
    wide = codes.view(torch.int8).to(torch.int16)
    wide <<= 7
    wide &= -0x4001
    values = wide.view(torch.float16).float().mul_(256.0)
    if values.numel() and max(map(abs, map(float, values.aminmax()))) > 448:
        values[values.abs() > 448] = torch.nan
    return values


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


def _rope_rows(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """out = x * cos + rotate_half(x) * sin, all fp32. x, out: [rows, heads, dim]; cos, sin: [rows, dim], or as
    `TorchBackend.rope_tables` makes them."""
    if cos.dim() == 2:
        cos, sin = cos[:, None], sin[:, None, : x.shape[-1] // 2]
    torch.mul(x, cos, out=out)
    (x1, x2), (out1, out2) = x.chunk(2, -1), out.chunk(2, -1)
    out1.addcmul_(x2, sin, value=-1)
    out2.addcmul_(x1, sin)
