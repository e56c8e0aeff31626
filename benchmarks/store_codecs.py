"""What each codec keeps: the errors of the demo model's KV and the answers it gives with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cacheblend_store import ChunkStore
from cacheblend_store.format.codecs import CODECS, coded, decode_kv

from cacheblend_cli.api import BlendConfig, Engine, EngineConfig
from cacheblend_cli.collect.prefill import ChunkKV, CollectSequence, Kept, collect, collect_prefix
from cacheblend_cli.corpus.chunker import iter_cut
from cacheblend_cli.corpus.documents import Document, read_documents
from cacheblend_cli.demo import handbook_dir
from cacheblend_cli.evaluation.demo_table import ANSWER_TOKENS, demo_samples
from cacheblend_cli.evaluation.evaluate import FULL, EvaluateOptions, evaluate
from cacheblend_cli.evaluation.settings import Setting
from cacheblend_cli.evaluation.summary import summarise

SETTINGS = (
    FULL,
    Setting("reuse", BlendConfig(mode="reuse")),
    Setting("blend", BlendConfig(ratio=0.15, selector="hkvd")),
)


def measure_codecs(folder: Path, questions: int) -> dict[str, Any]:
    """No times: what else runs on the machine does not matter."""
    kvs = handbook_kv()
    return {
        "questions": questions,
        "handbook_chunks": len(kvs),
        "rows": [
            {
                "codec": codec,
                **_errors(kvs, codec),
                **_answers(folder, codec, questions),
            }
            for codec in CODECS
        ],
    }


def handbook_kv() -> list[ChunkKV]:
    """The demo model's KV of its handbook's chunks."""
    engine = Engine.load(EngineConfig(model="handbook"))
    decoder = engine.model.decoder
    documents = [d for d in read_documents([str(handbook_dir())]) if isinstance(d, Document)]
    ids = [c.token_ids for d in documents for c in iter_cut(d.text, engine.model.tokenizer.encode_text, 512)]
    prefix = collect_prefix(decoder, engine.runtime.template.prefix_ids)
    return list(collect(decoder, prefix, [CollectSequence(i, (Kept(b"", 0, len(i)),)) for i in ids]))


def _errors(kvs: list[ChunkKV], codec: str) -> dict[str, float]:
    """Relative RMSE of K (before RoPE) and V after the round trip, over all chunks and layers."""
    error, power = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for kv in kvs:
        for k, v in zip(kv.k, kv.v, strict=True):
            back = decode_kv(coded(k, v, codec), codec)
            for i, (was, now) in enumerate(zip((k, v), back, strict=True)):
                error[i] += (was.double() - now.double()).square().sum()
                power[i] += was.double().square().sum()
    k_error, v_error = (error / power).sqrt().tolist()
    return {"k_error": k_error, "v_error": v_error}


def _answers(folder: Path, codec: str, questions: int) -> dict[str, Any]:
    """Exact matches of full prefill, of plain reuse of this codec's KV and of blending it at ratio .15."""
    engine = Engine.load(EngineConfig(model="handbook", kv_dtype=codec))
    with ChunkStore.open(folder / f"answers-{codec}", mode="write") as store:
        results = evaluate(engine, store, demo_samples(questions), SETTINGS, EvaluateOptions(ANSWER_TOKENS))
    found: dict[str, Any] = {}
    for summary in summarise(results):
        match = summary.exact_match
        assert match is not None
        found[summary.label] = {
            "accuracy": match.value,
            "low": match.low,
            "high": match.high,
            "samples": summary.samples,
        }
    return {"answers": found}
