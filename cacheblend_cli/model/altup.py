"""Several residual streams a token (AltUp, arXiv 2301.13310), and a residual branch of low rank (LAuReL, arXiv 2411.07501), as in Gemma 3n.

A layer computes with one of the streams, the active one; the others are predicted from all streams before it, and corrected by
what it changed. Every step is of one token alone: a row needs the streams of no other row.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from cacheblend_kernels import KernelBackend
from torch import Tensor

from cacheblend_cli.model.linear import Linear, linear
from cacheblend_cli.model.spec import ModelSpec, StreamsSpec

LEAST_MAGNITUDE = 1e-5  # of a stream's mean square


class Streams:
    """Expansion of the embedding to the streams, and of the streams to the input of the final norm. Its weights are taken out of `weights`."""

    def __init__(self, spec: ModelSpec, weights: MutableMapping[str, Tensor], weight_dtype: str) -> None:
        assert spec.streams is not None
        others = range(1, spec.streams.count)
        split, merge = ([weights.pop(f"{name}.{i}.weight") for i in others] for name in ("streams_in", "streams_out"))
        self._split = [linear(weight, weight_dtype=weight_dtype) for weight in split]
        self._merge = [linear(weight, weight_dtype=weight_dtype) for weight in merge]

    def split(self, h: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, streams, hidden_size], all of the first one's magnitude."""
        return torch.stack([h, *(_as_large(project(h), h) for project in self._split)], dim=1)

    def merge(self, streams: Tensor) -> Tensor:
        """[num_rows, streams, hidden_size] -> their mean [num_rows, hidden_size], each brought to the first one's magnitude."""
        first = streams[:, 0].contiguous()
        others = (
            _as_large(project(streams[:, i].contiguous()), first) for i, project in enumerate(self._merge, start=1)
        )
        return torch.stack([first, *others]).mean(0)


class AltUp:
    """A layer's prediction of the streams before it, and their correction after it. weights: those of the layer."""

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
        """[num_rows, streams, hidden_size] -> the same: each stream plus a mixture of all that the active one decides."""
        mixture = self._predict(self._modalities(streams[:, self.active]))
        return torch.baddbmm(streams, mixture.view(-1, self._count, self._count), streams)

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """Move each stream by a part of what the layer made of the active one. computed: [num_rows, hidden_size]."""
        parts = self._correct(self._modalities(computed)) + 1
        innovation = computed - predicted[:, self.active]
        return torch.addcmul(predicted, parts[:, :, None], innovation[:, None])

    def scaled(self, corrected: Tensor) -> Tensor:
        """The active stream, times a factor a channel where the model has one."""
        active = corrected[:, self.active]
        return active.contiguous() if self._scale is None else active * self._scale

    def _modalities(self, h: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, streams]."""
        normed = self._kernels.rms_norm(h.contiguous(), self._router_norm, self._eps)
        return torch.tanh(self._router(normed).float()).to(h.dtype)


class LowRank:
    """x + norm(right(left(x))). weights: those of the layer."""

    def __init__(
        self, spec: ModelSpec, weights: MutableMapping[str, Tensor], kernels: KernelBackend, weight_dtype: str
    ) -> None:
        self._left = linear(weights["laurel_left.weight"], weight_dtype=weight_dtype)
        self._right = linear(weights["laurel_right.weight"], weight_dtype=weight_dtype)
        self._norm, self._kernels, self._eps = weights["laurel_norm.weight"], kernels, spec.rms_norm_eps

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> the same."""
        return x + self._kernels.rms_norm(self._right(self._left(x)), self._norm, self._eps)


def _as_large(h: Tensor, model: Tensor) -> Tensor:
    """h with the root mean square of `model`, row by row."""
    wanted, found = (x.float().square().mean(-1, keepdim=True) for x in (model, h))
    return (h.float() * wanted.sqrt() / found.clamp(min=LEAST_MAGNITUDE).sqrt()).to(h.dtype)
