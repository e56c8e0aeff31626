"""Loading: verified KV from the page cache into the pool, and the time that a blend waits for it."""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from cacheblend_kernels import select_backend
from cacheblend_store import ChunkManifest, ChunkStore, KeyParts, chunk_key, collection_id
from cacheblend_store.format.blobs import CODECS
from cacheblend_store.format.codecs import encode_kv, is_lossless
from cacheblend_store.lmdb_file.datafile import DATA
from machine import ROOT, write_checkpoint
from torch import Tensor

from cacheblend_cli.collect.collector import Collector, PlannedChunk
from cacheblend_cli.corpus.chunker import Chunk as TextChunk
from cacheblend_cli.corpus.citations import Citation
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.engine.request.request import Request, RequestChunk
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.kv.loader import make_loader
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.families import spec_from_config
from cacheblend_cli.model.loading import Precision, load_model
from cacheblend_cli.model.rope import LayerRotations
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.prompt.plan import ChunkInput, plan_prompt
from cacheblend_cli.types import BlendParams

TOKENS, CHUNK_TOKENS, SUFFIX_TOKENS, BLOCK_SIZE, RATIO = 2048, 512, 32, 64, 0.15
CPU = torch.device("cpu")
Chunk = tuple[ChunkManifest, list[bytes]]


def shape(name: str = "qwen2.5-0.5b") -> ModelSpec:
    return spec_from_config(json.loads((ROOT / f"configs/{name}.json").read_text()))


def make_chunk(spec: ModelSpec, seed: int, codec: str = "float32", num_tokens: int = CHUNK_TOKENS) -> Chunk:
    """Return a chunk of normally distributed KV in the shape."""
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(0, spec.vocab_size, (num_tokens,), generator=generator).tolist())
    parts = KeyParts("model", "tokenizer", (1,), (), codec)
    blobs = []
    for _ in range(spec.num_layers):
        k, v = torch.randn(2, num_tokens, spec.num_kv_heads, spec.head_dim, generator=generator)
        blobs.append(encode_kv(k, v, codec))
    manifest = ChunkManifest(
        key=chunk_key(parts, ids), token_ids=ids, text="x" * 4 * num_tokens, model="model", model_name="m",
        tokenizer="tokenizer", collection=collection_id(parts), context="sink", left_context_ids=(),
        collected_len=num_tokens + 1, codec=codec, num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, source=f"{seed}.md", index=0, span=(0, 4 * num_tokens), created=1.0,
    )  # fmt: skip
    return manifest, blobs


class Prompt:
    """TOKENS tokens of stored chunks at their places in a prompt, and the attributes of a decoder that a loader uses,
    without weights."""

    def __init__(self, store: ChunkStore, spec: ModelSpec, codec: str = "float32") -> None:
        self.store, self.spec = store, spec
        chunks = [make_chunk(self.spec, seed, codec) for seed in range(TOKENS // CHUNK_TOKENS)]
        store.put_chunks(chunks)
        manifests = [manifest for manifest, _ in chunks]
        self.num_bytes = sum(len(b) for _, blobs in chunks for b in blobs)
        self.decoder = cast(
            Decoder,
            SimpleNamespace(
                spec=self.spec,
                device=CPU,
                dtype=torch.float32,
                shard=None,
                rope=LayerRotations(self.spec, CPU),
                kernels=select_backend("torch", CPU),
            ),
        )
        self.plan = plan_prompt((), [ChunkInput(m.key, m.source, m.token_ids) for m in manifests], ())

    def pool(self, dtype: torch.dtype = torch.float32) -> KVPool:
        return KVPool(self.spec, TOKENS // BLOCK_SIZE, BLOCK_SIZE, dtype, CPU)

    def load(self, pool: KVPool) -> None:
        """Load everything into the pool, from the first manifest to the last layer."""
        sequence = pool.new_sequence(TOKENS)
        with make_loader(self.decoder, self.store, sequence, self.plan) as loader:
            loader.wait(self.spec.num_layers - 1)  # leaving waits for the other threads
        sequence.release()


def timed(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    work()
    return clock() - start


def best_and_median(cases: dict[str, Callable[[], float]], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return best and median seconds of each case; every round runs all of them in a random order, after a warm-up
    round.

    Ratios use the best, which other processes affect least. The order varies because a case's after-effects (memory
    that a hypervisor reclaims, blocks that a disk discards) fall on the next one.
    """
    order = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name in order.sample(list(cases), len(cases)):
            seconds = cases[name]()
            if number:
                found[name].append(seconds)
    return {n: min(values) for n, values in found.items()}, {n: statistics.median(v) for n, v in found.items()}


def measure_load(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure TOKENS tokens from the page cache and from the disk into a warm bf16 pool, and encoding a chunk, by
    codec: all of them in every round, so that what else the machine does falls on each."""
    spec, cases = shape(), dict[str, Callable[[], float]]()
    layers = [torch.randn(2, CHUNK_TOKENS, spec.num_kv_heads, spec.head_dim) for _ in range(spec.num_layers)]
    with ExitStack() as stores:
        prompts = {}
        for codec in CODECS:
            path = folder / f"load-{codec}"
            prompt = Prompt(stores.enter_context(ChunkStore.open(path, mode="write")), spec, codec)
            prompts[codec], pool = prompt, prompt.pool(torch.bfloat16)
            cases |= {
                f"{codec} load": partial(timed, partial(prompt.load, pool)),
                f"{codec} cpu": partial(timed, partial(prompt.load, pool), time.process_time),
                f"{codec} cold": partial(_cold, path, partial(prompt.load, pool)),
                f"{codec} encode": partial(timed, partial(_encode, layers, codec)),
            }
        best = best_and_median(cases, rounds)[0]
    return {
        "tokens": TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
        "rounds": rounds,
        "codecs": [_codec(prompt, codec, best) for codec, prompt in prompts.items()],
    }


def _codec(prompt: Prompt, codec: str, best: dict[str, float]) -> dict[str, Any]:
    spec, load = prompt.spec, best[f"{codec} load"]
    values = 2 * spec.num_layers * TOKENS * spec.num_kv_heads * spec.head_dim
    return {
        "codec": codec,
        "bytes_per_token": prompt.num_bytes / TOKENS,
        "bits_per_value": 8 * prompt.num_bytes / values,
        "load_ms": load * 1000,
        "cpu_ms": best[f"{codec} cpu"] * 1000,
        "load_gb_per_s": prompt.num_bytes / load / 1e9,
        "cold_ms": best[f"{codec} cold"] * 1000,
        "encode_ms": best[f"{codec} encode"] * 1000,
    }


def _cold(store: Path, load: Callable[[], None]) -> float:
    """Time a load after the file's pages were dropped from the page cache."""
    file = os.open(store / DATA, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
    return timed(load)


def _encode(layers: list[Tensor], codec: str) -> None:
    for k, v in layers:
        encode_kv(k, v, codec)


def measure_stall(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure a blend of TOKENS chunk tokens at ratio .15 by codec: its wait for KV, as a share of its prefill."""
    model = load_model(
        write_checkpoint(folder / "model", ROOT / "configs/qwen2.5-0.5b.json"),
        "bench",
        CPU,
        Precision("float32"),
        "auto",
    )
    generator = torch.Generator().manual_seed(1)
    ids = [
        torch.randint(5, model.spec.vocab_size, (CHUNK_TOKENS,), generator=generator).tolist()
        for _ in range(TOKENS // CHUNK_TOKENS)
    ]
    suffix = tuple(torch.randint(5, 1000, (SUFFIX_TOKENS,), generator=generator).tolist())
    runtime = Runtime(model, EngineConfig(block_size=BLOCK_SIZE))
    rows = []
    with ChunkStore.open(folder / "stall", mode="write") as store:
        for codec in CODECS:
            collection = runtime.collection("", codec)
            collector = Collector(collection, store)
            collector.begin()
            planned = [
                PlannedChunk(collection.key(i), "bench", TextChunk(n, "", tuple(i), 0, 0), (), "sink")
                for n, i in enumerate(ids)
            ]
            for _ in collector.store(planned):
                pass
            chunks = tuple(
                RequestChunk(p.key, ChunkInput(p.key, p.source, p.chunk.token_ids), Citation("bench", n))
                for n, p in enumerate(planned)
            )
            lossless = is_lossless(codec, torch.float32)
            request = Request(
                "",
                collection,
                store,
                suffix_ids=suffix,
                chunks=chunks,
                blend=BlendParams(ratio=RATIO),
                lossless=lossless,
            )
            found = []
            for _ in range(rounds + 1):
                done = prefill(runtime, request)
                found.append((done.prefill_s, done.result.loader.stall_s, done.result.loader.load_s))
                done.sequence.release()
            prefill_s, stall_s, load_s = (statistics.median(column) for column in zip(*found[1:], strict=True))
            rows.append(
                {
                    "codec": codec,
                    "prefill_s": prefill_s,
                    "stall_s": stall_s,
                    "load_s": load_s,
                    "share": stall_s / prefill_s,
                }
            )
    return {"tokens": TOKENS, "ratio": RATIO, "rows": rows}
