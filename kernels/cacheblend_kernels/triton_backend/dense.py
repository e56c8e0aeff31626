"""A full prefill over adjacent keys by torch's own attention, where `configs.DENSE_ROUTES` says that it is faster than ours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cacheblend_kernels.interface import AttentionMetadata, LayerCache

HALVES = (torch.float16, torch.bfloat16)
PLANNED_ROWS = 256
SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def is_full(q: Tensor, cache: LayerCache, meta: AttentionMetadata) -> bool:
    """Whether the rows are all positions of one sequence in adjacent blocks: known without the device."""
    whole = meta.contiguous_slot >= 0 and 0 < meta.num_rows == meta.max_kv_len
    return whole and q.dtype in HALVES and q.dtype == cache.k.dtype


def sdpa_prefill(q: Tensor, cache: LayerCache, first_slot: int, scale: float, kernel: str) -> Tensor:
    """Causal attention of rows 0..n-1, [n, num_heads, head_dim], over the pool's slots first_slot..first_slot + n - 1.

    kernel: of SDPA. cuDNN makes a plan for every length, so lengths are padded to multiples of PLANNED_ROWS: with zeros
    behind a copy of K and V, since what lies behind them in the pool may be no number. No row sees the padding.
    """
    num_rows, (num_kv_heads, head_dim) = q.shape[0], cache.k.shape[2:]
    missing = -num_rows % PLANNED_ROWS if kernel == "cudnn" else 0

    def laid_out(x: Tensor) -> Tensor:  # [1, heads, rows, head_dim]
        return (F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x).transpose(0, 1)[None]

    k, v = (pool.view(-1, num_kv_heads, head_dim)[first_slot : first_slot + num_rows] for pool in (cache.k, cache.v))
    with sdpa_kernel(SDPA[kernel]):
        out = F.scaled_dot_product_attention(
            laid_out(q), laid_out(k), laid_out(v), is_causal=True, scale=scale, enable_gqa=True
        )
    return out[0].transpose(0, 1)[:num_rows].contiguous()
