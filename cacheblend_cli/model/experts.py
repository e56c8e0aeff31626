"""A mixture of experts in place of a layer's MLP."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from cacheblend_kernels import KernelBackend
from torch import Tensor

from cacheblend_cli.model.mlp import MLP
from cacheblend_cli.model.spec import ExpertsSpec, ModelSpec

MOST_ROWS = 4096  # in one turn: with fewer, an expert's weights are read for few rows each time


class Experts:
    """A router chooses per_token experts for each row. Rows are sorted by expert, and each expert that was chosen computes
    its rows in one product; how many there are is asked of the device, so no CUDA graph can hold it."""

    def __init__(
        self, spec: ModelSpec, experts: ExpertsSpec, weights: Mapping[str, Tensor], kernels: KernelBackend
    ) -> None:
        self._spec, self._activation, self._kernels = experts, spec.activation, kernels
        self._router, self._shared_gate = weights["router"], weights.get("shared_gate")
        self._up = weights["experts_up"].unflatten(0, (experts.count, -1))  # [count, 2 * width, hidden_size]
        self._down = weights["experts_down"].unflatten(0, (experts.count, -1))  # [count, hidden_size, width]
        self._shared = MLP(spec, weights, kernels) if experts.shared_width else None
        own = (self._router, self._up, self._down, self._shared_gate)
        self.num_bytes = sum(t.numel() * t.itemsize for t in own if t is not None)
        self.num_bytes += 0 if self._shared is None else self._shared.num_bytes

    def __call__(self, h: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> the same."""
        out = torch.cat([self._rows(part) for part in h.split(MOST_ROWS)]) if len(h) > MOST_ROWS else self._rows(h)
        if self._shared is None or self._shared_gate is None:
            return out
        return out + torch.sigmoid(F.linear(h, self._shared_gate)) * self._shared(h)

    def _rows(self, h: Tensor) -> Tensor:
        weights, chosen = F.linear(h, self._router).softmax(-1, dtype=torch.float32).topk(self._spec.per_token, dim=-1)
        if self._spec.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        rows, shares = order // self._spec.per_token, weights.flatten()[order].to(h.dtype)
        counts = torch.bincount(chosen.flatten(), minlength=self._spec.count).tolist()
        out, start = torch.zeros_like(h), 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            mine = slice(start, start + count)
            up = F.linear(h[rows[mine]], self._up[expert])
            added = F.linear(self._kernels.act_and_mul(up, self._activation), self._down[expert])
            out.index_add_(0, rows[mine], added * shares[mine, None])
            start += count
        return out
