"""Check a model: a full prefill against blending that recomputes everything and against transformers; and the ratio that
blending needs with it: a few prompts over the handbook's pages, each collected alone."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cacheblend_store import ChunkStore
from torch import Tensor

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.demo import handbook_dir, questions
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.model_notes import BlendVerdict, keep_verdict
from cacheblend_cli.engine.prefill import prefill
from cacheblend_cli.engine.request import resolve
from cacheblend_cli.evaluation.measures import AnswerLengths, run_full, run_setting
from cacheblend_cli.model.adapter import LoraAdapter
from cacheblend_cli.model.checkpoint import quantisation_of, tensor_source
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

PAGES, CHUNKS, CHUNK_TOKENS = 3, 4, 128  # of the prompt: documents, and what is taken of them
ROWS = 8  # at the prompt's end, whose logits are compared
SHARE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Of the largest logit: how far rounding may take two ways of computing the same."""
PROMPTS, PROMPT_PAGES, ANSWER_TOKENS = 12, 4, 16  # of blending
RATIOS = (BlendParams().ratio, 0.3)
KL = 0.06
"""Blending is safe at a ratio where the mean KL to full prefill is at most this, in nats a token. With the default model plain
reuse leaves .130 on these prompts and .091 in docs/fidelity.md, the default ratio .041 and .024. Shares of equal tokens and answers
decide nothing: over so few tokens chance moves them more than the ratio does."""


@dataclass(frozen=True)
class Blended:
    """A ratio against full prefill, over full prefill's own answers. kl: mean, nats a token; top1: share of their tokens that
    stay the most likely; same_answers: of `answers`, those whose every token does."""

    ratio: float
    kl: float
    top1: float
    same_answers: int
    answers: int

    @property
    def safe(self) -> bool:
        return self.kl <= KL


@dataclass(frozen=True)
class Check:
    """Largest differences of logits. transformers: None where it was not asked. limit: what rounding explains. blends: how far
    blending at ratios is from a full prefill."""

    prompt_tokens: int
    blended: float
    transformers: float | None
    limit: float
    blends: list[Blended]

    @property
    def verdict(self) -> BlendVerdict:
        return verdict_of(self.blends)

    @property
    def passed(self) -> bool:
        return max(self.blended, self.transformers or 0.0) <= self.limit


def check_model(engine: Engine, *, with_transformers: bool) -> Check:
    """Compare the last logits of a prompt over pages of the demo's handbook, and remember what is found of blending where they
    are right."""
    with (
        tempfile.TemporaryDirectory(prefix="cacheblend-check-") as folder,
        ChunkStore.open(Path(folder) / "store", mode="write") as store,
    ):
        pages = [str(page) for page in sorted(handbook_dir().glob("*.md"))[:PAGES]]
        wanted = PrecomputeOptions(chunk_tokens=min(CHUNK_TOKENS, engine.runtime.context // 8))
        engine.precompute(store, pages, wanted, lambda event: None)
        keys = [m.key for m in sorted(store.chunks(), key=lambda m: (m.source, m.index), reverse=True)][:CHUNKS]
        ids, full = _logits(engine, store, keys, BlendParams(mode="full"))
        _, blended = _logits(engine, store, keys, BlendParams(ratio=1.0, selector="hkvd"))
        with ChunkStore.open(Path(folder) / "pages", mode="write") as whole_pages:
            blends = _check_blend(engine, whole_pages)
    theirs = _transformers(engine, ids) if with_transformers else None
    share = SHARE[engine.runtime.decoder.dtype]
    check = Check(
        len(ids),
        float((full - blended).abs().max()),
        None if theirs is None else float((full - theirs).abs().max()),
        share * max(1.0, float(full.abs().max())),
        blends,
    )
    if check.passed:
        keep_verdict(engine.model, check.verdict)
    return check


def _check_blend(engine: Engine, store: ChunkStore) -> list[Blended]:
    """Measure the ratios in turn, up to the first that is close to a full prefill. Each prompt has the page that answers it
    between others, each collected alone."""
    runtime = engine.runtime
    size = runtime.context // (2 * PROMPT_PAGES)
    options = PrecomputeOptions(chunk_tokens=size, context="sink")
    engine.precompute(store, [str(handbook_dir())], options, lambda event: None)
    first = {Path(m.source).name: m.key for m in sorted(store.chunks(), key=lambda m: m.source) if m.index == 0}
    max_tokens = min(ANSWER_TOKENS, runtime.context // 16)
    sampling = SamplingParams(max_tokens=max_tokens)
    found: list[Blended] = []
    requests = [
        resolve(runtime, store, AskRequest(q.question, _pages_around(first, q.source), sampling=sampling))
        for q in questions()[:PROMPTS]
    ]
    references = [run_full(runtime, request, AnswerLengths(max_tokens, max_tokens), 0.0) for request in requests]
    for ratio in RATIOS:
        blends = [replace(request, blend=BlendParams(ratio=ratio)) for request in requests]
        measured = [
            run_setting(runtime, request, reference, 0.0).divergence
            for request, reference in zip(blends, references, strict=True)
        ]
        kl = [k for m in measured for k in m.kl]
        top1 = [same for m in measured for same in m.top1]
        same = sum(m.first_difference is None for m in measured)
        found.append(Blended(ratio, sum(kl) / len(kl), sum(top1) / len(top1), same, len(measured)))
        if found[-1].safe:
            break
    return found


def _pages_around(pages: Mapping[str, bytes], source: str) -> list[bytes]:
    """Keys of PROMPT_PAGES neighbouring pages, the one of a question's source among them but not the first, which is exact."""
    names = list(pages)
    first = names.index(Path(source).name) - PROMPT_PAGES // 2
    return [pages[names[(first + i) % len(names)]] for i in range(PROMPT_PAGES)]


def verdict_of(found: Sequence[Blended]) -> BlendVerdict:
    """The ratio that blending needs. found: as `_check_blend` measures it."""
    return BlendVerdict(found[-1].ratio if found[-1].safe else None)


def _logits(engine: Engine, store: ChunkStore, keys: list[bytes], blend: BlendParams) -> tuple[list[int], Tensor]:
    question = AskRequest("What is the hobby of the first?", keys, blend, SamplingParams(max_tokens=1))
    request = resolve(engine.runtime, store, question)
    last = prefill(
        engine.runtime, request, output_positions=lambda plan: torch.arange(plan.num_tokens - ROWS, plan.num_tokens)
    )
    last.sequence.release()
    return last.plan.token_ids, last.result.logits.float().cpu()


def _transformers(engine: Engine, ids: list[int]) -> Tensor:
    decoder = engine.runtime.decoder
    model = _their_model(engine).eval().to(decoder.device)
    row = torch.tensor([ids], device=decoder.device)
    with torch.no_grad():
        found: Tensor = model(row, attention_mask=torch.ones_like(row)).logits[0, -ROWS:].float().cpu()
    return found


def _their_model(engine: Engine) -> Any:
    """transformers' model of the same weights: quantised ones as we read them, what an adapter adds added to them."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging
    from transformers.utils.quantization_config import Mxfp4Config

    logging.disable_progress_bar()
    path, dtype = engine.model.path, engine.runtime.decoder.dtype
    auto: Any = AutoModelForImageTextToText if engine.model.spec.other_parts else AutoModelForCausalLM
    model: Any
    quantisation = quantisation_of(path)
    if quantisation is None:
        model = auto.from_pretrained(path, dtype=dtype)
    elif quantisation.method == "mxfp4":  # of experts that are one tensor, which we take apart
        model = auto.from_pretrained(path, dtype=dtype, quantization_config=Mxfp4Config(dequantize=True))
    else:
        config, source = AutoConfig.from_pretrained(path), tensor_source(path)
        del config.quantization_config
        weights = {name: source.read(name, 0, shape[0] if shape else 0) for name, _, shape in source.headers()}
        with torch.device("meta"):
            kind: Any = type(auto.from_config(config))
        model = kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
    if engine.model.lora is not None:
        for name, delta in LoraAdapter.read(engine.model.lora).deltas.items():
            weight = model.get_submodule(name).weight.data
            weight.copy_(weight.float() + delta.rows(0, len(weight)))
    return model
