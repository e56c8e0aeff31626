"""Full prefill over adjacent keys by torch's SDPA, which our kernel is compared with."""

from __future__ import annotations

import torch.nn.functional as F
from cacheblend_kernels import LayerCache
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

PLANNED_ROWS = 256
SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def sdpa_prefill(q: Tensor, cache: LayerCache, first_slot: int, scale: float, kernel: str) -> Tensor:
    """Causal attention of rows 0..n-1, [n, num_heads, head_dim], over the pool's slots first_slot..first_slot + n - 1.

    kernel: the SDPA backend. cuDNN makes a plan per length, so lengths are padded to multiples of PLANNED_ROWS, with
    zeros after a copy of K and V, since unused slots of the pool may hold NaN. No row sees the padding.
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
