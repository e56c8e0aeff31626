"""Selectors and a correction that the study compares and the tool does not offer, registered as a user's own are
(docs/selectors.md).

`draft`, `perturb` and `mean-shift` are names for BlendParams once this is imported. One process only: nothing here sums
over the ranks of --tensor-parallel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cacheblend_cli.blend.corrections import CORRECTIONS, Correction, old_kv
from cacheblend_cli.blend.evidence import AtCheckLayer, AttentionProbe, BeforeLayers, attention_weights, run_fresh
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import SELECTORS, Candidates, Evidence
from cacheblend_cli.kv.forward import finish, layer_by_layer, write_kv
from cacheblend_cli.kv.rows import rows_of
from cacheblend_cli.model.decoder import DecoderLayer


class DraftAttention:
    """`draft`: tokens that a greedy draft of the answer attends to over the stored KV and, with decreasing weight, the
    two tokens before each. Values are looked up when the answer reaches them, not while the question is read (after
    Lookahead Q-Cache, arXiv 2505.20334).

    The draft has at most `num_tokens` tokens, and as many as the prompt's sequence has capacity for.
    """

    needs_check_layer, num_tokens = False, 8

    def scores(self, candidates: Candidates, evidence: Evidence) -> Tensor:
        assert isinstance(evidence, BeforeLayers)
        weights = self.attention(evidence.prompt, evidence.probe_layers, candidates)
        scores = weights.clone()
        for back in (1, 2):
            scores[:-back] = torch.maximum(scores[:-back], 0.5**back * weights[back:])
        return scores

    def attention(self, prompt: Prompt, layers: frozenset[int], candidates: Candidates) -> Tensor:
        """The largest attention weight of the draft's rows on each candidate, [n] fp32, over these layers and their
        heads."""
        decoder, sequence, at = prompt.decoder, prompt.sequence, prompt.plan.num_tokens
        hidden = finish(run_fresh(prompt, AttentionProbe(prompt, frozenset(), candidates)))
        look = AttentionProbe(prompt, layers, candidates)
        capacity = len(sequence.blocks) * sequence.pool.block_size
        for position in range(at, at + min(self.num_tokens, capacity - at)):
            assert hidden is not None
            token = hidden.logits(decoder, slice(-1, None)).argmax(-1)
            where = torch.tensor([position], device=decoder.device)
            rows = rows_of(decoder, sequence, where, position + 1, position + 1)
            hidden = finish(layer_by_layer(decoder, rows, token, look))
        return look.found


class Perturbation:
    """`perturb`: tokens whose repair changes the question's attention output most, to first order.

    Summed over suffix rows and heads: a_t * (scale * |q . dk_t| * |v_t - o| + |dv_t|), where softmax's derivative is
    a_t * (v_t - o) along the logit of token t. With latent attention all heads have the same k, position key and
    latent, and the same v, the latent: the change is that of the output before it is projected up.
    """

    needs_check_layer = True

    def scores(self, candidates: Candidates, evidence: Evidence) -> Tensor:
        assert isinstance(evidence, AtCheckLayer)
        layer, prompt = evidence.layer, evidence.prompt
        q, positions = evidence.suffix_queries()
        q = layer.to_keys(q)
        old_k, old_v = prompt.pool.read(layer.index, evidence.rows.slots)
        dk, dv = evidence.k.float() - old_k, evidence.v.float() - old_v
        keys, values = prompt.pool.read(layer.index, prompt.sequence.slots_to(prompt.plan.num_tokens))
        if layer.latent_heads is not None:
            dk, keys = torch.cat((dk, dv), -1), torch.cat((keys, values), -1)
        total, group = torch.zeros(len(candidates), device=q.device), q.shape[1] // keys.shape[1]
        for head, (p,) in enumerate(attention_weights(layer, q, positions, keys, at_once=1)):
            rows = q[:, head * group : (head + 1) * group].float().transpose(0, 1)  # [group, num_rows, head_dim]
            out, v = p @ values[:, head], old_v[:, head]
            distance = (v.square().sum(-1) - 2 * out @ v.T + out.square().sum(-1, keepdim=True)).clamp_min(0).sqrt()
            moved = (rows @ dk[:, head].T).abs() * layer.attention.scale * distance
            total += (p[..., candidates.positions] * (moved + dv[:, head].norm(dim=-1))).sum((0, 1))
        return total


class MeanShift(Correction):
    """`mean-shift`: shift the old K and V of a chunk by the mean change of its recomputed tokens (AgentKVShift, arXiv
    2607.21604).

    The context missing from a chunk that was collected alone affects all of its tokens similarly. The mean is taken per
    chunk and layer, of K before RoPE and of V, and shrunk towards zero where the changes vary more than the mean
    explains (James-Stein, with one variance for the chunks up to it).

    A token is shifted by later tokens of its own chunk too, never by a later chunk: causal per chunk, not per token.
    """

    def __init__(self, prompt: Prompt, every: Candidates, repaired: Candidates) -> None:
        where = torch.searchsorted(every.positions, repaired.positions)
        stale = torch.ones(len(every), dtype=torch.bool, device=every.positions.device)
        stale[where] = False
        self._chunk, self._stale_chunk = repaired.chunk, every.chunk[stale]
        self._num_chunks = int(every.chunk.max()) + 1
        self._repaired = prompt.rows(repaired.positions)
        self._stale = prompt.rows(every.positions[stale])

    def apply(self, layer: DecoderLayer, k: Tensor, v: Tensor) -> None:
        """Move the layer's stale rows. k before RoPE, v: fresh, of the repaired tokens, which the pool still has old;
        [num_repaired, num_kv_heads, head_dim]."""
        old_k, old_v = old_kv(layer, self._repaired)
        stale_k, stale_v = old_kv(layer, self._stale)
        write_kv(layer, stale_k + self.mean(k.float() - old_k), stale_v + self.mean(v.float() - old_v), self._stale)

    def mean(self, change: Tensor) -> Tensor:
        """Return the shift of every stale row, fp32. change: fp32 [num_repaired, num_kv_heads, head_dim]."""
        device, chunks = change.device, self._num_chunks
        ones = torch.ones(len(change), device=device)
        count = torch.zeros(chunks, device=device).index_add_(0, self._chunk, ones)
        total = torch.zeros(chunks, *change.shape[1:], device=device).index_add_(0, self._chunk, change)
        mean = total / count.clamp_min(1)[:, None, None]
        apart = (change - mean[self._chunk]).square().sum((1, 2))
        spread = torch.zeros(chunks, device=device).index_add_(0, self._chunk, apart)
        variance = spread.cumsum(0) / (count - 1).clamp_min(0).cumsum(0).clamp_min(1)  # this chunk and those before it
        noise = variance / count.clamp_min(1)
        keep = (1 - noise / mean.square().sum((1, 2)).clamp_min(1e-30)).clamp_min(0)
        return (mean * keep[:, None, None])[self._stale_chunk]


def register() -> None:
    """Make the names known to BlendParams; importing this does, too."""
    SELECTORS.update({"draft": lambda seed: DraftAttention(), "perturb": lambda seed: Perturbation()})
    CORRECTIONS["mean-shift"] = MeanShift


register()
