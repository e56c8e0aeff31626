"""Attention in torch, on any device: the reference for the others, and on CPUs for what is not compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from cacheblend_kernels import compiled
from cacheblend_kernels.interface import AttentionParams, LatentHeads

TILE_ROWS, PRODUCT_ROWS = 128, 448  # maximum rows of a tile, and of a product (a tile's rows for each head of a group)
LOGITS = 7 << 20
"""Maximum bytes of a product: 28 MiB. The C library requests blocks of more than 32 MiB from the system each time, page
by page, which takes six times as long as the product."""
KEY_STEP = 256
"""A tile's keys begin and end at multiples of this. oneDNN compiles a product for each shape (0.8 ms), and keeps only a
few of them."""
HEADS_AT_ONCE = 8  # number of heads whose K and V are computed from latents together


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, params: AttentionParams) -> Tensor:
    """softmax(cap(q k^T * scale)) v of one sequence, causal by position.

    q: [num_rows, num_heads, head_dim]; positions: [num_rows], strictly increasing; k, v: [kv_len, num_kv_heads,
    head_dim], V's may differ. Returns [num_rows, num_heads, head_dim of V].

    One KV head and one tile of rows at a time, each against the keys from the start of its first window to its last
    position: no N x N mask is materialised. Logits and softmax are fp32, for 16-bit q too. On a CPU this takes half to
    three quarters of the time of torch's SDPA.
    """
    (num_keys, num_kv_heads, head_dim), group = k.shape, q.shape[1] // k.shape[1]
    tiles = list(_tiles(positions, group, params.sliding_window))
    last = tiles[-1].last
    num_keys = min(num_keys, last)
    keys = torch.zeros(last, head_dim, device=q.device)
    values = torch.zeros(last, v.shape[-1], dtype=q.dtype, device=q.device)
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    for head in range(num_kv_heads):
        own = slice(head * group, (head + 1) * group)
        keys[:num_keys], values[:num_keys] = k[:num_keys, head], v[:num_keys, head]
        queries = q[:, own].transpose(0, 1).float() * params.scale
        span, columns = (0, 0), values
        for tile in reversed(tiles):  # largest first: the memory freed by one tile fits the next
            logits = _product(queries[:, tile.rows].flatten(0, 1), keys[tile.first : tile.last])
            logits = _capped(logits, params).unflatten(0, (group, -1))
            logits[..., tile.clear - tile.first :] += tile.bias
            shares = _softmax(logits, None if params.sinks is None else params.sinks[own]).to(q.dtype)
            if span != (tile.first, tile.last):
                span, columns = (tile.first, tile.last), values[tile.first : tile.last].t().contiguous()
            attended = _product(shares.flatten(0, 1), columns)
            out[tile.rows, own] = attended.unflatten(0, (group, -1)).transpose(0, 1)
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, params: AttentionParams) -> Tensor:
    """`prefill_attention`, by compiled code where that supports it."""
    fused = compiled.prefill_attention(q, k, v, positions, params)
    return prefill_attention(q, k, v, positions, params) if fused is None else fused


def decode_attention(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    """`prefill_attention` of one row at the last position. q: [num_heads, head_dim]."""
    if params.sliding_window is not None:
        k, v = k[-params.sliding_window :], v[-params.sliding_window :]
    num_kv_heads, head_dim = k.shape[1:]
    # one small product per group: K and V are read once, not repeated
    grouped = q.float().view(num_kv_heads, -1, head_dim)
    # in fp32: in 16 bits oneDNN would compile and keep a product for every number of keys, one per step
    logits = _capped((grouped @ k.float().permute(1, 2, 0)).mul_(params.scale), params)
    shares = _softmax(logits, None if params.sinks is None else params.sinks.view(num_kv_heads, -1))
    return (shares @ v.float().transpose(0, 1)).view(q.shape).to(q.dtype)


def latent_attention(
    q: Tensor, stored: tuple[Tensor, Tensor], positions: Tensor, params: AttentionParams, heads: LatentHeads
) -> Tensor:
    """`prefill_attention` of one sequence over latents.

    q: [num_rows, num_heads, nope_dim + rope_dim]; stored: position keys [kv_len, rope_dim] and latents [kv_len, rank].

    Expanded for many rows: each head's K and V are computed from the latents, HEADS_AT_ONCE at a time. Absorbed for few
    rows, as in decoding: K's up-projection is applied to q, V's to the output, and all heads attend to the latents
    themselves (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). The form with fewer multiplications is used.
    """
    assert params.plain, "models with latents have no windows, caps, sinks or slopes"
    (num_heads, nope, rank), value_dim = heads.keys.shape, heads.values.shape[1]
    last = int(positions[-1]) + 1
    k, latents = (part[:last] for part in stored)
    if len(q) * (2 * rank - nope - value_dim) > rank * (nope + value_dim):
        out = q.new_empty(*q.shape[:2], value_dim)
        for start in range(0, num_heads, HEADS_AT_ONCE):
            own = slice(start, start + HEADS_AT_ONCE)
            made_k, made_v = (
                _product(latents, part[own].flatten(0, 1)).unflatten(-1, (-1, part.shape[1]))
                for part in (heads.keys, heads.values)
            )
            keys = torch.cat((made_k, k[:, None].expand(-1, made_k.shape[1], -1)), -1)
            out[:, own] = attend(q[:, own], keys, made_v, positions, params)
        return out
    absorbed = torch.einsum("nhd,hdr->nhr", q[..., :nope], heads.keys)
    if len(q) == 1:  # two products of q: nothing of the pool is copied except to fp32 for the softmax
        wide = latents.float()
        logits = q[0, :, nope:].float() @ k.float().T
        shares = _softmax(logits.addmm_(absorbed[0].float(), wide.T).mul_(params.scale)[None], None)[0]
        attended = (shares @ wide)[None].to(q.dtype)
    else:
        rows, keys = torch.cat((absorbed, q[..., nope:]), -1), torch.cat((latents, k), -1)
        attended = attend(rows, keys[:, None], latents[:, None], positions, params)
    return torch.einsum("nhr,hdr->nhd", attended, heads.values)


@dataclass(frozen=True)
class _Tile:
    """Rows computed together, and the range of keys they see."""

    rows: slice
    first: int  # first key
    clear: int  # all rows see the keys before this one
    last: int  # end of the keys
    bias: Tensor  # fp32 [num_rows, last - clear], -inf where a row does not see the key


def _tiles(positions: Tensor, group: int, window: int | None) -> Iterator[_Tile]:
    """Yield the tiles of the rows. group: query heads per KV head."""
    host, start = positions.tolist(), 0
    while start < len(host):
        first = 0 if window is None else max(0, host[start] - window + 1) // KEY_STEP * KEY_STEP
        stop = min(start + max(1, min(TILE_ROWS, PRODUCT_ROWS // group)), len(host))
        fitting = LOGITS // group // (host[stop - 1] + 1 - first)
        rows = slice(start, min(stop, start + max(1, fitting)))
        clear = host[start] + 1 if window is None else first
        last = -(-(host[rows.stop - 1] + 1) // KEY_STEP) * KEY_STEP
        key, row = torch.arange(clear, last, device=positions.device), positions[rows, None]
        hidden = key > row if window is None else (key > row) | (key <= row - window)
        bias = torch.zeros(hidden.shape, device=positions.device).masked_fill_(hidden, float("-inf"))
        yield _Tile(rows, first, clear, last, bias)
        start = rows.stop


def _capped(logits: Tensor, params: AttentionParams) -> Tensor:
    cap = params.soft_cap
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension, with one extra logit if there are sinks. logits: fp32 [heads, rows, keys], may
    be overwritten. sinks: [heads], or [heads, rows]."""
    if sinks is None:
        return torch.softmax(logits, -1, out=logits)
    sink = (sinks[:, None] if sinks.dim() == 1 else sinks)[..., None].expand(*logits.shape[:-1], 1)
    return torch.softmax(torch.cat((logits, sink), -1), -1)[..., :-1]


@cache
def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies in this dtype on this CPU, by trying it. bf16 requires AVX-512 or
    AVX-NE-CONVERT, which most desktop and laptop CPUs lack."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    x = torch.ones(16, 64, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.ones(64, 64, dtype=dtype))
        for weight in (packed, torch.ones(64, 64, dtype=dtype)):
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return True


def _product(x: Tensor, w: Tensor) -> Tensor:
    """x w^T by oneDNN where possible: MKL takes two to three times as long. x: [rows, in]; w: [out, in], contiguous."""
    if x.device.type == "cpu" and onednn_multiplies(x.dtype):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), w, None, "none", [], "")
        return out
    return F.linear(x, w)
