"""Projections of multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

from __future__ import annotations

import torch
from cacheblend_kernels import LatentHeads
from torch import Tensor

from cacheblend_cli.model.module_weights import ModuleWeights, Norm
from cacheblend_cli.model.spec import LatentSpec

EPS = 1e-6  # of the latents' norms: transformers uses its class's default, whatever rms_norm_eps is


class Latent:
    """Latent projections between a layer's input projections and its attention. `heads` stays in the compute dtype:
    attention multiplies with slices of it."""

    def __init__(self, weights: ModuleWeights, latent: LatentSpec) -> None:
        self._latent, self._num_heads = latent, weights.spec.num_heads
        self._kv_norm = Norm(weights.kernels, weights.tensor("kv_a_norm"), EPS)
        self._queries = weights.product("q_b_proj") if latent.query_rank else None
        self._q_norm = Norm(weights.kernels, weights.tensor("q_a_norm"), EPS) if latent.query_rank else None
        made = weights.tensor("kv_b_proj.weight").unflatten(0, (weights.spec.num_heads, -1))
        keys, values = made.split((latent.nope_dim, latent.value_dim), 1)
        self.heads = LatentHeads(keys.contiguous(), values.contiguous())

    def queries(self, projected: Tensor) -> Tensor:
        """Return q [num_rows, num_heads, nope_dim + rope_dim] of the first rows of the layer's product."""
        if self._queries is not None:
            assert self._q_norm is not None
            projected = self._queries(self._q_norm(projected.contiguous()))
        return projected.unflatten(-1, (self._num_heads, -1))

    def keys_and_values(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Return position keys before RoPE [num_rows, 1, rope_dim] and normed latents [num_rows, 1, rank]."""
        latents, k = projected.split((self._latent.rank, projected.shape[-1] - self._latent.rank), -1)
        return k[:, None], self._kv_norm(latents.contiguous())[:, None]

    def absorbed(self, q: Tensor) -> Tensor:
        """Return q ready to be multiplied with (position key, latent), [num_rows, num_heads, rope_dim + rank]."""
        nope = self._latent.nope_dim
        return torch.cat((q[..., nope:], torch.einsum("nhd,hdr->nhr", q[..., :nope], self.heads.keys)), -1)
