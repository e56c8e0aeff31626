"""copy_blocks of every backend's base: the right blocks, all pools, every dtype."""

from __future__ import annotations

import pytest
import torch
from cacheblend_kernels.torch_backend import TorchBackend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_copy_blocks(dtype: torch.dtype) -> None:
    pools = [torch.randn(6, 2, 3).to(dtype) for _ in range(2)]
    before = [p.float() for p in pools]
    TorchBackend().copy_blocks(pools, torch.tensor([4, 0]), torch.tensor([1, 5]))
    for old, new in zip(before, pools, strict=True):
        old[[1, 5]] = old[[4, 0]]
        assert torch.equal(new.float(), old)
