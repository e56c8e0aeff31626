"""The decoder: weights and the pieces of a layer. Who calls which piece on which rows is the engine's business."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from cacheblend_kernels import AttentionParams, KernelBackend
from torch import Tensor

from cacheblend_cli.model.kv_scales import KVScales
from cacheblend_cli.model.linear import Linear
from cacheblend_cli.model.rope import LayerRotations
from cacheblend_cli.model.spec import ModelSpec

MLP_ROWS = 256

GPU_MLP_ROWS = 4096  # every turn reads all weights: with few rows a GPU waits for its memory


class DecoderLayer:
    """One transformer layer with fused QKV and gate-up projections.

    Rows go in as [num_rows, hidden_size]; heads come out as [num_rows, heads, head_dim]. K is returned before RoPE
    (after QK-norm, where the family has one): that is what is stored.
    """

    def __init__(self, index: int, spec: ModelSpec, weights: dict[str, Tensor], kernels: KernelBackend) -> None:
        self.index, self.spec, self.kernels = index, spec, kernels
        own = [name for name in weights if name.startswith(f"{index}.")]
        get = {
            name.split(".", 1)[1]: weights.pop(name) for name in own
        }  # taken out: once packed, a weight is not held twice
        self._qkv = _ByRows(get["qkv_proj.weight"], get.get("qkv_proj.bias"), spec.q_size)
        self._o = Linear(get["o_proj.weight"], get.get("o_proj.bias"))
        self._gate_up = Linear(get["gate_up_proj.weight"], get.get("gate_up_proj.bias"))
        self._down = Linear(get["down_proj.weight"], get.get("down_proj.bias"))
        self.input_norm, self.post_norm = get["input_layernorm"], get["post_attention_layernorm"]
        self.q_norm, self.k_norm = get.get("q_norm"), get.get("k_norm")
        self.sliding_window = spec.sliding_windows[index]
        self.attention = AttentionParams(spec.head_dim**-0.5, self.sliding_window)
        self.rope = 0  # which of the decoder's RoPEs turns q and k

    def project_qkv(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of the rows."""
        q, kv = self._qkv.both(h)
        k, v = kv.split(self.spec.kv_size, dim=-1)
        return self._q_heads(q), self._k_heads(k), self._heads(v)

    def project_q(self, h: Tensor) -> Tensor:
        """q of the rows."""
        return self._q_heads(self._qkv.first(h))

    def project_kv(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of the rows."""
        k, v = self._qkv.rest(h).split(self.spec.kv_size, dim=-1)
        return self._k_heads(k), self._heads(v)

    def attention_output(self, attended: Tensor) -> Tensor:
        """o_proj of [num_rows, num_heads, head_dim] -> [num_rows, hidden_size]."""
        return self._o(attended.reshape(attended.shape[0], -1))

    def mlp(self, h: Tensor) -> Tensor:
        """Gate, up, activation and down, some rows at a time: the widest activations of a prefill stay small."""
        most = MLP_ROWS if h.device.type == "cpu" else GPU_MLP_ROWS
        if h.shape[0] <= most:
            return self._mlp(h)
        step = -(-h.shape[0] // -(-h.shape[0] // most))  # turns of about one size: a small last one costs the most
        out = torch.empty_like(h)
        for start in range(0, h.shape[0], step):
            out[start : start + step] = self._mlp(h[start : start + step])
        return out

    def _mlp(self, h: Tensor) -> Tensor:
        return self._down(self.kernels.act_and_mul(self._gate_up(h), self.spec.activation))

    def finish(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Everything after attention. Returns (what the next layer adds to the residual, residual)."""
        h, residual = self.kernels.add_rms_norm(
            self.attention_output(attended), residual, self.post_norm, self.spec.rms_norm_eps
        )
        return self.mlp(h), residual

    @property
    def num_bytes(self) -> int:
        """Of its weights."""
        norms = (self.input_norm, self.post_norm, self.q_norm, self.k_norm)
        small = sum(t.numel() * t.itemsize for t in norms if t is not None)
        return small + sum(part.num_bytes for part in (self._qkv, self._o, self._gate_up, self._down))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.spec.head_dim)

    def _q_heads(self, q: Tensor) -> Tensor:
        q = self._heads(q)
        return q if self.q_norm is None else self.kernels.rms_norm(q, self.q_norm, self.spec.rms_norm_eps)

    def _k_heads(self, k: Tensor) -> Tensor:
        k = self._heads(k)
        return k if self.k_norm is None else self.kernels.rms_norm(k, self.k_norm, self.spec.rms_norm_eps)


class Decoder:
    """A decoder-only model: embedding, layers, final norm, output head, RoPE tables, and the kernels they run on.

    weights: as `load_weights` gives them; they are taken out of it.
    """

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], kernels: KernelBackend) -> None:
        self.spec, self.kernels = spec, kernels
        self.embedding, self.norm = weights["embed"], weights["norm"]
        tied = weights["lm_head"].data_ptr() == self.embedding.data_ptr()
        self._head = Linear(weights["lm_head"], pack=not tied)  # a packed copy of the embedding would be a second one
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.rope = LayerRotations(spec, self.device)
        self.layers = [DecoderLayer(i, spec, weights, kernels) for i in range(spec.num_layers)]
        for layer, rope in zip(self.layers, self.rope.of_layer, strict=True):
            layer.rope = rope
        self.kv_scales: KVScales | None = None  # of the float8 pools prompts get; None: pools of the compute dtype

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_rows] int64 -> [num_rows, hidden_size]."""
        return F.embedding(token_ids, self.embedding)

    def input_norm(self, layer: DecoderLayer, delta: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The layer's normed input and the residual stream with `delta` added (residual None: the first layer)."""
        if residual is None:
            return self.kernels.rms_norm(delta, layer.input_norm, self.spec.rms_norm_eps), delta
        return self.kernels.add_rms_norm(delta, residual, layer.input_norm, self.spec.rms_norm_eps)

    def logits(self, delta: Tensor, residual: Tensor) -> Tensor:
        """fp32 logits [num_rows, vocab_size] from the last layer's output."""
        h, _ = self.kernels.add_rms_norm(delta, residual, self.norm, self.spec.rms_norm_eps)
        return self._head(h).float()

    @property
    def num_bytes(self) -> int:
        """Of all weights; a tied head is the embedding."""
        own = self.embedding.numel() * self.embedding.itemsize + self.norm.numel() * self.norm.itemsize
        head = 0 if self._head.weight is self.embedding else self._head.num_bytes
        return own + head + sum(layer.num_bytes for layer in self.layers)


class _ByRows:
    """A projection whose first rows and whose rest are also asked for alone. Packed weights cannot be cut: they are two."""

    def __init__(self, weight: Tensor, bias: Tensor | None, count: int) -> None:
        cut = None if bias is None else (bias[:count], bias[count:])
        self.first = Linear(weight[:count], None if cut is None else cut[0])
        self.rest = Linear(weight[count:], None if cut is None else cut[1])
        self._whole = None if self.first.packed else Linear(weight, bias)
        self._sizes = (count, weight.shape[0] - count)

    @property
    def num_bytes(self) -> int:
        return self.first.num_bytes + self.rest.num_bytes

    def both(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """The first rows of the product, and the rest."""
        if self._whole is None:
            return self.first(h), self.rest(h)
        first, rest = self._whole(h).split(self._sizes, dim=-1)
        return first, rest
