"""Inputs of each layer that depend only on the token (per-layer embeddings), as in Gemma 4 and 3n."""

from __future__ import annotations

from collections.abc import Callable

import torch
from cacheblend_kernels.torch_backend import ACTIVATIONS
from torch import Tensor

from cacheblend_cli.model.linear import Embedding, linear
from cacheblend_cli.model.module_weights import ModuleWeights
from cacheblend_cli.model.weight_map import TOKEN_EMBEDDING


class TokenInputs:
    """Inputs of all layers: a second embedding of the token, plus a normed projection of its first one.

    A layer's inputs are computed when it needs them: rows drop out from layer to layer. weights: those outside the
    layers. embed: `Decoder.embed`.
    """

    def __init__(self, weights: ModuleWeights, embed: Callable[[Tensor], Tensor]) -> None:
        self._width, self._embed, self._norm = weights.spec.token_width, embed, weights.norm("token_norm")
        self._embedding = Embedding(weights.weights[TOKEN_EMBEDDING])
        project, width = weights.weights["token_model.weight"], self._width
        self._project = [linear(project[start : start + width]) for start in range(0, len(project), width)]
        self._scales = weights.spec.hidden_size**-0.5, weights.spec.token_width**0.5

    def of_layer(self, token_ids: Tensor, layer: int) -> Tensor:
        """Return a layer's inputs, [num_rows, token_width]."""
        # Gemma 3n's vocabulary is larger than this one
        known = torch.where(token_ids < len(self._embedding), token_ids, 0)
        columns = slice(layer * self._width, (layer + 1) * self._width)
        projected = self._project[layer](self._embed(token_ids)) * self._scales[0]
        own = self._embedding(known, projected.dtype, columns) * self._scales[1]
        return (self._norm(projected) + own) * 2**-0.5


class TokenInput:
    """A layer's use of its input: norm(up(activation(gate(h)) * input)), added to the residual stream."""

    def __init__(self, weights: ModuleWeights) -> None:
        self._gate, self._up = weights.product("token_gate"), weights.product("token_projection")
        self._norm = weights.norm("token_out")
        self._activation = ACTIVATIONS[weights.spec.activation]

    def __call__(self, h: Tensor, token_input: Tensor) -> Tensor:
        """h: [num_rows, hidden_size], token_input: [num_rows, token_width]. Returns the shape of h."""
        return self._norm(self._up(self._activation(self._gate(h)) * token_input))
