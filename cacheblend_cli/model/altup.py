"""Several residual streams per token (AltUp, arXiv 2301.13310), and a low-rank residual branch (LAuReL, arXiv
2411.07501), as in Gemma 3n.

A layer computes with the active stream only. The other streams are predicted from all streams before the layer, and
corrected by the change of the active one. Every step is per token: a row never needs the streams of another row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cacheblend_cli.model.module_weights import ModuleWeights, Norm
from cacheblend_cli.model.spec import StreamsSpec

LEAST_MAGNITUDE = 1e-5  # minimum of a stream's mean square


class Streams:
    """Expand the embedding to the streams, and merge the streams to the input of the final norm. weights: those
    outside the layers."""

    def __init__(self, weights: ModuleWeights, streams: StreamsSpec) -> None:
        self._split, self._merge = (
            [weights.product(f"{n}.{i}") for i in range(1, streams.count)] for n in ("streams_in", "streams_out")
        )

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
    """Prediction of the streams before a layer, and their correction after it."""

    def __init__(self, weights: ModuleWeights, streams: StreamsSpec) -> None:
        self.active, self._count = streams.active, streams.count
        norm = weights.tensor("streams_norm.weight").float() / weights.spec.hidden_size
        self._norm = Norm(weights.kernels, norm, weights.spec.rms_norm_eps)
        self._router, self._predict, self._correct = (
            weights.product(f"streams_{name}") for name in ("router", "predict", "correct")
        )
        self._scale = weights.tensor("streams_scale") if streams.scaled else None

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
        """Return the active stream, scaled per channel if the model does so."""
        active = corrected[:, self.active]
        return active.contiguous() if self._scale is None else active * self._scale

    def _modalities(self, h: Tensor) -> Tensor:
        """Return the router's output [num_rows, streams]. h: [num_rows, hidden_size]."""
        return torch.tanh(self._router(self._norm(h.contiguous())).float()).to(h.dtype)


class LowRank:
    """x + norm(right(left(x)))."""

    def __init__(self, weights: ModuleWeights) -> None:
        self._left, self._right = weights.product("laurel_left"), weights.product("laurel_right")
        self._norm = weights.norm("laurel_norm")

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, hidden_size]. Returns the same shape."""
        return x + self._norm(self._right(self._left(x)))


def _as_large(h: Tensor, model: Tensor) -> Tensor:
    """Return h scaled, row by row, to the root mean square of `model`."""
    wanted, found = (x.float().square().mean(-1, keepdim=True) for x in (model, h))
    return (h.float() * wanted.sqrt() / found.clamp(min=LEAST_MAGNITUDE).sqrt()).to(h.dtype)
