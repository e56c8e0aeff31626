"""Inputs of each layer that depend only on the token (per-layer embeddings), as in Gemma 4 and 3n."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import torch
import torch.nn.functional as F
from cacheblend_kernels import KernelBackend
from cacheblend_kernels.torch_backend import ACTIVATIONS
from torch import Tensor

from cacheblend_cli.model.linear import linear
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.weight_map import TOKEN_EMBEDDING


class TokenInputs:
    """Inputs of all layers: a second embedding of the token, plus a normed projection of its first one.

    A layer's inputs are computed when it needs them: rows drop out from layer to layer. embed: `Decoder.embed`. The
    weights are taken out of `weights`; the embedding may be in the checkpoint's dtype, mapped from its file.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: MutableMapping[str, Tensor],
        kernels: KernelBackend,
        embed: Callable[[Tensor], Tensor],
        weight_dtype: str,
    ) -> None:
        self._width, self._eps, self._kernels, self._embed = spec.token_width, spec.rms_norm_eps, kernels, embed
        self._embedding, self._norm = weights.pop(TOKEN_EMBEDDING), weights.pop("token_norm.weight")
        parts = weights.pop("token_model.weight").split(self._width)
        self._project = [linear(part, weight_dtype=weight_dtype) for part in parts]
        self._scales = spec.hidden_size**-0.5, spec.token_width**0.5

    def of_layer(self, token_ids: Tensor, layer: int) -> Tensor:
        """Return a layer's inputs, [num_rows, token_width]."""
        # Gemma 3n's vocabulary is larger than this one
        known = torch.where(token_ids < len(self._embedding), token_ids, 0)
        columns = slice(layer * self._width, (layer + 1) * self._width)
        projected = self._project[layer](self._embed(token_ids)) * self._scales[0]
        own = F.embedding(known, self._embedding[:, columns]).to(projected.dtype) * self._scales[1]
        return (self._kernels.rms_norm(projected, self._norm, self._eps) + own) * 2**-0.5


class TokenInput:
    """A layer's use of its input: norm(up(activation(gate(h)) * input)), added to the residual stream."""

    def __init__(
        self, spec: ModelSpec, weights: MutableMapping[str, Tensor], kernels: KernelBackend, weight_dtype: str
    ) -> None:
        self._gate = linear(weights["token_gate.weight"], weight_dtype=weight_dtype)
        self._up = linear(weights["token_projection.weight"], weight_dtype=weight_dtype)
        self._norm, self._eps, self._kernels = weights["token_out.weight"], spec.rms_norm_eps, kernels
        self._activation = ACTIVATIONS[spec.activation]

    def __call__(self, h: Tensor, token_input: Tensor) -> Tensor:
        """h: [num_rows, hidden_size], token_input: [num_rows, token_width]. Returns the shape of h."""
        up = self._up(self._activation(self._gate(h)) * token_input)
        return self._kernels.rms_norm(up, self._norm, self._eps)
