"""A second implementation of CacheBlend, over transformers' own forward pass: the reference for the engine's blending.

It shares nothing with the engine and knows no architecture. transformers computes every row at every layer, in the
model's own dtype (float64). Two of its functions are ours: the one that rotates (where K before RoPE is seen), and
attention, which is one matrix with a mask made of positions. There the K and V of rows that are not recomputed are put
back to the old ones, so nobody sees what such rows compute. K is kept before RoPE, [num_tokens, num_kv_heads, head_dim]
a layer.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "blend_reference"
CHECK_LAYER = 1
KV = list[tuple[Tensor, Tensor]]


class Reference:
    def __init__(self, model: Any) -> None:
        self.model = model
        self._own = model.config._attn_implementation
        self._plain: dict[tuple[int, ...], _Pass] = {}

    @torch.no_grad()
    def full(self, ids: list[int]) -> Tensor:
        """transformers' own logits of every position."""
        return self.model(torch.tensor([ids])).logits[0]

    def continues(self, ids: list[int], generated: list[int]) -> tuple[Tensor, bool]:
        """transformers' own logits of every position of ids, and whether it generates just that behind them, greedily.

        One pass over both says so: what stands at a position does not depend on what follows. But for a RoPE that
        depends on the length; there transformers generates.
        """
        rope = str(getattr(self.model.config.get_text_config(), "rope_parameters", None))
        if "dynamic" in rope or "longrope" in rope:
            return self.full(ids), self.generate(ids, len(generated)) == generated
        logits = self.full([*ids, *generated])
        return logits[: len(ids)], logits[len(ids) - 1 : -1].argmax(-1).tolist() == generated

    @torch.no_grad()
    def generate(self, ids: list[int], count: int) -> list[int]:
        """What transformers generates, greedily. Without its cache, which for some configs has a window that the model
        has not (a Llama with a left-over sliding_window); with it where RoPE turns faster token by token: there K stays
        as it was turned, and without a cache all of it would be turned anew."""
        rope = getattr(self.model.config, "rope_parameters", None) or {}
        given = torch.tensor([ids])
        config = GenerationConfig(
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=rope.get("rope_type") == "dynamic",
        )
        self.model.generation_config = config
        found = self.model.generate(given, attention_mask=torch.ones_like(given), generation_config=config)
        return found[0, len(ids) :].tolist()

    @torch.no_grad()
    def blend(
        self, prefix: list[int], chunks: list[list[int]], suffix: list[int], ratio: float
    ) -> tuple[Tensor, list[int]]:
        """Logits of the suffix and the positions recomputed: those whose K deviates most at layer 1, a share `ratio` of
        the cached tokens whose KV is not right as it is."""
        ids = prefix + [i for chunk in chunks for i in chunk] + suffix
        whole = self._run_plain(ids)
        alone = [self._run_plain(prefix + chunk) for chunk in chunks]
        old: KV = []
        for layer, (fresh_k, fresh_v) in enumerate(whole.kv):  # what nobody stores is fresh: the prefix and the suffix
            parts = [tuple(t[len(prefix) :] for t in run.kv[layer]) for run in alone]
            start, end = len(prefix), len(ids) - len(suffix)
            old.append(
                tuple(  # type: ignore[arg-type]
                    torch.cat((fresh[:start], *(part[n] for part in parts), fresh[end:]))
                    for n, fresh in enumerate((fresh_k, fresh_v))
                )
            )
        # Behind the prefix alone is where chunks were computed, so the first one is right: if RoPE still turns as fast.
        longest = max(alone, key=lambda run: run.length)
        same = all(torch.equal(a, b[: longest.length]) for a, b in zip(longest.turns, whole.turns, strict=True))
        right = len(prefix) + (len(chunks[0]) if same else 0)
        keep = len(ids) - len(suffix)
        blended = self._run(ids, old, (right, keep, math.ceil(ratio * (keep - right) - 1e-9)))
        return blended.logits[-len(suffix) :], blended.chosen

    def _run_plain(self, ids: list[int]) -> _Pass:
        """With nothing put back; of one prompt once."""
        return self._plain.get(tuple(ids)) or self._plain.setdefault(tuple(ids), self._run(ids))

    def _run(self, ids: list[int], old: KV | None = None, check: tuple[int, int, int] = (0, 0, 0)) -> _Pass:
        run = _Pass(len(ids), old, check)
        if self.model.config.model_type in LATENT:
            with _latent_replaced(self.model, run):
                run.logits = self.model(torch.tensor([ids]), use_cache=False).logits[0]
            return run
        ALL_ATTENTION_FUNCTIONS.register(NAME, run.attention)
        self.model.set_attn_implementation(NAME)
        try:
            with _rotary_replaced(self.model, run):
                run.logits = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        finally:
            self.model.set_attn_implementation(self._own)
        return run


class _Pass:
    """One forward pass. check: of positions [0] to [1], the [2] that deviate most at layer 1 keep their fresh K and V
    behind it, with all that is outside of these positions."""

    def __init__(self, length: int, old: KV | None, check: tuple[int, int, int]) -> None:
        self.length, self.old, self.check = length, old, check
        self.kv: KV = []
        self.turns: list[Tensor] = []  # what RoPE makes of ones at every position, a layer
        self.chosen: list[int] = []
        self.logits = torch.empty(0)
        self._fresh = torch.ones(length, dtype=torch.bool)
        self._shared: dict[str, tuple[Tensor, Tensor]] = {}
        self._turned: tuple[Tensor, Callable[[Tensor], Tensor]] | None = None

    def rotary(self, original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        if "x" in inspect.signature(original).parameters:  # one of q and k at a time, K last, heads behind tokens
            return self._rotary_of_one(original)

        def rotate(q: Tensor, k: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
            self._turned = k, lambda x: original(x, x, *rest, **named)[1]
            return original(q, k, *rest, **named)

        return rotate

    def _rotary_of_one(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def rotate(x: Tensor, *rest: Any, **named: Any) -> Tensor:
            self._turned = x.transpose(1, 2), lambda y: original(y.transpose(1, 2), *rest, **named).transpose(1, 2)
            return original(x, *rest, **named)

        return rotate

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **named: Any
    ) -> tuple[Tensor, None]:
        """query: [1, num_heads, num_tokens, head_dim], rotated, as key is."""
        if getattr(module, "is_kv_shared_layer", False):  # of the last layer of its kind with K and V of its own
            self._turned = None
            key, value = self._shared[module.layer_type]
        else:
            layer, (before, turn) = len(self.kv), self._before_rope(key)
            self.kv.append((before[0].transpose(0, 1), value[0].transpose(0, 1)))
            self.turns.append(turn(torch.ones_like(before[:, :1]))[0, 0])
            before, value = self._put_back(layer, before, value, turn)
            key = turn(before)
            self._shared[getattr(module, "layer_type", "")] = key, value
        group, at = query.shape[1] // key.shape[1], torch.arange(self.length)
        scores = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * scaling
        if named.get("softcap"):
            scores = named["softcap"] * torch.tanh(scores / named["softcap"])
        hidden = at > at[:, None]
        if named.get("sliding_window") is not None:
            hidden |= at <= at[:, None] - named["sliding_window"]
        scores = scores.masked_fill(hidden, -math.inf)
        if named.get("s_aux") is not None:
            sinks = named["s_aux"].to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : self.length]
        return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None

    def fused(self, k: Tensor, v: Tensor, turns: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """K before RoPE and V of the next layer as a module projects them, [num_tokens, num_kv_heads, head_dim] -> the
        same, as the layer is to have them. turns: what tells the frequencies of RoPE."""
        layer = len(self.kv)
        self.kv.append((k, v))
        self.turns.append(torch.ones(self.length, 1) if turns is None else turns)
        k, v = self._put_back(layer, k.transpose(0, 1)[None], v.transpose(0, 1)[None], lambda x: x)
        return k[0].transpose(0, 1), v[0].transpose(0, 1)

    def _put_back(
        self, layer: int, before: Tensor, value: Tensor, turn: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """K before RoPE and V, [1, num_kv_heads, num_tokens, head_dim], the old ones where a row is not recomputed."""
        if self.old is None or layer < CHECK_LAYER:
            return before, value
        old_k, old_v = (t.transpose(0, 1)[None] for t in self.old[layer])
        if layer == CHECK_LAYER:
            self._choose((turn(before) - turn(old_k)).square().sum((0, 1, 3)))
            return before, value
        fresh = self._fresh[:, None]
        return torch.where(fresh, before, old_k), torch.where(fresh, value, old_v)

    def _before_rope(self, key: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """K before RoPE, and RoPE. A module may rotate the first dimensions of a head only, or none."""
        if self._turned is None:
            return key, lambda x: x
        (turned, rotate), self._turned = self._turned, None
        width = turned.shape[-1]
        return torch.cat((turned, key[..., width:]), -1), lambda x: torch.cat(
            (rotate(x[..., :width]), x[..., width:]), -1
        )

    def _choose(self, deviation: Tensor) -> None:
        first, last, count = self.check
        order = deviation[first:last].argsort(descending=True, stable=True)[:count]
        self.chosen = (first + order).sort().values.tolist()
        self._fresh[first:last] = False
        self._fresh[self.chosen] = True


LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
"""Models with latent attention: what is stored is between two projections. Latents are put back before their norm, and
compared after it; with the position key they are K."""


@contextmanager
def _latent_replaced(model: Any, run: _Pass) -> Iterator[None]:
    rank = model.config.kv_lora_rank
    frequencies = model.model.rotary_emb
    table = frequencies(model.model.embed_tokens.weight[:1], torch.arange(run.length)[None])
    turns = table[0][0] if isinstance(table, tuple) else torch.view_as_real(table)[0].flatten(1)

    def replacing(norm: Any) -> Callable[..., Tensor]:
        def replaced(module: Any, given: Any, output: Tensor) -> Tensor:
            raw = output[0]
            k = torch.cat(
                (raw[:, rank:] * frequencies.attention_scaling, norm(raw[:, :rank])), -1
            )  # RoPE keeps distances
            return run.fused(k[:, None], raw.clone()[:, None], turns)[1][:, 0][None]

        return replaced

    hooks = [
        layer.self_attn.kv_a_proj_with_mqa.register_forward_hook(replacing(layer.self_attn.kv_a_layernorm))
        for layer in model.model.layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _rotary_replaced(model: Any, run: _Pass) -> Iterator[None]:
    """transformers' function that rotates q and k, in the files of the model and of its parts, tells the pass."""
    files = {sys.modules[type(part).__module__] for part in model.modules()}
    found = [(file, file.apply_rotary_pos_emb) for file in files if hasattr(file, "apply_rotary_pos_emb")]
    for file, original in found:
        file.apply_rotary_pos_emb = run.rotary(original)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for file, original in found:
            file.apply_rotary_pos_emb = original  # type: ignore[attr-defined]
