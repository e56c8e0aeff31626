"""What selectors may ask for about the cached tokens: how far fresh KV is from old, and what the question looks at."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cacheblend_kernels import AttentionParams
from torch import Tensor

from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import Candidates
from cacheblend_cli.kv.forward import FreshKV, Hidden, LayerStep, Observer, queries, rotate, run_layers
from cacheblend_cli.kv.pool import upload
from cacheblend_cli.kv.rows import Rows, positions_of, rows_of
from cacheblend_cli.model.decoder import DecoderLayer

LOGITS_AT_ONCE = 1 << 25
"""Numbers of a probe layer that a GPU holds at once, 128 MiB: all its heads in one product where the prompt is not long. On
a CPU heads take turns, and what one head makes stays in its cache."""


class BeforeLayers:
    """Evidence there is before layer 0: what the question looks at when it runs alone over the stored KV.

    The fresh rows (suffix and holes) run through the layers over the pool as it was loaded. What they write is written
    again by the blended prefill. prompt: for selectors that look in ways of their own. probe_layers: the layers whose
    attention counts. draft_tokens: how far `draft` looks.
    """

    def __init__(self, prompt: Prompt, probe_layers: Sequence[int], draft_tokens: int) -> None:
        self.prompt, self._probe_layers, self._draft_tokens = prompt, frozenset(probe_layers), draft_tokens

    def deviation(self, candidates: Candidates) -> Tensor:
        raise AssertionError("a selector that compares fresh with old KV needs a check layer")

    perturbation = deviation

    def attention(self, candidates: Candidates) -> Tensor:
        """The largest attention weight on each candidate [n] fp32, over the suffix's rows, the probe layers and their heads.

        (ProphetKV, arXiv 2602.02579, and InfoFlow, arXiv 2603.05353, sum where this takes the largest: one head that
        looks a value up counts for more than many that look at everything a little.)
        """
        look = _Look(self.prompt, self._probe_layers, candidates, stop=max(self._probe_layers, default=0))
        self._run_fresh(look)
        return look.found

    def draft(self, candidates: Candidates) -> Tensor:
        """As `attention`, over the rows of the answer's first tokens, drafted greedily over the stored KV.

        Values are looked up when the answer comes to them, not while the question is read (Lookahead Q-Cache, arXiv
        2505.20334, evicts by the same rows).
        """
        prompt, sequence, decoder = self.prompt, self.prompt.sequence, self.prompt.decoder
        hidden = self._run_fresh(_Look(prompt, frozenset(), candidates))
        look = _Look(prompt, self._probe_layers, candidates)
        at = prompt.plan.num_tokens
        for _ in range(min(self._draft_tokens, sequence.capacity - at)):
            assert hidden is not None
            token = hidden.logits(decoder, slice(-1, None)).argmax(-1)
            rows = rows_of(decoder, sequence, upload([at], decoder.device), at + 1, at + 1)
            hidden, at = run_layers(decoder, rows, token, look, look), at + 1
        return look.found

    def _run_fresh(self, look: _Look) -> Hidden | None:
        prompt = self.prompt
        computed = [s for s in prompt.plan.segments if s.status == "computed"]
        rows = prompt.rows(positions_of(computed, prompt.decoder.device))
        return run_layers(prompt.decoder, rows, prompt.token_ids[rows.positions], look, look)


class _Look(Observer):
    """What the last rows of a pass, as many as the suffix has or fewer, look at in the probe layers.

    found: the largest attention weight on each candidate so far, [n] fp32. stop: the layer whose queries are the last
    that are wanted.
    """

    def __init__(
        self, prompt: Prompt, probe_layers: frozenset[int], candidates: Candidates, stop: int | None = None
    ) -> None:
        self._prompt, self._probe_layers, self._candidates, self._stop = prompt, probe_layers, candidates, stop
        self._num_looking = len(prompt.plan.segments[-1].token_ids)
        self.found = torch.zeros(len(candidates), device=prompt.decoder.device)

    def at(self, layer: DecoderLayer) -> LayerStep:
        self._prompt.loader.wait(layer.index)
        return LayerStep(stop=layer.index == self._stop)

    def queries(self, layer: DecoderLayer, q: Tensor, rows: Rows) -> None:
        if layer.index in self._probe_layers:
            q, positions = q[-self._num_looking :], rows.positions[-self._num_looking :]
            keys = _keys(self._prompt, layer.index, rows.attention.max_kv_len)
            weights = attention_peaks(layer, q, positions, keys, self._candidates)
            self.found = torch.maximum(self.found, weights)


class AtCheckLayer:
    """Evidence there is at a check layer, before its fresh K and V overwrite the old.

    fresh: of all rows; candidate_index, suffix_index: which of the rows are the candidates and the suffix. kind: what
    `deviation` compares, "k", "v" or "kv".
    """

    def __init__(
        self, prompt: Prompt, fresh: FreshKV, candidate_index: Tensor, suffix_index: Tensor, kind: str
    ) -> None:
        self._prompt, self._layer, self._kind = prompt, fresh.layer, kind
        self._h, self._suffix = fresh.h[suffix_index], fresh.rows.take(suffix_index)
        self._candidates = fresh.rows.take(candidate_index)
        self._k = rotate(fresh.layer, fresh.k[candidate_index], self._candidates)
        self._v = fresh.v[candidate_index]

    def deviation(self, candidates: Candidates) -> Tensor:
        """Squared distance of fresh from old K, V or both, [n] fp32 (CacheBlend, arXiv 2405.16444, section 4.3)."""
        cache = self._prompt.pool.layers[self._layer.index]
        return self._layer.kernels.kv_deviation(self._k, self._v, cache, self._candidates.slots, self._kind)

    def attention(self, candidates: Candidates) -> Tensor:
        """The largest attention weight of the suffix at this layer on the old KV of each candidate, [n] fp32."""
        q, positions = self._suffix_queries()
        keys = _keys(self._prompt, self._layer.index, self._prompt.plan.num_tokens)
        return attention_peaks(self._layer, q, positions, keys, candidates)

    def draft(self, candidates: Candidates) -> Tensor:
        raise AssertionError("a draft is made before layer 0")

    def perturbation(self, candidates: Candidates) -> Tensor:
        """First-order change of the suffix's attention output when a token's old KV is replaced, [n] fp32.

        Summed over suffix rows and heads: a_t * (scale * |q . dk_t| * |v_t - o| + |dv_t|), where softmax's derivative
        is a_t * (v_t - o) along the logit of token t.
        """
        q, positions = self._suffix_queries()
        layer, spec = self._layer, self._layer.spec
        pool, kv_len = self._prompt.pool, self._prompt.plan.num_tokens
        old_k, old_v = pool.read(layer.index, self._candidates.slots)
        dk, dv = self._k.float() - old_k, self._v.float() - old_v
        keys = _keys(self._prompt, layer.index, kv_len)
        values = pool.read_v(layer.index, _slots(self._prompt, kv_len))
        group = spec.num_heads // spec.num_kv_heads
        total = torch.zeros(len(candidates), device=q.device)
        for head in range(spec.num_kv_heads):
            rows = q[:, head * group : (head + 1) * group].float().reshape(-1, spec.head_dim)
            at = positions.repeat_interleave(group)
            p = _probabilities(rows, keys[:, head], at, layer.attention, _sinks(layer, head))
            out = p @ values[:, head]
            a = p[:, candidates.positions]
            v = old_v[:, head]
            distance = (v.square().sum(-1) - 2 * out @ v.T + out.square().sum(-1, keepdim=True)).clamp_min(0).sqrt()
            moved = (rows @ dk[:, head].T).abs() * layer.attention.scale * distance
            total += (a * (moved + dv[:, head].norm(dim=-1))).sum(0)
        return total

    def _suffix_queries(self) -> tuple[Tensor, Tensor]:
        return queries(self._layer, self._h, self._suffix), self._suffix.positions


def attention_peaks(layer: DecoderLayer, q: Tensor, positions: Tensor, keys: Tensor, candidates: Candidates) -> Tensor:
    """The largest softmax weight of rotated q [num_rows, num_heads, head_dim] on each candidate, [n] fp32.

    positions: of the rows, [num_rows] int64; keys: rotated, of positions 0 on, fp32 [kv_len, num_kv_heads, head_dim].
    """
    spec, params, kv_len = layer.spec, layer.attention, keys.shape[0]
    rows = q.float().view(len(q), spec.num_kv_heads, -1, spec.head_dim).permute(1, 2, 0, 3)  # KV heads, group, rows
    hidden = _hidden(positions, kv_len, params.sliding_window)
    sinks = None if params.sinks is None else params.sinks.view(spec.num_kv_heads, -1, 1, 1)
    at_once = heads_at_once(q.device, rows[0].shape[0] * len(q) * kv_len)
    found = torch.zeros(kv_len, device=q.device)
    for start in range(0, spec.num_kv_heads, at_once):
        heads = slice(start, start + at_once)
        logits = _capped(rows[heads].flatten(1, 2) @ keys[:, heads].permute(1, 2, 0), params)
        logits = logits.view(*rows[heads].shape[:3], kv_len).masked_fill_(hidden, float("-inf"))
        if sinks is not None:  # a key without a value
            logits = torch.cat((logits, sinks[heads].expand(*logits.shape[:3], 1)), -1)
        torch.softmax(logits, -1, out=logits)  # in place: fresh memory of this size costs more than the products
        found = torch.maximum(found, logits.flatten(0, 2).amax(0)[:kv_len])
    return found[candidates.positions]


def heads_at_once(device: torch.device, numbers: int) -> int:
    """KV heads in one product; numbers: of the logits of one of them."""
    return max(1, LOGITS_AT_ONCE // numbers) if device.type == "cuda" else 1


def _sinks(layer: DecoderLayer, kv_head: int) -> Tensor | None:
    """Of the query heads that share a KV head, [group] fp32."""
    sinks = layer.attention.sinks
    return None if sinks is None else sinks.view(layer.spec.num_kv_heads, -1)[kv_head]


def _probabilities(
    q: Tensor, keys: Tensor, positions: Tensor, params: AttentionParams, sinks: Tensor | None = None
) -> Tensor:
    """[num_rows, kv_len] fp32, causal by position. sinks: of the heads that take turns in the rows."""
    hidden = _hidden(positions, keys.shape[0], params.sliding_window)
    logits = _capped(q @ keys.T, params).masked_fill_(hidden, float("-inf"))
    if sinks is None:
        return logits.softmax(-1)
    sinks = sinks.repeat(len(logits) // len(sinks))
    return torch.cat((logits, sinks[:, None]), -1).softmax(-1)[:, : keys.shape[0]]


def _capped(products: Tensor, params: AttentionParams) -> Tensor:
    """Logits of products of q and k."""
    logits = products.mul_(params.scale)
    return logits if params.soft_cap is None else params.soft_cap * torch.tanh(logits / params.soft_cap)


def _hidden(positions: Tensor, kv_len: int, window: int | None) -> Tensor:
    """[num_rows, kv_len] bool: the keys that a row at its position does not see."""
    key_at = torch.arange(kv_len, device=positions.device)
    hidden = key_at > positions[:, None]
    if window is not None:
        hidden |= key_at <= positions[:, None] - window
    return hidden


def _keys(prompt: Prompt, layer: int, kv_len: int) -> Tensor:
    """K (rotated) of positions 0:kv_len, fp32 [kv_len, num_kv_heads, head_dim]."""
    return prompt.pool.read_k(layer, _slots(prompt, kv_len))


def _slots(prompt: Prompt, kv_len: int) -> slice | Tensor:
    """Of positions 0:kv_len: a slice, which copies nothing, where the sequence's blocks are adjacent."""
    first = prompt.sequence.contiguous_slot
    if first >= 0:
        return slice(first, first + kv_len)
    return prompt.sequence.slots(torch.arange(kv_len, device=prompt.pool.device))
