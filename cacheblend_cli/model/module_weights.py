"""Weights of a layer, or those outside the layers, and the products and norms made of them."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, replace

import torch.nn.functional as F
from cacheblend_kernels import KernelBackend
from torch import Tensor

from cacheblend_cli.model.linear import Linear, MappedLinear, Weight, linear
from cacheblend_cli.model.spec import ModelSpec


class Norm:
    """RMSNorm by the kernels, or LayerNorm by torch. bias: the bias of a LayerNorm, or None."""

    def __init__(
        self, kernels: KernelBackend, weight: Tensor, eps: float, bias: Tensor | None = None, layer_norm: bool = False
    ) -> None:
        self._kernels, self._eps, self._layer_norm = kernels, eps, layer_norm
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, width of the norm], or heads of that width. Returns the same shape."""
        if self._layer_norm:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)
        return self._kernels.rms_norm(x, self.weight, self._eps)

    def add(self, delta: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm of delta + residual, delta + residual); residual may be updated in place."""
        if self._layer_norm:
            residual = residual.add_(delta)
            return self(residual), residual
        return self._kernels.add_rms_norm(delta, residual, self.weight, self._eps)


@dataclass(frozen=True)
class ModuleWeights:
    """Weights with their kernels."""

    spec: ModelSpec
    weights: MutableMapping[str, Weight]  # by name, in a layer without the layer's number
    kernels: KernelBackend

    def layer(self, index: int) -> ModuleWeights:
        """Take a layer's weights out of the model's."""
        own = [name for name in self.weights if name.startswith(f"{index}.")]
        return replace(self, weights={name.split(".", 1)[1]: self.weights.pop(name) for name in own})

    def tensor(self, name: str) -> Tensor:
        """Return a weight that is not in a table."""
        held = self.weights[name]
        assert isinstance(held, Tensor)
        return held

    def optional(self, name: str) -> Tensor | None:
        """Return a weight that is not in a table; None if the model has none of this name."""
        return self.tensor(name) if name in self.weights else None

    def product(self, name: str) -> Linear | MappedLinear:
        """Return the product with a weight and, if there is one, its bias."""
        return linear(self.weights[f"{name}.weight"], self.optional(f"{name}.bias"))

    def norm(self, name: str) -> Norm:
        bias = self.optional(f"{name}.bias")
        return Norm(self.kernels, self.tensor(f"{name}.weight"), self.spec.rms_norm_eps, bias, self.spec.layer_norm)
