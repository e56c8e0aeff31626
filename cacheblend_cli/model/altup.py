"""Several residual streams per token (AltUp, arXiv 2301.13310), and a low-rank residual branch (LAuReL, arXiv
2411.07501), as in Gemma 3n.

A layer computes with the active stream only. The other streams are predicted from all streams before the layer, and
corrected by the change of the active one. Every step is per token: a row never needs the streams of another row.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from cacheblend_kernels import KernelBackend
from torch import Tensor

from cacheblend_cli.model.linear import Linear, linear
from cacheblend_cli.model.spec import ModelSpec, StreamsSpec

LEAST_MAGNITUDE = 1e-5  # minimum of a stream's mean square


class Streams:
    """Expand the embedding to the streams, and merge the streams to the input of the final norm. Takes its weights out
    of `weights`."""

    def __init__(self, spec: ModelSpec, weights: MutableMapping[str, Tensor], weight_dtype: str) -> None:
        assert spec.streams is not None
        others = range(1, spec.streams.count)
        split, merge = ([weights.pop(f"{name}.{i}.weight") for i in others] for name in ("streams_in", "streams_out"))
        self._split = [linear(weight, weight_dtype=weight_dtype) for weight in split]
        self._merge = [linear(weight, weight_dtype=weight_dtype) for weight in merge]

    def split(self, h: Tensor) -> Tensor:
        """Return [num_rows, streams, hidden_size] of h [num_rows, hidden_size], all of the first stream's magnitude."""
        return torch.stack([h, *(_as_large(project(h), h) for project in self._split)], dim=1)

    def merge(self, streams: Tensor) -> Tensor:
        """Return the mean [num_rows, hidden_size] of the streams, each scaled row by row to the first's size."""
        first = streams[:, 0].contiguous()
        others = (
            _as_large(project(streams[:, i].contiguous()), first) for i, project in enumerate(self._merge, start=1)
        )
        return torch.stack([first, *others]).mean(0)


class AltUp:
    """Prediction of the streams before a layer, and their correction after it. weights: the layer's weights."""

    def __init__(
        self, spec: ModelSpec, streams: StreamsSpec, weights: MutableMapping[str, Tensor], kernels: KernelBackend
    ) -> None:
        self.active, self._count = streams.active, streams.count
        self._kernels, self._eps = kernels, spec.rms_norm_eps
        self._router_norm = weights["streams_norm.weight"].float() / spec.hidden_size
        self._router, self._predict, self._correct = (
            Linear(weights[f"streams_{name}.weight"]) for name in ("router", "predict", "correct")
        )
        self._scale = weights["streams_scale"] if streams.scaled else None

    def predict(self, streams: Tensor) -> Tensor:
        """Return each stream plus a mixture of all, weighted by the active one: [num_rows, streams, hidden_size]."""
        mixture = self._predict(self._modalities(streams[:, self.active]))
        return torch.baddbmm(streams, mixture.view(-1, self._count, self._count), streams)

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """Add to each stream a share of the active stream's change in the layer. computed: [num_rows, hidden_size]."""
        parts = self._correct(self._modalities(computed)) + 1
        innovation = computed - predicted[:, self.active]
        return torch.addcmul(predicted, parts[:, :, None], innovation[:, None])

    def scaled(self, corrected: Tensor) -> Tensor:
        """Return the active stream, scaled per channel where the model does so."""
        active = corrected[:, self.active]
        return active.contiguous() if self._scale is None else active * self._scale

    def _modalities(self, h: Tensor) -> Tensor:
        """Return the router's output [num_rows, streams]. h: [num_rows, hidden_size]."""
        normed = self._kernels.rms_norm(h.contiguous(), self._router_norm, self._eps)
        return torch.tanh(self._router(normed).float()).to(h.dtype)


class LowRank:
    """x + norm(right(left(x))). weights: the layer's weights."""

    def __init__(
        self, spec: ModelSpec, weights: MutableMapping[str, Tensor], kernels: KernelBackend, weight_dtype: str
    ) -> None:
        self._left = linear(weights["laurel_left.weight"], weight_dtype=weight_dtype)
        self._right = linear(weights["laurel_right.weight"], weight_dtype=weight_dtype)
        self._norm, self._kernels, self._eps = weights["laurel_norm.weight"], kernels, spec.rms_norm_eps

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, hidden_size]. Returns the same shape."""
        return x + self._kernels.rms_norm(self._right(self._left(x)), self._norm, self._eps)


def _as_large(h: Tensor, model: Tensor) -> Tensor:
    """Return h scaled, row by row, to the root mean square of `model`."""
    wanted, found = (x.float().square().mean(-1, keepdim=True) for x in (model, h))
    return (h.float() * wanted.sqrt() / found.clamp(min=LEAST_MAGNITUDE).sqrt()).to(h.dtype)
