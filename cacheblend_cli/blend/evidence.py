"""Evidence for selectors about the cached tokens: KV deviation, and the question's attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import Candidates
from cacheblend_cli.kv.forward import (
    NO_WORK,
    FreshKV,
    Hidden,
    LayerStep,
    LayerWork,
    Pass,
    Steps,
    finish,
    layer_by_layer,
    queries,
    rotate,
)
from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.kv.rows import Rows, positions_of
from cacheblend_cli.model.decoder import DecoderLayer

LOGITS_AT_ONCE = 1 << 25
"""Maximum elements of a probe layer's logits that a GPU holds at once (128 MiB): one product for all heads unless the
prompt is long. On a CPU each head is a product of its own, and its results stay in cache."""

LATENT_HEADS_AT_ONCE = 8  # query heads whose logits over the one shared key are computed together


class BeforeLayers:
    """Evidence available before layer 0: attention of the question, run alone over the stored KV.

    The fresh rows (suffix and missing chunks) pass through the layers over the loaded pool. The blended prefill
    overwrites their KV. Selectors that compute their own evidence may read prompt and probe_layers (layers whose
    attention counts).
    """

    def __init__(self, prompt: Prompt, probe_layers: Sequence[int]) -> None:
        self.prompt, self.probe_layers = prompt, frozenset(probe_layers)
        self._found: Tensor | None = None

    def probe(self, candidates: Candidates) -> Pass[None]:
        """Compute `attention` with pauses between layers, before the selector asks for it."""
        probe = AttentionProbe(self.prompt, self.probe_layers, candidates, stop=max(self.probe_layers, default=0))
        yield from run_fresh(self.prompt, probe)
        self._found = self.prompt.decoder.part.ranks.largest(probe.found)

    def deviation(self, candidates: Candidates) -> Tensor:
        raise AssertionError("a selector that compares fresh with old KV needs a check layer")

    def attention(self, candidates: Candidates) -> Tensor:
        """Return the largest attention weight on each candidate, [n] fp32, over the suffix's rows, the probe layers and
        their heads.

        ProphetKV (arXiv 2602.02579) and InfoFlow (arXiv 2603.05353) sum over heads. The maximum is used here because
        one head that looks a value up counts for more than many that look at everything a little.
        """
        if self._found is None:
            finish(self.probe(candidates))
        assert self._found is not None
        return self._found


def run_fresh(prompt: Prompt, probe: AttentionProbe) -> Pass[Hidden | None]:
    """Pass the fresh rows (suffix and missing chunks) through the layers, over the stored KV."""
    computed = [s for s in prompt.plan.segments if s.status == "computed"]
    rows = prompt.rows(positions_of(computed, prompt.decoder.device))
    return layer_by_layer(prompt.decoder, rows, prompt.token_ids[rows.positions], probe)


class AttentionProbe(Steps):
    """Observe the attention of a pass's last rows (at most as many as the suffix has) in the probe layers.

    stop: last layer whose queries are needed.
    """

    def __init__(
        self, prompt: Prompt, probe_layers: frozenset[int], candidates: Candidates, stop: int | None = None
    ) -> None:
        self._prompt, self._probe_layers, self._candidates, self._stop = prompt, probe_layers, candidates, stop
        self._num_rows = len(prompt.plan.segments[-1].token_ids)
        self._peaks = PeaksWork(torch.zeros(prompt.plan.num_tokens, device=prompt.decoder.device), self._num_rows)
        self._has_kernel = prompt.decoder.kernels.has_attention_peaks and prompt.decoder.spec.latent is None

    @property
    def found(self) -> Tensor:
        """Largest attention weight on each candidate so far, [n] fp32."""
        return self._peaks.found[self._candidates.positions]

    def at(self, layer: DecoderLayer) -> LayerStep:
        if layer.own_kv:
            self._prompt.loader.wait(layer.index)
        return LayerStep(stop=layer.index == self._stop)

    def queries(self, layer: DecoderLayer, q: Tensor, rows: Rows) -> None:
        if layer.index in self._probe_layers:
            q, positions = q[-self._num_rows :], rows.positions[-self._num_rows :]
            attention_peaks(self._prompt.sequence, layer, q, positions, rows, self._peaks.found)

    def work(self, layer: DecoderLayer) -> LayerWork | None:
        if layer.index not in self._probe_layers:
            return NO_WORK
        return self._peaks if self._has_kernel else None


class PeaksWork(LayerWork):
    """`attention_peaks` of a pass's last num_rows rows, by a kernel. found: peaks so far, fp32 [kv_len]."""

    key = "attention peaks"

    def __init__(self, found: Tensor, num_rows: int) -> None:
        self.found, self._num_rows = found, num_rows
        self._positions: Tensor | None = None  # of a twin: [rows of the bucket] int64, -1 for rows that do not count

    def queries(self, layer: DecoderLayer, q: Tensor, rows: Rows) -> None:
        cache, positions = rows.pool.layers[layer.index], self._positions
        assert positions is not None
        layer.kernels.attention_peaks(q, positions, cache, rows.attention, layer.attention, self.found)

    def twin(self, num_rows: int, context: int) -> PeaksWork:
        twin = PeaksWork(self.found.new_zeros(context), self._num_rows)
        twin._positions = torch.full((num_rows,), -1, device=self.found.device)
        return twin

    def reset(self) -> None:
        assert self._positions is not None
        self._positions.fill_(-1)

    def enter(self, twin: PeaksWork, rows: Rows) -> None:
        twin.reset()
        first = max(0, len(rows) - self._num_rows)
        assert twin._positions is not None
        twin._positions[first : len(rows)].copy_(rows.positions[first:])
        twin.found[: len(self.found)].copy_(self.found)
        self.found = twin.found[: len(self.found)]

    def leave(self) -> None:
        self.found = self.found.clone()


class AtCheckLayer:
    """Evidence at a check layer, before its fresh K and V overwrite the old.

    fresh: all rows; candidate_index, suffix_index: rows of the candidates and of the suffix. kind: "k", "v" or "kv",
    compared by `deviation`. Selectors that compute their own evidence may also read prompt, layer, rows,
    `suffix_queries`, and the candidates' k (after RoPE) and v.
    """

    def __init__(
        self, prompt: Prompt, fresh: FreshKV, candidate_index: Tensor, suffix_index: Tensor, kind: str
    ) -> None:
        self.prompt, self.layer, self._kind = prompt, fresh.layer, kind
        self._h, self._suffix = fresh.h[suffix_index], fresh.rows.take(suffix_index)
        self.rows = fresh.rows.take(candidate_index)
        self.k = rotate(fresh.layer, fresh.k[candidate_index], self.rows)
        self.v = fresh.v[candidate_index]

    def deviation(self, candidates: Candidates) -> Tensor:
        """Return the squared distance of fresh from old K, V or both, [n] fp32 (CacheBlend, arXiv 2405.16444, section
        4.3).

        With latent attention "k" compares position key and latent, since K is made from both, and "v" only the latent.
        """
        cache, kind = self.prompt.pool.layers[self.layer.index], self._kind
        if self.layer.latent_heads is not None and kind == "k":
            kind = "kv"
        own = self.layer.kernels.kv_deviation(self.k, self.v, cache, self.rows.slots, kind)
        return self.layer.part.sum_of_kv(own, self.layer.index)

    def attention(self, candidates: Candidates) -> Tensor:
        """Return the suffix's largest attention weight on the old KV of each candidate at this layer, [n] fp32."""
        q, positions = self.suffix_queries()
        peaks = torch.zeros(self.prompt.plan.num_tokens, device=q.device)
        attention_peaks(self.prompt.sequence, self.layer, q, positions, self._suffix, peaks)
        return self.layer.part.ranks.largest(peaks[candidates.positions])

    def suffix_queries(self) -> tuple[Tensor, Tensor]:
        """Return q of the suffix's rows, [num_rows, num_heads, head_dim] after RoPE, and their positions."""
        return queries(self.layer, self._h, self._suffix), self._suffix.positions


def attention_peaks(
    sequence: PagedSequence, layer: DecoderLayer, q: Tensor, positions: Tensor, rows: Rows, peaks: Tensor
) -> None:
    """Raise `peaks` [kv_len] fp32 to the largest softmax weight of rotated q [num_rows, num_heads, head_dim] on each of
    the sequence's first positions.

    positions: [num_rows] int64, the rows' positions; rows: rows of the same sequence.
    """
    cache = sequence.pool.layers[layer.index]
    if layer.kernels.has_attention_peaks and layer.latent_heads is None:
        layer.kernels.attention_peaks(q, positions, cache, rows.attention, layer.attention, peaks)
        return
    q, keys = layer.to_keys(q), sequence.pool.keys(layer.index, sequence.slots_to(len(peaks)))
    # with latent attention all heads share one key: compute a few heads at a time
    parts = (q,) if layer.latent_heads is None else q.split(LATENT_HEADS_AT_ONCE, 1)
    for part in parts:
        at_once = heads_at_once(q.device, part.shape[1] // keys.shape[1] * len(q) * len(keys))
        for weights in attention_weights(layer, part, positions, keys, at_once):
            torch.maximum(peaks, weights.flatten(0, 2).amax(0), out=peaks)


def attention_weights(
    layer: DecoderLayer, q: Tensor, positions: Tensor, keys: Tensor, at_once: int
) -> Iterator[Tensor]:
    """Softmax weights, causal by position, of `at_once` KV heads at a time: fp32 [heads, group, num_rows, kv_len].

    q: as `DecoderLayer.to_keys` gives it; positions: [num_rows] int64, the rows' positions; keys: `KVPool.keys` from
    position 0 on, fp32 [kv_len, num_kv_heads, dim].
    """
    params, (kv_len, num_kv_heads, head_dim) = layer.attention, keys.shape
    rows = q.float().view(len(q), num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # KV heads, group, rows
    key_at = torch.arange(kv_len, device=positions.device)
    hidden = key_at > positions[:, None]
    if params.sliding_window is not None:
        hidden |= key_at <= positions[:, None] - params.sliding_window
    for start in range(0, num_kv_heads, at_once):
        heads = slice(start, start + at_once)
        logits = (rows[heads].flatten(1, 2) @ keys[:, heads].permute(1, 2, 0)).mul_(params.scale)
        if params.soft_cap is not None:
            logits = params.soft_cap * torch.tanh(logits / params.soft_cap)
        logits = logits.view(*rows[heads].shape[:3], kv_len)
        logits.masked_fill_(hidden, float("-inf"))
        if params.sinks is not None:  # logits without a key
            sinks = params.sinks.view(num_kv_heads, -1, 1, 1)[heads]
            logits = torch.cat((logits, sinks.expand(*logits.shape[:3], 1)), -1)
        torch.softmax(logits, -1, out=logits)  # in place: fresh memory of this size costs more than the products
        yield logits[..., :kv_len]


def heads_at_once(device: torch.device, numbers: int) -> int:
    """Return the KV heads per product. numbers: elements of one head's logits."""
    return max(1, LOGITS_AT_ONCE // numbers) if device.type == "cuda" else 1
