"""Check a model: a full prefill against blending that recomputes everything, and against transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from cacheblend_store import ChunkStore
from torch import Tensor

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.demo import handbook_dir
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.evaluation.temporary import temporary_store
from cacheblend_cli.model.adapter import LoraAdapter
from cacheblend_cli.model.checkpoint import tensor_source
from cacheblend_cli.model.families.quantisation import quantisation_of
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

PAGES, CHUNKS, CHUNK_TOKENS = 3, 4, 128  # of the prompt: documents, and what is taken of them
ROWS = 8  # at the prompt's end, whose logits are compared
SHARE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Tolerance of rounding, as a share of the largest logit."""


@dataclass(frozen=True)
class ModelCheck:
    """Largest differences of logits from a full prefill's."""

    prompt_tokens: int
    blended: float
    transformers: float | None  # None if it was not run
    limit: float  # maximum explained by rounding

    @property
    def passed(self) -> bool:
        return max(self.blended, self.transformers or 0.0) <= self.limit


def check_model(engine: Engine, *, with_transformers: bool) -> ModelCheck:
    """Compare the last logits of a prompt over pages of the demo's handbook."""
    with temporary_store("check") as store:
        pages = [str(page) for page in sorted(handbook_dir().glob("*.md"))[:PAGES]]
        wanted = PrecomputeOptions(chunk_tokens=min(CHUNK_TOKENS, engine.context // 8))
        engine.precompute(store, pages, wanted, lambda event: None)
        in_order = bool(engine.model.spec.recurrent)  # it restores a prompt's beginning, and blends nothing
        keys = [m.key for m in sorted(store.chunks(), key=lambda m: (m.source, m.index), reverse=not in_order)][:CHUNKS]
        ids, full = _logits(engine, store, keys, BlendParams(mode="full"))
        _, blended = _logits(
            engine, store, keys, BlendParams() if in_order else BlendParams(ratio=1.0, selector="hkvd")
        )
    theirs = _transformers(engine, ids) if with_transformers else None
    share = SHARE[engine.model.decoder.dtype]
    return ModelCheck(
        len(ids),
        float((full - blended).abs().max()),
        None if theirs is None else float((full - theirs).abs().max()),
        share * max(1.0, float(full.abs().max())),
    )


def _logits(engine: Engine, store: ChunkStore, keys: list[bytes], blend: BlendParams) -> tuple[list[int], Tensor]:
    question = AskRequest("What is the hobby of the first?", keys, blend, SamplingParams(max_tokens=1))
    last = engine.hold_prefill(
        engine.resolve(store, question),
        output_positions=lambda plan: torch.arange(plan.num_tokens - ROWS, plan.num_tokens),
    )
    last.sequence.release()
    return last.plan.token_ids, last.result.logits.float().cpu()


def _transformers(engine: Engine, ids: list[int]) -> Tensor:
    decoder = engine.model.decoder
    model = _their_model(engine).eval().to(decoder.device)
    row = torch.tensor([ids], device=decoder.device)
    with torch.no_grad():
        found: Tensor = model(row, attention_mask=torch.ones_like(row)).logits[0, -ROWS:].float().cpu()
    return found


def _their_model(engine: Engine) -> Any:
    """Return transformers' model with the same weights, dequantised as we read them, with the adapter merged."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging
    from transformers.utils.quantization_config import Mxfp4Config

    logging.disable_progress_bar()
    path, dtype = engine.model.path, engine.model.decoder.dtype
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
