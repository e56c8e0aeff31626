"""Host values on the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int] | Tensor, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Host values [n] as a tensor on `device`. On CUDA through pinned memory: the copy is queued, nothing waits."""
    if device.type != "cuda":
        return torch.as_tensor(values, dtype=dtype, device=device)
    return torch.as_tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)
