"""Norms of the residual stream, and of what goes into it."""

from __future__ import annotations

import torch.nn.functional as F
from cacheblend_kernels import KernelBackend
from torch import Tensor

from cacheblend_cli.model.spec import ModelSpec


class Norm:
    """RMSNorm by the kernels, or LayerNorm by torch, as the spec says. bias: of a LayerNorm that has one."""

    def __init__(self, spec: ModelSpec, kernels: KernelBackend, weight: Tensor, bias: Tensor | None) -> None:
        self._eps, self._layer_norm, self._kernels = spec.rms_norm_eps, spec.layer_norm, kernels
        self.weight, self.bias = weight, bias
        self.num_bytes = sum(t.numel() * t.itemsize for t in (weight, bias) if t is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, hidden_size]."""
        if self._layer_norm:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)
        return self._kernels.rms_norm(x, self.weight, self._eps)

    def add(self, delta: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(the norm of delta + residual, delta + residual); residual may be updated in place."""
        if self._layer_norm:
            residual = residual.add_(delta)
            return self(residual), residual
        return self._kernels.add_rms_norm(delta, residual, self.weight, self._eps)


def add_and_norm(norm: Norm | None, delta: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """As `Norm.add`; without a norm both are the sum. The first is good until the residual is added to again."""
    if norm is not None:
        return norm.add(delta, residual)
    residual = residual.add_(delta)
    return residual, residual
