"""The MLP of a layer."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import torch
import torch.nn.functional as F
from cacheblend_kernels.torch_backend import ACTIVATIONS, TorchBackend
from torch import Tensor

from cacheblend_cli.model.host_memory import MOST_KEPT
from cacheblend_cli.model.linear import MappedLinear
from cacheblend_cli.model.module_weights import ModuleWeights

LEAST_MLP_ROWS, MLP_ROWS = 256, 1024  # every slice unpacks all weights
GPU_MLP_ROWS = 4096  # every slice reads all weights, and with few rows a GPU is memory-bound


class MLP:
    """Gate, up, activation and down; or up, activation and down if the spec has no gate. sparsity: share of the gate's
    channels that is cut off, see `sparse`; summed: sums over ranks that share the MLP."""

    def __init__(
        self, weights: ModuleWeights, sparsity: float = 0.0, summed: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._summed = summed
        self._deviations = NormalDist().inv_cdf(sparsity) if sparsity else None
        self._gated, self._activation, self._kernels = weights.spec.gated_mlp, weights.spec.activation, weights.kernels
        self._up, self._down = weights.product("gate_up_proj"), weights.product("down_proj")
        gates = self._gated and not sparsity and self._activation == "silu" and isinstance(self._kernels, TorchBackend)
        self._in_one = self._up if gates and isinstance(self._up, MappedLinear) else None  # product and activation

    def __call__(self, h: Tensor) -> Tensor:
        """h: [num_rows, hidden_size]. Returns the same shape. Slices of rows keep the widest activations small."""
        most = GPU_MLP_ROWS
        if h.device.type == "cpu":  # the widest activations fit into memory that the C library keeps
            width = self._up.num_outputs if self._in_one is None else self._up.num_outputs // 2
            most = max(LEAST_MLP_ROWS, min(MLP_ROWS, MOST_KEPT // (width * h.element_size())))
        if h.shape[0] <= most:
            return self._rows(h)
        # slices of about equal size: a small last one is the least efficient
        step = -(-h.shape[0] // -(-h.shape[0] // most))
        out = torch.empty_like(h)
        for start in range(0, h.shape[0], step):
            out[start : start + step] = self._rows(h[start : start + step])
        return out

    def _rows(self, h: Tensor) -> Tensor:
        if self._in_one is not None and (gated := self._in_one.silu_and_mul(h)) is not None:
            return self._down(gated)
        up = self._up(h)
        if self._deviations is not None:
            gate, up = up.chunk(2, dim=-1)
            return self._down(ACTIVATIONS[self._activation](sparse(gate, self._deviations, self._summed)) * up)
        if self._gated:
            return self._down(self._kernels.act_and_mul(up, self._activation))
        return self._down(ACTIVATIONS[self._activation](up))


def sparse(gate: Tensor, deviations: float, summed: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return each channel's excess over the row's mean plus `deviations` standard deviations, 0 if below (Gaussian
    top-k, Spark Transformer, arXiv 2506.06644). gate: [num_rows, width], same width on each rank; summed: sums over
    ranks."""
    wide = gate.float()
    if summed is None:
        std, mean = torch.std_mean(wide, dim=-1, keepdim=True, unbiased=False)
    else:
        width = summed(torch.full_like(wide[:, :1], wide.shape[-1]))
        mean = summed(wide.sum(-1, keepdim=True)) / width
        std = (summed((wide - mean).square().sum(-1, keepdim=True)) / width).sqrt()
    return F.relu(wide - (mean + deviations * std)).to(gate.dtype)
