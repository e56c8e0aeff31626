"""Published methods on this engine, for the comparisons of study/fidelity.md; study/README.md lists the choices that
are ours.

Each class chooses the tokens to recompute, or changes the others. "After" a paper means that a detail is open or
replaced; the docstring says how. The budget is the ratio, as for the tool's selectors, and at ratio 1 each is a full
prefill.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil
from typing import Any
from unittest.mock import patch

import torch
from research import MeanShift
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cacheblend_cli.blend import prefill as blend
from cacheblend_cli.blend.corrections import CORRECTIONS, old_kv
from cacheblend_cli.blend.evidence import BeforeLayers
from cacheblend_cli.blend.prefill import BlendSteps
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import SELECTORS, Candidates, Evidence, choose
from cacheblend_cli.engine.engine import Engine, Prefilled, Request
from cacheblend_cli.evaluation.settings import Prefill, Setting
from cacheblend_cli.kv import forward
from cacheblend_cli.kv.forward import LayerStep, Steps, finish, layer_by_layer
from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.kv.rows import Rows, positions_of
from cacheblend_cli.model.decoder import DecoderLayer
from cacheblend_cli.prompt.plan import PromptPlan
from cacheblend_cli.types import BlendParams, LayerReport, LayerStatus

DIGEST = 0.15  # share of each chunk's tokens that QCFuse's question sees
CONTEXT = 0.5  # share of the other chunks' tokens that a row repaired by RelaxKV sees
TEMPERATURE = 0.9  # of PSR's attention on tokens that are not recomputed

_attend = forward.attend


class Question(Steps):
    """Runs the question over the stored KV of a prompt and records its attention. Only the question's rows are
    computed.

    share: of each chunk's tokens that it attends to, those with the shortest keys, which draw attention whatever the
    query (Devoto et al., arXiv 2406.11430); the prefix and the question itself are always visible.
    """

    def __init__(self, prompt: Prompt, layers: Iterable[int], share: float = 1.0) -> None:
        self.looks: dict[int, Tensor] = {}
        """By layer: the attention weight on each position, summed over the suffix's rows and the heads, [num_tokens]
        fp32. It is taken over all stored keys, whatever the question has seen before."""
        self._prompt, self._layers, self._share = prompt, frozenset(layers), share
        computed = [s for s in prompt.plan.segments if s.status == "computed"]
        rows = prompt.rows(positions_of(computed, prompt.decoder.device))
        with patch.object(forward, "attend", _attend if share == 1 else self._attend_digest):
            finish(layer_by_layer(prompt.decoder, rows, prompt.token_ids[rows.positions], self))

    def at(self, layer: DecoderLayer) -> LayerStep:
        self._prompt.loader.wait(layer.index)
        return LayerStep(stop=layer.index == max(self._layers))

    def queries(self, layer: DecoderLayer, q: Tensor, rows: Rows) -> None:
        if layer.index not in self._layers:
            return
        last = len(self._prompt.plan.segments[-1].token_ids)
        q, keys = q[-last:].float(), _kv(self._prompt, layer)[0]
        logits = torch.einsum("rhd,khd->hrk", q, _each_head(keys, q)) * layer.attention.scale
        later = _positions(self._prompt) > rows.positions[-last:, None]
        self.looks[layer.index] = logits.masked_fill(later, float("-inf")).softmax(-1).sum((0, 1))

    def _attend_digest(self, layer: DecoderLayer, q: Tensor, rows: Rows) -> Tensor:
        length = _kv(self._prompt, layer)[0].norm(dim=-1).mean(-1)
        seen = torch.ones(len(length), dtype=torch.bool, device=length.device)
        for s in self._prompt.plan.chunks:
            seen[s.start : s.end] = False
            seen[s.start + length[s.start : s.end].argsort()[: ceil(self._share * len(s.token_ids))]] = True
        return _attend_to(self._prompt, layer, q, seen & (_positions(self._prompt) <= rows.positions[:, None]))


class ProphetKV:
    """After ProphetKV (arXiv 2602.02579): tokens by the question's attention over the stored KV, summed over all layers
    (the paper leaves the aggregation open)."""

    needs_check_layer = False

    def scores(self, candidates: Candidates, evidence: Evidence) -> Tensor:
        prompt = _prompt(evidence)
        looks = Question(prompt, range(len(prompt.decoder.layers))).looks
        return sum(looks.values(), torch.zeros(prompt.plan.num_tokens))[candidates.positions]


class FusionRAG:
    """FusionRAG's query-guided selection (arXiv 2601.12904, section 3.2): the question is prefilled without the chunks,
    and tokens are chosen by its last-layer attention on their keys, summed, with the softmax over the prompt. Chunks
    are collected behind similar ones: context `neighbours`, with TF-IDF instead of an embedding model."""

    needs_check_layer = False

    def scores(self, candidates: Candidates, evidence: Evidence) -> Tensor:
        last = len(_prompt(evidence).decoder.layers) - 1
        return Question(_prompt(evidence), (last,), share=0).looks[last][candidates.positions]


class QCFuse:
    """After QCFuse (arXiv 2606.05875): the question runs over a digest of each chunk, and tokens are chosen by its
    attention on all keys of a few critical layers.

    The paper's code finds the digest by letting the model repeat each chunk, and the layers by profiling; here the
    digest is the tokens with the shortest keys, and the layers are the middle three, where its table has those of four
    models.
    """

    needs_check_layer = False

    def scores(self, candidates: Candidates, evidence: Evidence) -> Tensor:
        middle = len(_prompt(evidence).decoder.layers) // 2
        critical = range(max(0, middle - 1), middle + 2)
        looks = Question(_prompt(evidence), critical, share=DIGEST).looks
        return torch.stack(list(looks.values())).sum(0)[candidates.positions]


class CacheClip:
    """After CacheClip (arXiv 2510.10129): windows of tokens (`block`; 8 here) by the last-layer attention of a small
    auxiliary model that reads the whole prompt.

    The auxiliary model is the model itself: an upper bound. Its full prefill is not in the budget, as in the paper. It
    is kept for the next ratio of the same prompt.
    """

    needs_check_layer = False

    def __init__(self) -> None:
        self._of: tuple[list[int], Tensor] | None = None

    def scores(self, candidates: Candidates, evidence: Evidence) -> Tensor:
        prompt = _prompt(evidence)
        ids, last = prompt.plan.token_ids, len(prompt.decoder.layers) - 1
        if self._of is None or self._of[0] != ids:
            size = prompt.pool.block_size
            sequence = KVPool.of(prompt.decoder, -(-len(ids) // size), size).new_sequence(len(ids))
            plan = PromptPlan(tuple(replace(s, status="computed") for s in prompt.plan.segments))
            read = Prompt(prompt.decoder, plan, sequence, KVLoader())
            self._of = ids, Question(read, (last,)).looks[last]
        return self._of[1][candidates.positions]


def relaxkv(engine: Engine, request: Request, *, headroom: int = 0) -> Prefilled:
    """After RelaxKV (arXiv 2609.33503): see `RelaxSteps`."""
    if request.blend.effective_ratio() in (0.0, 1.0):
        return engine.hold_prefill(request, headroom=headroom)
    with patch.object(blend, "BlendSteps", RelaxSteps), patch.object(forward, "attend", _attend):
        return engine.hold_prefill(request, headroom=headroom)


class RelaxSteps(BlendSteps):
    """Each layer repairs its own choice of tokens, by the question's attention, and repaired rows see only what the
    question attends to there.

    Open: the hidden state of a token that the previous layer did not compute. Here it is never needed: rows leave and
    do not come back. Those continue that this and later layers attend to most, and the widths fall linearly from 1.5 to
    .5 of the ratio. A row sees the prefix, its own chunk, and the half of the other chunks' tokens that the question
    attends to most in that layer.
    """

    def choose_before(self, evidence: Evidence) -> None:
        prompt, layers = self._prompt, range(len(self._prompt.decoder.layers))
        ratio, count = self._policy.checks[0][1], len(self._all)
        self._keep(self._all)
        forward.attend = _attend  # a retry after a bad chunk starts again
        looks = Question(prompt, layers).looks
        self._looks = torch.stack([looks[i] for i in layers])
        self._ahead = self._looks.flip(0).cumsum(0).flip(0)
        slope = min(ratio, 1 - ratio)
        self._widths = [ceil(count * (ratio + slope * (0.5 - (i + 0.5) / len(layers))) - 1e-9) for i in layers]
        self._chunk = torch.full((prompt.plan.num_tokens,), -1)
        for number, s in enumerate(prompt.plan.chunks):
            self._chunk[s.start : s.end] = number
        self._context = ceil(CONTEXT * int((self._chunk >= 0).sum()))
        forward.attend = self._attend  # `relaxkv` restores it

    def at(self, layer: DecoderLayer) -> LayerStep:
        self._prompt.loader.wait(layer.index)
        before, left = self.rows.positions, self.candidates
        self._keep(left.take(choose(self._ahead[layer.index, left.positions], self._widths[layer.index], left)))
        self.reports.append(LayerReport(layer.index, LayerStatus.AFTER_CHECK, len(self.rows), len(self.candidates)))
        own = self._fresh if layer.index == 0 and self._policy.layer0_exact else self.rows.positions
        on = self._output_positions if layer.index == self._last_layer else self.rows.positions
        return LayerStep(kv_rows=torch.searchsorted(before, own), next_rows=torch.searchsorted(before, on))

    def _attend(self, layer: DecoderLayer, q: Tensor, rows: Rows) -> Tensor:
        looks = self._looks[layer.index].masked_fill(self._chunk < 0, float("inf"))
        seen = looks >= looks[self._chunk >= 0].topk(self._context).values[-1]
        at = rows.positions[:, None]
        free = torch.isin(at, self._fresh) | (self._chunk == self._chunk[at]) | seen
        return _attend_to(self._prompt, layer, q, free & (_positions(self._prompt) <= at))


def scaled_keys(factor: float) -> Prefill:
    """Return a prefill that multiplies the keys that are not recomputed: APE's attention temperature (arXiv 2502.05431,
    section 4.2). For settings with the correction "mean-shift", which it replaces."""

    class ScaledKeys(MeanShift):
        def apply(self, layer: DecoderLayer, k: Tensor, v: Tensor) -> None:
            keys, values = old_kv(layer, self._stale)
            forward.write_kv(layer, keys * factor, values, self._stale)

    def run(*args: Any, **kwargs: Any) -> Prefilled:
        with patch.dict(CORRECTIONS, {"mean-shift": ScaledKeys}):
            return Engine.hold_prefill(*args, **kwargs)

    return run


METHODS: dict[str, dict[str, Any]] = {
    "CacheBlend": {"selector": "hkvd", "deviation": "v"},
    "EPIC": {"selector": "first"},
    "CacheClip": {"selector": "cacheclip", "block": 8},
    "FusionRAG": {"selector": "fusionrag", "context": "neighbours"},
    "ProphetKV": {"selector": "prophetkv"},
    "PSR": {"selector": "hkvd", "deviation": "k", "correction": "mean-shift", "prefill": scaled_keys(1 / TEMPERATURE)},
    "QCFuse": {"selector": "qcfuse"},
    "AgentKVShift": {"selector": "hkvd", "correction": "mean-shift"},
    "RelaxKV": {"selector": "prophetkv", "prefill": relaxkv},
}
"""Settings of each method. CacheBlend compares V, as its code does. EPIC (arXiv 2410.15332) takes the first tokens of
each chunk.

PSR (arXiv 2603.20218) is a sink prefix (`--context sink`: every chunk is collected behind it), recompute by the change
of K, and APE's scaling of the attention on reused rows (arXiv 2502.05431). Here the temperature is in these rows' keys,
where decoding finds it too; a factor on their log-mass has no such place and stays 1. scaled_keys takes the mean
shift's place.

AgentKVShift (arXiv 2607.21604) moves the other tokens by the mean change of probes, which are the tokens that change
most at layer 1: one set of probes here, by K, and a James-Stein weight (`research.MeanShift`), where it has two sets
and a weight of its own.
"""


def published_settings(ratios: Iterable[float]) -> list[Setting]:
    """Return every method at every ratio, labelled "ProphetKV 0.15", and register their selectors."""
    clip = CacheClip()
    SELECTORS.update(
        {
            "prophetkv": lambda seed: ProphetKV(),
            "fusionrag": lambda seed: FusionRAG(),
            "qcfuse": lambda seed: QCFuse(),
            "cacheclip": lambda seed: clip,
        }
    )
    ratios = list(ratios)
    return [_setting(f"{name} {r:g}", r, **how) for name, how in METHODS.items() for r in ratios]


def _setting(label: str, ratio: float, context: str = "sink", prefill: Prefill | None = None, **how: Any) -> Setting:
    return Setting(label, BlendParams(ratio=ratio, **{"correction": "none", **how}), context, prefill)


def _prompt(evidence: Evidence) -> Prompt:
    assert isinstance(evidence, BeforeLayers)
    return evidence.prompt


def _positions(prompt: Prompt) -> Tensor:
    return torch.arange(prompt.plan.num_tokens, device=prompt.pool.device)


def _kv(prompt: Prompt, layer: DecoderLayer) -> tuple[Tensor, Tensor]:
    """Return K (rotated) and V of the whole prompt at a layer, fp32 [num_tokens, num_kv_heads, head_dim]."""
    return prompt.pool.read(layer.index, prompt.sequence.slots(_positions(prompt)))


def _each_head(x: Tensor, q: Tensor) -> Tensor:
    """Repeat K or V [n, num_kv_heads, head_dim] for every head of q."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _attend_to(prompt: Prompt, layer: DecoderLayer, q: Tensor, seen: Tensor) -> Tensor:
    """Return attention of rotated q [num_rows, num_heads, head_dim] over the prompt's positions that each row sees
    (seen: bool [num_rows, num_tokens]). For models without soft cap, window and sinks."""
    params = layer.attention
    assert params.soft_cap is None
    assert params.sliding_window is None
    assert params.sinks is None
    k, v = (_each_head(x, q).transpose(0, 1) for x in _kv(prompt, layer))
    out = scaled_dot_product_attention(q.float().transpose(0, 1), k, v, attn_mask=seen, scale=params.scale)
    return out.transpose(0, 1).to(q.dtype)
