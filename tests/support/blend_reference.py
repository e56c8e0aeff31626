"""CacheBlend a second time, in plain torch over transformers' modules: what the engine's blending is compared with.

It shares nothing with the engine. Attention is one matrix with a mask made of positions, in the model's own dtype (float64);
K and V are kept as they are projected, before RoPE, one tensor [num_tokens, num_kv_heads, head_dim] a layer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

KV = list[tuple[Tensor, Tensor]]


class Reference:
    def __init__(self, model: Any) -> None:
        self.model, self.base, self.config = model, model.model, model.config

    @torch.no_grad()
    def full(self, ids: list[int]) -> Tensor:
        """transformers' own logits of every position."""
        return self.model(torch.tensor([ids])).logits[0]

    @torch.no_grad()
    def blend(
        self, prefix: list[int], chunks: list[list[int]], suffix: list[int], ratio: float
    ) -> tuple[Tensor, list[int]]:
        """Logits of the suffix and the positions recomputed: those whose K deviates most at layer 1, a share `ratio` of
        the cached tokens whose KV is not right as it is."""
        ids = prefix + [i for chunk in chunks for i in chunk] + suffix
        parts = [self._layers(prefix, [], torch.arange(len(prefix)))[1]]
        for chunk in chunks:
            kv = self._layers(prefix + chunk, [], torch.arange(len(prefix + chunk)))[1]
            parts.append([(k[len(prefix) :], v[len(prefix) :]) for k, v in kv])
        parts.append([(k[:0].expand(0, *k.shape[1:]), v[:0]) for k, v in parts[0]])
        old = [tuple(torch.cat(t) for t in zip(*layer, strict=True)) for layer in zip(*parts, strict=True)]
        old = [tuple(torch.cat((t, t.new_zeros(len(suffix), *t.shape[1:]))) for t in layer) for layer in old]
        # Behind the prefix alone is where chunks were computed, so the first one is right: if RoPE still turns as fast.
        collected = max(len(prefix) + len(chunk) for chunk in chunks)
        same = torch.equal(self._rotation(collected)[0], self._rotation(len(ids))[0][:collected])
        right = len(prefix) + len(chunks[0]) if same else 0
        rows, keep = torch.arange(right, len(ids)), len(ids) - len(suffix)
        if not same:  # the prefix is computed, and only what stands behind it is a question of choice
            right = len(prefix)
        count = math.ceil(ratio * (keep - right) - 1e-9)
        hidden, _, chosen = self._layers(ids, old, rows, (right, keep, count))
        logits = self.model.lm_head(self.base.norm(hidden))
        return logits[-len(suffix) :], chosen

    def _rotation(self, length: int) -> tuple[Tensor, Tensor]:
        dummy = self.base.embed_tokens.weight[:1]
        cos, sin = self.base.rotary_emb(dummy, torch.arange(length)[None])
        return cos[0][:, None].double(), sin[0][:, None].double()

    def _layers(
        self, ids: list[int], old: KV, rows: Tensor, check: tuple[int, int, int] | None = None
    ) -> tuple[Tensor, KV, list[int]]:
        """The rows through all layers, over `old` KV where there is no fresh one. check: of positions [0] to [1], the [2]
        that deviate most at layer 1 stay rows, with all that is outside of these positions."""
        cos, sin = self._rotation(len(ids))
        x, fresh, chosen = self.base.embed_tokens(torch.tensor(ids))[rows], [], []
        for number, layer in enumerate(self.base.layers):
            attention, h = layer.self_attn, layer.input_layernorm(x)
            k, v = self._heads(attention, "k", h), self._heads(attention, "v", h)
            keys, values = (old[number][0].clone(), old[number][1].clone()) if old else (k, v)
            if old:
                keys[rows], values[rows] = k, v
            if check and number == 1:
                first, last, count = check
                deviation = (keys - old[1][0]).square().sum((1, 2))[first:last]
                chosen = (first + deviation.argsort(descending=True, stable=True)[:count]).sort().values.tolist()
                stays = torch.tensor([not first <= p < last or p in chosen for p in rows.tolist()])
                rows, x, h = rows[stays], x[stays], h[stays]
            q = _turned(self._heads(attention, "q", h), cos[rows], sin[rows])
            x = x + attention.o_proj(self._attend(attention, q, _turned(keys, cos, sin), values, rows))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            fresh.append((k, v))
        return x, fresh, chosen

    def _heads(self, attention: Any, name: str, h: Tensor) -> Tensor:
        x = getattr(attention, f"{name}_proj")(h).view(len(h), -1, attention.head_dim)
        return getattr(attention, f"{name}_norm")(x) if hasattr(attention, f"{name}_norm") else x

    def _attend(self, attention: Any, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        group, at = q.shape[1] // k.shape[1], torch.arange(len(k))
        hidden = at > rows[:, None]
        window = getattr(attention, "sliding_window", None)
        if self.config.model_type == "mistral":
            window = self.config.sliding_window
        if window is not None:
            hidden |= at <= rows[:, None] - window
        scores = torch.einsum("rhd,khd->hrk", q, k.repeat_interleave(group, 1)) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("hrk,khd->rhd", weights, v.repeat_interleave(group, 1)).reshape(len(rows), -1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin
