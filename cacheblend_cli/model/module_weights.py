"""Weights of a layer, or those outside the layers, and the products and norms made of them."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, replace

import torch.nn.functional as F
from cacheblend_kernels import KernelBackend
from torch import Tensor

from cacheblend_cli.model.linear import Int8Linear, Linear, linear
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
    """Weights, with their kernels and storage (`weight_dtype`, see `linear`). Parts of a model do not keep this object,
    so that the original of a packed weight is freed."""

    spec: ModelSpec
    tensors: MutableMapping[str, Tensor]  # by name, in a layer without the layer's number
    kernels: KernelBackend
    weight_dtype: str = "auto"

    def layer(self, index: int) -> ModuleWeights:
        """Take a layer's weights out of the model's."""
        own = [name for name in self.tensors if name.startswith(f"{index}.")]
        return replace(self, tensors={name.split(".", 1)[1]: self.tensors.pop(name) for name in own})

    def product(self, name: str) -> Linear | Int8Linear:
        """Return the product with a weight and, if there is one, its bias."""
        return linear(self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"), weight_dtype=self.weight_dtype)

    def norm(self, name: str) -> Norm:
        bias = self.tensors.get(f"{name}.bias")
        return Norm(self.kernels, self.tensors[f"{name}.weight"], self.spec.rms_norm_eps, bias, self.spec.layer_norm)
