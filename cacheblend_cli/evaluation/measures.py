"""Measure one prompt under one setting against full prefill of the same token ids."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cacheblend_cli.blend.fidelity import Divergence, divergence, log_distribution
from cacheblend_cli.engine.engine import Engine, Prefilled, Request
from cacheblend_cli.evaluation.settings import Prefill
from cacheblend_cli.kv.forward import Steps
from cacheblend_cli.model.decoder import DecoderLayer
from cacheblend_cli.types import SamplingParams

_PIECES = 3  # slices of the noise floor's prefill


@dataclass(frozen=True)
class AnswerLengths:
    tokens: int  # maximum of full prefill's answer, over which settings are teacher-forced
    own_tokens: int  # maximum of a setting's own greedy answer, up to `tokens`


@dataclass(frozen=True)
class MeasuredPrompt:
    """A prompt's greedy answer under one setting, and the data by which a setting is compared with full prefill.

    k, v and attended have one tensor per layer.
    """

    prefilled: Prefilled
    lengths: AnswerLengths
    ttft_s: float
    text: str  # the first own_tokens tokens of the answer
    answer_ids: list[int]  # full prefill's
    log_p: Tensor  # fp64 [num_answer_tokens, vocab_size], the distributions that predict answer_ids
    divergence: Divergence | None  # from full prefill, None for full prefill itself
    k: list[Tensor]  # rotated, fp32 [num_chunk_tokens, num_kv_heads, head_dim]
    v: list[Tensor]
    attended: list[Tensor]  # before o_proj, rows that predict the answer: fp32 [num_answer_tokens, num_heads, head_dim]


def run_full(engine: Engine, request: Request, lengths: AnswerLengths, before_s: float) -> MeasuredPrompt:
    """Prefill everything and answer greedily. before_s: seconds spent before."""
    return run_setting(engine, request.in_full(), lengths, before_s, Engine.hold_prefill)


@torch.no_grad()  # not inference_mode: the loader's threads write into the pool made here
def run_setting(
    engine: Engine,
    request: Request,
    lengths: AnswerLengths,
    before_s: float,
    run: Prefill,
    full: MeasuredPrompt | None = None,
) -> MeasuredPrompt:
    """Prefill under the request's setting and answer greedily. full: full prefill to compare with. Greedy decoding
    equals its answer as long as the most likely tokens agree, so it starts where they first differ: teacher forcing has
    computed the tokens before."""
    start = time.perf_counter()
    done = run(engine, request, headroom=lengths.tokens)
    first = done.logits.clone()
    int(first.argmax())  # the first token is on the host: end of TTFT
    ttft_s = before_s + time.perf_counter() - start
    if full is None:
        ids = done.answer(SamplingParams(max_tokens=lengths.tokens, stop_repetition=False)).token_ids
    else:
        ids = full.answer_ids
    attended = _Attended(engine.model.spec.num_layers)
    logits = torch.cat((first[None], done.predict(ids, attended)[1:]))
    log_p = log_distribution(logits)
    k, v = _chunk_kv(done)
    text, found = _text(engine, ids[: lengths.own_tokens]), None if full is None else divergence(full.log_p, log_p)
    same = None if found is None else found.first_difference
    if same is not None and same < lengths.own_tokens:
        sampling = SamplingParams(max_tokens=lengths.own_tokens - same, stop_repetition=False)
        generation = done.answer(sampling, given=same, logits=logits[same])
        text = _text(engine, (*ids[:same], *generation.token_ids))
    done.sequence.release()
    return MeasuredPrompt(
        prefilled=done,
        lengths=lengths,
        ttft_s=ttft_s,
        text=text,
        answer_ids=ids,
        log_p=log_p,
        divergence=found,
        k=k,
        v=v,
        attended=attended.layers,
    )


def prefill_in_pieces(engine: Engine, request: Request, *, headroom: int = 0) -> Prefilled:
    """Run a full prefill in a few slices, independent of the engine's: the same mathematics in another tiling.

    Its difference from full prefill is the noise floor of the compute dtype, below which settings are
    indistinguishable.
    """
    slice_rows = -(-request.plan.num_tokens // _PIECES)
    return engine.hold_prefill(request.in_full(), headroom=headroom, slice_rows=slice_rows)


def _text(engine: Engine, token_ids: Sequence[int]) -> str:
    return engine.model.tokenizer.decode([i for i in token_ids if i not in engine.model.eos_ids])


def relative_rmse(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> list[float]:
    """Return ||ours - reference|| / ||reference|| of each pair of equal shapes (0 where the reference is all zero)."""
    found = [(a - b).norm() / b.norm().clamp_min(1e-30) for a, b in zip(ours, reference, strict=True)]
    return [float(x) for x in torch.stack(found).tolist()]


def _chunk_kv(done: Prefilled) -> tuple[list[Tensor], list[Tensor]]:
    """Return K (rotated) and V of the chunks' tokens, fp32, one per layer."""
    positions = torch.cat([torch.arange(s.start, s.end) for s in done.plan.chunks])
    slots = done.sequence.slots(positions.to(done.pool.device))
    layers = [done.pool.read(layer, slots) for layer in range(len(done.pool.layers))]
    return [k for k, _ in layers], [v for _, v in layers]


class _Attended(Steps):
    """Gathers the attention output of teacher forcing by layer; later passes append their rows."""

    def __init__(self, num_layers: int) -> None:
        self._parts: list[list[Tensor]] = [[] for _ in range(num_layers)]

    def attended(self, layer: DecoderLayer, output: Tensor) -> None:
        self._parts[layer.index].append(output.float())

    @property
    def layers(self) -> list[Tensor]:
        return [torch.cat(parts) for parts in self._parts]
