"""What selectors may ask for about the cached tokens: how far fresh KV is from old, and what the question looks at."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cacheblend_kernels import AttentionParams
from torch import Tensor

from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import Candidates
from cacheblend_cli.kv.device import upload
from cacheblend_cli.kv.forward import FreshKV, Hidden, LayerStep, Observer, queries, rotate, run_layers
from cacheblend_cli.kv.rows import Rows, positions_of, rows_of
from cacheblend_cli.model.decoder import DecoderLayer


class BeforeLayers:
    """Evidence there is before layer 0: what the question looks at when it runs alone over the stored KV.

    The fresh rows (suffix and holes) run through the layers over the pool as it was loaded. What they write is written
    again by the blended prefill. probe_layers: the layers whose attention counts. draft_tokens: how far `draft` looks.
    """

    def __init__(self, prompt: Prompt, probe_layers: Sequence[int], draft_tokens: int) -> None:
        self._prompt, self._probe_layers, self._draft_tokens = prompt, frozenset(probe_layers), draft_tokens

    def deviation(self, candidates: Candidates) -> Tensor:
        raise AssertionError("a selector that compares fresh with old KV needs a check layer")

    perturbation = deviation

    def attention(self, candidates: Candidates) -> Tensor:
        """The largest attention weight on each candidate [n] fp32, over the suffix's rows, the probe layers and their heads.

        (ProphetKV, arXiv 2602.02579, and InfoFlow, arXiv 2603.05353, sum where this takes the largest: one head that
        looks a value up counts for more than many that look at everything a little.)
        """
        look = _Look(self._prompt, self._probe_layers, candidates, stop=max(self._probe_layers, default=0))
        self._run_fresh(look)
        return look.found

    def draft(self, candidates: Candidates) -> Tensor:
        """As `attention`, over the rows of the answer's first tokens, drafted greedily over the stored KV.

        Values are looked up when the answer comes to them, not while the question is read (Lookahead Q-Cache, arXiv
        2505.20334, evicts by the same rows).
        """
        prompt, sequence, decoder = self._prompt, self._prompt.sequence, self._prompt.decoder
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
        prompt = self._prompt
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
    spec = layer.spec
    group = spec.num_heads // spec.num_kv_heads
    found = torch.zeros(len(candidates), device=q.device)
    for head in range(spec.num_kv_heads):
        rows = q[:, head * group : (head + 1) * group].float().reshape(-1, spec.head_dim)
        at = positions.repeat_interleave(group)
        p = _probabilities(rows, keys[:, head], at, layer.attention, _sinks(layer, head))
        found = torch.maximum(found, p[:, candidates.positions].amax(0))
    return found


def _sinks(layer: DecoderLayer, kv_head: int) -> Tensor | None:
    """Of the query heads that share a KV head, [group] fp32."""
    sinks = layer.attention.sinks
    return None if sinks is None else sinks.view(layer.spec.num_kv_heads, -1)[kv_head]


def _probabilities(
    q: Tensor, keys: Tensor, positions: Tensor, params: AttentionParams, sinks: Tensor | None = None
) -> Tensor:
    """[num_rows, kv_len] fp32, causal by position. sinks: of the heads that take turns in the rows."""
    logits, window = (q @ keys.T) * params.scale, params.sliding_window
    if params.soft_cap is not None:
        logits = params.soft_cap * torch.tanh(logits / params.soft_cap)
    key_at = torch.arange(keys.shape[0], device=q.device)
    hidden = key_at > positions[:, None]
    if window is not None:
        hidden |= key_at <= positions[:, None] - window
    logits = logits.masked_fill_(hidden, float("-inf"))
    if sinks is None:
        return logits.softmax(-1)
    sinks = sinks.repeat(len(logits) // len(sinks))
    return torch.cat((logits, sinks[:, None]), -1).softmax(-1)[:, : keys.shape[0]]


def _keys(prompt: Prompt, layer: int, kv_len: int) -> Tensor:
    """K (rotated) of positions 0:kv_len, fp32 [kv_len, num_kv_heads, head_dim]."""
    return prompt.pool.read_k(layer, _slots(prompt, kv_len))


def _slots(prompt: Prompt, kv_len: int) -> slice | Tensor:
    """Of positions 0:kv_len: a slice, which copies nothing, where the sequence's blocks are adjacent."""
    first = prompt.sequence.contiguous_slot
    if first >= 0:
        return slice(first, first + kv_len)
    return prompt.sequence.slots(torch.arange(kv_len, device=prompt.pool.device))
