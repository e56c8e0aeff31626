"""What selectors may ask for about the cached tokens: how far fresh KV is from old, and what the question looks at."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cacheblend_cli.blend.selectors import Candidates
from cacheblend_cli.kv.device import upload
from cacheblend_cli.kv.forward import attend, write_kv
from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.pool import KVPool, PagedSequence
from cacheblend_cli.kv.rows import Rows, positions_of, rows_of
from cacheblend_cli.model.decoder import Decoder, DecoderLayer
from cacheblend_cli.prompt.plan import PromptPlan


class BeforeLayers:
    """Evidence there is before layer 0: what the question looks at when it runs alone over the stored KV.

    The fresh rows (suffix and holes) run through the layers over the pool as it was loaded. What they write is written
    again by the blended prefill. probe_layers: the layers whose attention counts. draft_tokens: how far `draft` looks.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        sequence: PagedSequence,
        plan: PromptPlan,
        loader: KVLoader,
        probe_layers: Sequence[int],
        draft_tokens: int,
    ) -> None:
        self._decoder, self._pool, self._sequence, self._plan = decoder, pool, sequence, plan
        self._loader, self._probe_layers, self._draft_tokens = loader, frozenset(probe_layers), draft_tokens

    def deviation(self, candidates: Candidates) -> Tensor:
        raise AssertionError("a selector that compares fresh with old KV needs a check layer")

    perturbation = deviation

    def attention(self, candidates: Candidates) -> Tensor:
        """The largest attention weight on each candidate [n] fp32, over the suffix's rows, the probe layers and their heads.

        (ProphetKV, arXiv 2602.02579, and InfoFlow, arXiv 2603.05353, sum where this takes the largest: one head that
        looks a value up counts for more than many that look at everything a little.)
        """
        found, _, _ = self._run_fresh(candidates, max(self._probe_layers, default=-1) + 1)
        return found

    def draft(self, candidates: Candidates) -> Tensor:
        """As `attention`, over the rows of the answer's first tokens, drafted greedily over the stored KV.

        Values are looked up when the answer comes to them, not while the question is read (Lookahead Q-Cache, arXiv
        2505.20334, evicts by the same rows).
        """
        decoder, sequence = self._decoder, self._sequence
        _, delta, residual = self._run_fresh(candidates, len(decoder.layers))
        found = torch.zeros(len(candidates), device=decoder.device)
        at = self._plan.num_tokens
        for _ in range(min(self._draft_tokens, sequence.capacity - at)):
            token = decoder.logits(delta[-1:], residual[-1:]).argmax(-1)
            rows = rows_of(decoder, sequence, upload([at], decoder.device), at + 1, at + 1)
            mass, delta, residual = self._run(token, rows, candidates, rows.positions, len(decoder.layers))
            found, at = torch.maximum(found, mass), at + 1
        return found

    def _run_fresh(self, candidates: Candidates, num_layers: int) -> tuple[Tensor, Tensor, Tensor]:
        decoder, plan = self._decoder, self._plan
        positions = positions_of([s for s in plan.segments if s.status == "computed"], decoder.device)
        rows = rows_of(decoder, self._sequence, positions, plan.num_tokens, plan.num_tokens)
        suffix = positions[-len(plan.segments[-1].token_ids) :]
        return self._run(upload(plan.token_ids, decoder.device)[positions], rows, candidates, suffix, num_layers)

    def _run(
        self, token_ids: Tensor, rows: Rows, candidates: Candidates, looking: Tensor, num_layers: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run rows through the first layers; what the last of them, at positions `looking`, look at; delta and residual."""
        decoder = self._decoder
        found = torch.zeros(len(candidates), device=decoder.device)
        delta, residual = decoder.embed(token_ids), None
        for layer in decoder.layers[:num_layers]:
            self._loader.wait(layer.index)
            h, residual = decoder.input_norm(layer, delta, residual)
            q, k, v = layer.project_qkv(h)
            write_kv(layer, k, v, self._pool, rows)
            rotated = decoder.kernels.rope(q, rows.cos, rows.sin)
            if layer.index in self._probe_layers:
                keys = _keys(self._pool, self._sequence, layer.index, rows.attention.max_kv_len)
                weights = attention_peaks(layer, rotated[-len(looking) :], looking, keys, candidates)
                found = torch.maximum(found, weights)
            delta, residual = layer.finish(attend(layer, rotated, self._pool, rows), residual)
        assert residual is not None
        return found, delta, residual


class AtCheckLayer:
    """Evidence there is at a check layer, before its fresh K and V overwrite the old.

    k, v: fresh, unrotated [num_rows, num_kv_heads, head_dim]; h: the layer's normed input [num_rows, hidden_size];
    candidate_index, suffix_index: which of the rows are the candidates and the suffix.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        h: Tensor,
        k: Tensor,
        v: Tensor,
        pool: KVPool,
        sequence: PagedSequence,
        rows: Rows,
        candidate_index: Tensor,
        suffix_index: Tensor,
        kind: str,
    ) -> None:
        self._layer, self._pool, self._sequence, self._rows = layer, pool, sequence, rows
        self._h, self._v, self._kind, self._suffix = h, v[candidate_index], kind, suffix_index
        cos, sin = rows.cos[candidate_index], rows.sin[candidate_index]
        self._k = layer.kernels.rope(k[candidate_index], cos, sin)
        self._slots = rows.slots[candidate_index]

    def deviation(self, candidates: Candidates) -> Tensor:
        """Squared distance of fresh from old K, V or both, [n] fp32 (CacheBlend, arXiv 2405.16444, section 4.3)."""
        index = self._layer.index
        pool = self._pool
        return self._layer.kernels.kv_deviation(
            self._k,
            self._v,
            pool.k[index],
            pool.v[index],
            self._slots,
            kind=self._kind,
            k_scale=pool.k_scales[index],
            v_scale=pool.v_scales[index],
        )

    def attention(self, candidates: Candidates) -> Tensor:
        """The largest attention weight of the suffix at this layer on the old KV of each candidate, [n] fp32."""
        q, positions = self._suffix_queries()
        keys = _keys(self._pool, self._sequence, self._layer.index, self._rows.attention.max_kv_len)
        return attention_peaks(self._layer, q, positions, keys, candidates)

    def draft(self, candidates: Candidates) -> Tensor:
        raise AssertionError("a draft is made before layer 0")

    def perturbation(self, candidates: Candidates) -> Tensor:
        """First-order change of the suffix's attention output when a token's old KV is replaced, [n] fp32.

        Summed over suffix rows and heads: a_t * (|q . dk_t| / sqrt(d) * |v_t - o| + |dv_t|), where softmax's derivative
        is a_t * (v_t - o) along the logit of token t.
        """
        q, positions = self._suffix_queries()
        layer, spec = self._layer, self._layer.spec
        old_k, old_v = self._pool.read(layer.index, self._slots)
        dk, dv = self._k.float() - old_k, self._v.float() - old_v
        kv_len = self._rows.attention.max_kv_len
        keys = _keys(self._pool, self._sequence, layer.index, kv_len)
        values = self._pool.read_v(layer.index, _slots(self._pool, self._sequence, kv_len))
        group = spec.num_heads // spec.num_kv_heads
        total = torch.zeros(len(candidates), device=q.device)
        for head in range(spec.num_kv_heads):
            rows = q[:, head * group : (head + 1) * group].float().reshape(-1, spec.head_dim)
            at = positions.repeat_interleave(group)
            p = _probabilities(rows, keys[:, head], at, spec.head_dim**-0.5, layer.sliding_window)
            out = p @ values[:, head]
            a = p[:, candidates.positions]
            v = old_v[:, head]
            distance = (v.square().sum(-1) - 2 * out @ v.T + out.square().sum(-1, keepdim=True)).clamp_min(0).sqrt()
            moved = (rows @ dk[:, head].T).abs() * spec.head_dim**-0.5 * distance
            total += (a * (moved + dv[:, head].norm(dim=-1))).sum(0)
        return total

    def _suffix_queries(self) -> tuple[Tensor, Tensor]:
        rows, index = self._rows, self._suffix
        q = self._layer.project_q(self._h[index])
        return self._layer.kernels.rope(q, rows.cos[index], rows.sin[index]), rows.positions[index]


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
        p = _probabilities(rows, keys[:, head], at, spec.head_dim**-0.5, layer.sliding_window)
        found = torch.maximum(found, p[:, candidates.positions].amax(0))
    return found


def _probabilities(q: Tensor, keys: Tensor, positions: Tensor, scale: float, window: int | None) -> Tensor:
    """[num_rows, kv_len] fp32, causal by position."""
    logits = (q @ keys.T) * scale
    key_at = torch.arange(keys.shape[0], device=q.device)
    hidden = key_at > positions[:, None]
    if window is not None:
        hidden |= key_at <= positions[:, None] - window
    return logits.masked_fill_(hidden, float("-inf")).softmax(-1)


def _keys(pool: KVPool, sequence: PagedSequence, layer: int, kv_len: int) -> Tensor:
    """K (rotated) of positions 0:kv_len, fp32 [kv_len, num_kv_heads, head_dim]."""
    return pool.read_k(layer, _slots(pool, sequence, kv_len))


def _slots(pool: KVPool, sequence: PagedSequence, kv_len: int) -> slice | Tensor:
    """Of positions 0:kv_len: a slice, which copies nothing, where the sequence's blocks are adjacent."""
    first = sequence.contiguous_slot
    if first >= 0:
        return slice(first, first + kv_len)
    return sequence.slots(torch.arange(kv_len, device=pool.device))
