"""Models of every family in small, with random weights in float32, on the device: a full prefill, blending at ratio 1
and .15, and decoding, each beside transformers or the second implementation of blending, in float64 on the CPU. A
hybrid's restored prompt stands beside its full prefill.

Heads of 8 channels, which Triton's kernels do not have, are attended by torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import hub_families
import hub_generic
import hub_hybrids
import hub_models
import torch
from cacheblend_store import ChunkStore
from gpu.checks import row_error
from gpu.context import Cases, Context, Rows
from hub_models import HubModel, load_reference
from parity import GREEDY, PROMPT, QUESTION, compare, write_documents

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import prefill as run_prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.engine.worker import prefill
from cacheblend_cli.types import AskRequest, BlendParams

TOLERANCE = 1e-3  # of logits up to some 10
REFERENCE = 1e-4  # of the second implementation at ratio 1 beside transformers
WIDE = {"hidden_size": 64}  # four heads of 16 channels
TINY = 3  # families on a CPU
LLAMA = ("llama-3.1", "qwen2, later windows", "qwen3", "dynamic new", "mistral, narrow window")
NEWER = ("gemma-3n, no shared layers, no scale", "minicpm3", "minicpm3, short prompt", "gpt-oss, mxfp4")
"""Models that transformers 5.17, the GPU machine's, does not compute in float64."""
Setting = tuple[HubModel, str]  # with the attention backend


def cases(context: Context) -> Cases:
    """Yield each family that this process has. Prompts are short, so recomputed tokens are not rounded up to tiles."""
    prefill.row_tile_of = lambda device: 1  # type: ignore[assignment]
    documents = {count: write_documents(Path(mkdtemp(dir=context.folder)), count) for count in (2, 3)}
    number, count = context.process
    every = islice(settings_of(context.device), TINY if context.tiny else None)
    for model, backend in islice(every, number, None, count):
        found = in_order if model in hub_hybrids.RUN else blended
        docs = documents[2 if model.tokenizer is None else 3]
        yield f"{model.name}, {backend}", partial(rows, context, found, model, docs, backend)


def settings_of(device: torch.device) -> list[Setting]:
    """Return the models with their backends: Triton on a GPU where the heads are wide enough."""
    plain = [model for model in hub_models.RUN if model.name in LLAMA]
    models = [*hub_hybrids.RUN, *hub_generic.RUN, *plain, *(m for m in hub_families.RUN if m.name not in NEWER)]
    if device.type != "cuda":
        return [(model, "torch") for model in models]
    wide = [(replace(model, shape=WIDE | model.shape), "triton") for model in models if has_wide_heads(model)]
    return [*wide, *((model, "torch") for model in models if model.name not in {m.name for m, _ in wide})]


def has_wide_heads(model: HubModel) -> bool:
    """Return whether Triton's kernels have the model's heads, if it is made wide."""
    text = str(model.edit) + str(model.shape)
    lists = "factor': [" in text or "mrope_section" in text or "in_mxfp4" in str(model.change)
    tied_to_width = lists or not {"kv_lora_rank", "mamba_n_heads"}.isdisjoint(model.shape)
    return model.shape.get("head_dim", 16) >= 16 and not tied_to_width


Found = dict[str, float | bool]


def rows(context: Context, find: Callable[..., Found], model: HubModel, documents: Path, backend: str) -> Rows:
    path = Path(mkdtemp(dir=context.folder))
    found = find(model, path, documents, device=str(context.device), attention_backend=backend)
    errors = [v for v in found.values() if not isinstance(v, bool)]
    error = float("nan") if any(map(math.isnan, errors)) else max(errors)
    row = {"kernel": "family", "case": model.name, "dtype": "float32", "backend": backend, "tolerance": TOLERANCE}
    held = error <= TOLERANCE and all(v for v in found.values() if isinstance(v, bool))
    yield "checks", {**row, "error": error, "ok": held, **({} if held else {"message": str(found)})}


def blended(model: HubModel, path: Path, documents: Path, **settings: Any) -> Found:
    found = compare(model, path, documents, **settings)
    assert found.reference <= REFERENCE, "the reference itself"
    return {
        "full": found.full, "ratio 1": found.everything, "ratio .15": found.some,
        "same choice": found.same_choice, "same answer": found.same_answer,
    }  # fmt: skip


def in_order(model: HubModel, path: Path, documents: Path, **settings: Any) -> Found:
    """Compare a hybrid's full prefill and answer with transformers', and a restored document with the full prefill."""
    model.write(path / "model")
    engine = Engine.load(
        EngineConfig(model=str(path / "model"), block_size=16, dtype="float32", prompt=PROMPT, **settings)
    )
    with ChunkStore.open(path / "store", mode="write") as store:
        engine.precompute(store, [str(documents)], PrecomputeOptions(chunk_tokens=40), lambda event: None)
        chunks = sorted((m for m in store.chunks() if m.context != "prefix"), key=lambda m: (m.source, m.index))
        asked = AskRequest(QUESTION, [m.key for m in chunks], BlendParams(), GREEDY)
        logits = []
        for blend in (BlendParams(mode="full"), BlendParams()):
            request = resolve(engine.runtime, store, replace(asked, blend=blend))
            done = run_prefill(engine.runtime, request)
            done.sequence.release()
            logits.append(done.result.logits.double().cpu()[-1])
        restored = request.plan.stored_until
        answer = engine.run_alone(store, replace(asked, blend=BlendParams(mode="full")))
    ids, first = [*request.plan.token_ids, *answer.generated_ids], request.plan.num_tokens - 1
    with torch.no_grad():
        theirs = load_reference(path / "model")(torch.tensor([ids])).logits[0, first:-1]
    return {
        "full": row_error(logits[0][None], theirs[:1]), "restored": row_error(logits[1][None], logits[0][None]),
        "was restored": restored > 0, "same answer": answer.generated_ids == theirs.argmax(-1).tolist(),
    }  # fmt: skip
