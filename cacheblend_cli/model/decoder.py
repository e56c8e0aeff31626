"""The decoder: weights and the parts of a layer. The engine decides which rows run through each part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from cacheblend_kernels import AttentionParams, KernelBackend, LatentHeads
from torch import Tensor

from cacheblend_cli.model.altup import AltUp, LowRank, Streams
from cacheblend_cli.model.experts import Experts, ExpertsBeside
from cacheblend_cli.model.kv_scales import KVScales
from cacheblend_cli.model.latent import Latent
from cacheblend_cli.model.linear import STEADY_ROWS, Embedding, Weight, linear
from cacheblend_cli.model.mlp import MLP
from cacheblend_cli.model.module_weights import ModuleWeights, Norm
from cacheblend_cli.model.parallel import Shard
from cacheblend_cli.model.rope import LayerRotations
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.token_input import TokenInput, TokenInputs
from cacheblend_cli.model.weight_map import num_parameters
from cacheblend_cli.model.weights import Weights

if TYPE_CHECKING:
    from cacheblend_cli.model.states import Recurrence, StateLayout


def add_and_norm(norm: Norm | None, delta: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """`Norm.add`; without a norm both results are the sum. The first result is valid until the next addition."""
    if norm is not None:
        return norm.add(delta, residual)
    residual = residual.add_(delta)
    return residual, residual


class DecoderLayer:
    """One transformer layer with fused QKV and gate-up projections.

    Rows go in as [num_rows, hidden_size]; heads come out as [num_rows, heads, head_dim]. K is returned before RoPE
    (after QK-norm, where the family has one): the form that is stored. With latent attention k is the position key and
    v the latent, both as one head.

    weights: the model's, of which the layer's are taken. rope: index of the decoder's RoPE for q and k. part: this
    rank's part of the model.
    """

    _latent: Latent | None = None
    before: Recurrence | None = None  # layers without K and V that come before this one

    def __init__(self, index: int, weights: ModuleWeights, rope: int, part: Shard) -> None:
        spec, weights = weights.spec, weights.layer(index)
        self.index, self.spec, self.kernels, self.rope, self.part = index, spec, weights.kernels, rope, part
        self._summed = part.ranks.sum  # over the ranks, of results with each one's part of the weights
        self.token_inputs: TokenInputs | None = None
        latent = spec.latent
        self.num_kv_heads, self.head_dim = spec.heads_of(index)
        self.own_kv = spec.kv_layer(index) == index
        q_size = spec.num_heads * self.head_dim if latent is None else latent.query_rank or spec.q_size
        if latent is not None:
            self._latent = Latent(weights, latent)
        self._qkv = _ByRows(weights.weights["qkv_proj.weight"], weights.optional("qkv_proj.bias"), q_size)
        self._values_of_keys = spec.shapes is not None and spec.shapes.values_of_keys[index]
        self._v_norm: Norm | None = None
        if spec.v_norm:
            ones = weights.tensor("q_norm").new_ones(self.head_dim)
            self._v_norm = Norm(weights.kernels, ones, spec.rms_norm_eps)
        self._scalar = weights.optional("layer_scalar")
        self._token_input = TokenInput(weights) if spec.token_width else None
        self._o = weights.product("o_proj")
        experts = spec.experts if spec.experts is not None and index in spec.experts.layers else None
        norms = {part: weights.norm(part) for part, _ in spec.norms}
        sparsity = spec.sparsity[index] if spec.sparsity else 0.0
        self.mlp: MLP | Experts
        if experts is None or experts.beside:
            self.mlp = MLP(weights, sparsity, None if part.is_whole else part.ranks.sum)
        else:
            self.mlp = Experts(weights, experts)
        self._beside = ExpertsBeside(weights, experts, norms) if experts is not None and experts.beside else None
        self.altup = AltUp(weights, spec.streams) if spec.streams is not None else None
        self._low_rank = LowRank(weights) if spec.streams is not None else None
        self.attention_in, self._attention_out = norms.get("attention_in"), norms.get("attention_out")
        self._mlp_in, self._mlp_out = norms.get("mlp_in"), norms.get("mlp_out")
        self.q_norm, self.k_norm = weights.optional("q_norm"), weights.optional("k_norm")
        scale = self.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        sinks = weights.tensor("sinks").float() if spec.sinks else None
        self.attention = AttentionParams(scale, spec.sliding_windows[index], spec.attention_soft_cap, sinks)

    def project_qkv(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, kv = self._qkv.both(h)
        return self._queries(q), *self._keys_and_values(kv)

    def project_q(self, h: Tensor) -> Tensor:
        return self._queries(self._qkv.first(h))

    def project_kv(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return self._keys_and_values(self._qkv.rest(h))

    @property
    def latent_heads(self) -> LatentHeads | None:
        """Up-projections of latent attention; None for attention over K and V of heads."""
        return None if self._latent is None else self._latent.heads

    def to_keys(self, q: Tensor) -> Tensor:
        """Return rotated q ready to be multiplied with `KVPool.keys`, [num_rows, num_heads, dim of a key]."""
        return q if self._latent is None else self._latent.absorbed(q)

    def _queries(self, q: Tensor) -> Tensor:
        return self._normed_heads(q, self.q_norm) if self._latent is None else self._latent.queries(q)

    def _keys_and_values(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        if self._latent is not None:
            return self._latent.keys_and_values(kv)
        k, v = (kv, kv) if self._values_of_keys else kv.chunk(2, -1)
        values = self._heads(v)
        if self._v_norm is not None:
            values = self._v_norm(values.contiguous())
        return self._normed_heads(k, self.k_norm), values

    def scale_queries(self, q: Tensor, positions: Tensor) -> Tensor:
        """Scale rotated q [num_rows, num_heads, head_dim] by position [num_rows] int64, if the model does."""
        if self.spec.query_growth is None:
            return q
        beta, length = self.spec.query_growth
        return q * (1 + beta * torch.log1p((positions // length).float())).to(q.dtype)[:, None, None]

    def finish(self, attended: Tensor, residual: Tensor, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute everything after attention; attended: [num_rows, num_heads, head_dim]. Returns (delta for the next
        layer, residual). token_ids: the rows' token ids, for layers with an input by token."""
        delta = self._o(attended.reshape(attended.shape[0], -1))
        if self.spec.parallel:
            norm = self._mlp_in or self.attention_in
            assert norm is not None
            return self._summed(delta + self.mlp(norm(residual))), residual
        delta = self._summed(delta)
        if self._attention_out is not None:
            delta = self._attention_out(delta)
        if self.altup is not None:
            assert token_ids is not None
            return self._finish_streams(self.altup, delta, residual, token_ids), residual
        h, residual = add_and_norm(self._mlp_in, delta, residual)
        delta = self._summed(self.mlp(h))
        if self._beside is not None:
            delta = self._beside(delta, residual, self._summed)
        delta = delta if self._mlp_out is None else self._mlp_out(delta)
        if self._token_input is not None:
            assert token_ids is not None
            assert self.token_inputs is not None
            residual = residual.add_(delta)
            delta = self._token_input(residual, self.token_inputs.of_layer(token_ids, self.index))
        if self._scalar is not None:
            delta, residual = delta * self._scalar, residual.mul_(self._scalar)
        return delta, residual

    def _finish_streams(self, altup: AltUp, attended: Tensor, predicted: Tensor, token_ids: Tensor) -> Tensor:
        """Compute everything after attention's norm in a model with streams: [num_rows, streams, hidden_size]."""
        assert self.attention_in is not None and self._mlp_in is not None and self._mlp_out is not None  # noqa: PT018
        assert self._low_rank is not None and self._token_input is not None and self.token_inputs is not None  # noqa: PT018
        active = predicted[:, altup.active].contiguous()
        h = (active + attended + self._low_rank(self.attention_in(active))) * 0.5**0.5
        corrected = altup.correct(predicted, h + self._mlp_out(self._summed(self.mlp(self._mlp_in(h)))))
        of_token = self._token_input(altup.scaled(corrected), self.token_inputs.of_layer(token_ids, self.index))
        corrected[:, 1:] += of_token[:, None]
        return corrected

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.head_dim)

    def _normed_heads(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return self._heads(x)
        if self.spec.qk_norm_over_all and not self.part.is_whole:
            return self._heads(self._norm_over_ranks(x, weight))
        x = x.contiguous() if self.spec.qk_norm_over_all else self._heads(x)
        return self._heads(self.kernels.rms_norm(x, weight, self.spec.rms_norm_eps).flatten(1))

    def _norm_over_ranks(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of q or k over the heads of all ranks."""
        wide, part, whole = x.float(), self.part, self.part.whole
        squares = wide.square().sum(-1, keepdim=True)
        if weight is self.q_norm:
            mean = part.ranks.sum(squares) / whole.q_size
        else:
            mean = part.sum_of_kv(squares, self.index) / whole.kv_size
        wide = wide * torch.rsqrt(mean + self.spec.rms_norm_eps)
        return weight * wide.to(x.dtype) if weight.dtype == x.dtype else (weight * wide).to(x.dtype)


class Decoder:
    """A decoder-only model: embedding, layers, final norm, output head, RoPE tables, and their kernel backend.

    - weights: as returned by `load_weights`
    - dtype: compute dtype
    - steady: on a CPU a row's result does not depend on the other rows of a batch of steady_rows, or of any batch if
    steady_rows is 1
    - part: this rank's part of the model; its layers have only the rank's heads; inputs and results are the whole
    model's
    """

    steady = True
    steady_rows = STEADY_ROWS
    number = 0  # identifies the model in messages to other ranks
    state_layout: StateLayout | None = None  # of a hybrid's recurrent layers
    after: Recurrence | None = None  # layers without K and V after the last one with them

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        kernels: KernelBackend,
        dtype: torch.dtype,
        part: Shard | None = None,
    ) -> None:
        """part: None for the whole model."""
        self.spec, self.kernels, self.part, self.dtype = spec, kernels, part or Shard(spec), dtype
        # these models have other matrix products too
        others = spec.generic or spec.latent or spec.experts or spec.streams or spec.token_width
        copied = any(isinstance(weight, Tensor) and weight.dim() == 2 for weight in weights.values())
        self.steady_rows = 1 if self.part.is_whole and not others and not copied else STEADY_ROWS
        """1 if every product is compiled, else STEADY_ROWS."""
        outer = ModuleWeights(self.own_spec, weights, kernels)
        self.norm = outer.norm("norm")
        self.device = self.norm.weight.device
        self._embedding, self._head = Embedding(weights["embed"]), linear(weights["lm_head"])
        self.rope = LayerRotations(spec, self.device)
        self.layers = [DecoderLayer(i, outer, rope, self.part) for i, rope in enumerate(self.rope.of_layer)]
        if spec.token_width:
            inputs = TokenInputs(outer, self.embed)
            for layer in self.layers:
                layer.token_inputs = inputs
        self._streams = Streams(outer, spec.streams) if spec.streams is not None else None
        self.kv_scales: KVScales | None = None  # scales of float8 pools; None: pools of the compute dtype

    @property
    def multiplies_by_torch(self) -> bool:
        """Return whether torch computes products on a CPU, so that a row's rounding depends on the number of rows."""
        return self.steady_rows > 1 and self.device.type == "cpu"

    @property
    def own_spec(self) -> ModelSpec:
        """Spec of this rank's part; without tensor parallelism the model's."""
        return self.part.own

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [num_rows, hidden_size] of token ids [num_rows] int64."""
        h, scale = self._embedded(token_ids), self.spec.embedding_scale
        return h if scale == 1 else h * float(torch.tensor(scale, dtype=self.dtype))  # rounded, as in transformers

    def _embedded(self, token_ids: Tensor) -> Tensor:
        if self.part.is_whole:
            return self._embedding(token_ids, self.dtype)
        first, end = self.part.vocabulary
        other = (token_ids < first) | (token_ids >= end)
        own = self._embedding((token_ids - first).masked_fill(other, 0), self.dtype)
        return self.part.ranks.sum(own.masked_fill_(other[:, None], 0))

    def input_norm(self, layer: DecoderLayer, delta: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the layer's normed input, and the residual stream with `delta` added (residual None: the first layer).

        With several streams delta and residual are [num_rows, streams, hidden_size], and a layer's delta is all
        streams.
        """
        if self._streams is not None:
            assert layer.altup is not None and layer.attention_in is not None  # noqa: PT018
            predicted = layer.altup.predict(self._streams.split(delta) if residual is None else delta)
            return layer.attention_in(predicted[:, layer.altup.active].contiguous()), predicted
        if residual is None:
            return (delta if layer.attention_in is None else layer.attention_in(delta)), delta
        return add_and_norm(layer.attention_in, delta, residual)

    def logits(self, delta: Tensor, residual: Tensor) -> Tensor:
        """Return fp32 logits [num_rows, vocab_size] from the last layer's output."""
        h = self.norm.add(delta, residual)[0] if self._streams is None else self.norm(self._streams.merge(delta))
        logits, cap = self._head(h), self.spec.logit_soft_cap
        logits = self.part.gathered_logits(logits).float()
        if self.spec.logit_scale != 1:
            logits *= self.spec.logit_scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied head counts once, with the embedding."""
        return num_parameters(self.spec)


class _ByRows:
    """A projection whose first and remaining outputs are also available separately."""

    def __init__(self, weight: Weight, bias: Tensor | None, count: int) -> None:
        self.first, self.rest = (
            linear(weight[rows], None if bias is None else bias[rows]) for rows in (slice(count), slice(count, None))
        )
        self._whole, self._sizes = linear(weight, bias), (count, len(weight) - count)

    def both(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first outputs of the product, and the rest."""
        first, rest = self._whole(h).split(self._sizes, dim=-1)
        return first, rest
