"""Matrix products with a model's weights, laid out as the device multiplies them fastest."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PACKABLE = (torch.float32, torch.bfloat16)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can keep this weight in a layout of its own: on a CPU it then multiplies about twice as fast in fp32,
    and a third faster in bf16 (benchmarks/results/linear.md)."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in PACKABLE
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class Linear:
    """x -> x W^T + b. weight: [out, in], or what oneDNN made of it, which only it can read; bias: [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = True) -> None:
        self.bias = bias
        self.num_bytes = weight.numel() * weight.element_size() + (0 if bias is None else bias.numel() * bias.itemsize)
        self.packed = pack and can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, in] -> [num_rows, out]."""
        if self.packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return out
        return F.linear(x, self.weight, self.bias)
