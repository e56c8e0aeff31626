"""Loading: verified KV from the page cache into the pool beside a plain copy, and what a blend waits for it."""

from __future__ import annotations

import ctypes
import json
import mmap
import random
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from cacheblend_kernels import select_backend
from cacheblend_store import ChunkManifest, ChunkStore, KeyParts, chunk_key, collection_id
from cacheblend_store.format.codecs import CODECS, encode_kv, is_lossless
from cacheblend_store.format.layouts import blob_spec
from prefill import ROOT, SUFFIX_TOKENS, write_checkpoint

from cacheblend_cli.collect.collector import Collector, PlannedChunk
from cacheblend_cli.corpus.chunker import Chunk as TextChunk
from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.loading import load_model
from cacheblend_cli.model.rope import RotaryEmbedding
from cacheblend_cli.model.spec import ModelSpec, spec_from_config
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.prompt.plan import ChunkInput, Segment
from cacheblend_cli.runtime.config import BlendConfig, EngineConfig
from cacheblend_cli.runtime.prefill import prefill
from cacheblend_cli.runtime.request import Request
from cacheblend_cli.runtime.runtime import Runtime

TOKENS, CHUNK_TOKENS, BLOCK_SIZE, RATIO = 2048, 512, 64, 0.15
LARGE_LAYERS = 6  # of Llama-3.1-8B's 32: blobs of 4 MiB instead of half a one
CPU = torch.device("cpu")
Chunk = tuple[ChunkManifest, list[bytes]]


def shape(name: str = "qwen2.5-0.5b") -> ModelSpec:
    return spec_from_config(json.loads((ROOT / f"configs/{name}.json").read_text()))


def make_chunk(spec: ModelSpec, seed: int, codec: str = "float32", num_tokens: int = CHUNK_TOKENS) -> Chunk:
    """A chunk of normally distributed KV in the shape."""
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
    """TOKENS tokens of chunks in a store and their places in a prompt. What a loader asks of a decoder, without weights."""

    def __init__(self, store: ChunkStore, spec: ModelSpec, codec: str = "float32") -> None:
        self.store, self.spec = store, spec
        chunks = [make_chunk(self.spec, seed, codec) for seed in range(TOKENS // CHUNK_TOKENS)]
        store.put_chunks(chunks)
        with store.read() as reader:
            self.manifests = [m for manifest, _ in chunks if (m := reader.manifest(manifest.key))]
        self.blobs = [blobs for _, blobs in chunks]
        self.num_bytes = sum(len(b) for blobs in self.blobs for b in blobs)
        self.decoder = cast(
            Decoder,
            SimpleNamespace(
                spec=self.spec,
                device=CPU,
                dtype=torch.float32,
                rope=RotaryEmbedding(self.spec, CPU),
                kernels=select_backend("torch", CPU),
            ),
        )
        self.segments = [
            Segment("chunk", i * CHUNK_TOKENS, m.token_ids, "blended", m.key) for i, m in enumerate(self.manifests)
        ]

    def pool(self) -> KVPool:
        return KVPool(self.spec, TOKENS // BLOCK_SIZE, BLOCK_SIZE, torch.float32, CPU)

    def load(self, pool: KVPool, threads: int) -> KVLoader:
        """Everything into the pool; from the first manifest to the last layer."""
        sequence = pool.new_sequence(TOKENS)
        with KVLoader(self.decoder, self.store, pool, sequence, self.segments, TOKENS, threads) as loader:
            loader.wait(self.spec.num_layers - 1)  # leaving waits for whatever other threads still do
        sequence.release()
        return loader

    def targets(self, buffers: Sequence[torch.Tensor]) -> dict[tuple[int, int], dict[str, memoryview]]:
        """Where in the buffers the tensors of (layer, chunk) go."""
        found = {}
        for number, buffer in enumerate(buffers):
            layer, index = divmod(number, len(self.manifests))
            view, at = memoryview(buffer.numpy().data), 0
            found[layer, index] = {}
            for name, tensor in blob_spec("float32", CHUNK_TOKENS, self.spec.num_kv_heads, self.spec.head_dim).items():
                found[layer, index][name] = view[at : at + tensor.num_bytes]
                at += tensor.num_bytes
        return found

    def copy_verified(self, targets: dict[tuple[int, int], dict[str, memoryview]], threads: int) -> None:
        """Every blob's tensors to host buffers, as they are staged for a GPU."""

        def work(take: Callable[[], tuple[int, int] | None]) -> None:
            with self.store.read() as reader:
                while (task := take()) is not None:
                    reader.copy_layer(self.manifests[task[1]], task[0], targets[task])

        in_threads(list(targets), threads, work)


class FlatFile:
    """The blobs of a prompt one after another in a file that is mapped and in the page cache."""

    def __init__(self, path: Path, prompt: Prompt) -> None:
        ordered = [prompt.blobs[i][layer] for layer in range(prompt.spec.num_layers) for i in range(len(prompt.blobs))]
        path.write_bytes(b"".join(ordered))
        with path.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.pieces = whole.split([len(b) for b in ordered])

    def buffers(self) -> list[torch.Tensor]:
        return [torch.empty(len(piece), dtype=torch.uint8) for piece in self.pieces]

    def copy(self, buffers: Sequence[torch.Tensor], threads: int) -> None:
        def work(take: Callable[[], tuple[torch.Tensor, torch.Tensor] | None]) -> None:
            while (task := take()) is not None:
                task[1].copy_(task[0])

        in_threads(list(zip(self.pieces, buffers, strict=True)), threads, work)


class Fresh:
    """Seconds of `work` on memory that the process has to take from the system page by page, as a new process does."""

    def __init__(self, make: Callable[[], Any], work: Callable[[Any, int], Any], threads: int) -> None:
        self._make, self._work, self._threads = make, work, threads

    def __call__(self) -> float:
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)  # what was freed before goes back to the system
        memory = self._make()
        return timed(lambda: self._work(memory, self._threads))


def in_threads(tasks: Sequence[Any], threads: int, work: Callable[[Callable[[], Any]], None]) -> None:
    """`work` in that many threads, which take the tasks in order; torch's operations do not split further."""
    left, lock = iter(tasks), threading.Lock()

    def take() -> Any:
        with lock:
            return next(left, None)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(threads) as running:
        for done in [running.submit(work, take) for _ in range(threads)]:
            done.result()
    torch.set_num_threads(before)


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def best_and_median(cases: dict[str, Callable[[], float]], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each case, all of them in every round, after a round that does not count.

    The best of the rounds is what ratios are made of: it is least bent by whatever else runs on the machine. Each round
    has an order of its own, for what a case leaves behind (memory that a hypervisor takes back and has to give again,
    blocks that a disk discards) falls on the next one.
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
    large = replace(shape("llama-3.1-8b"), num_layers=LARGE_LAYERS)
    return {
        "tokens": TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
        "rounds": rounds,
        **_beside_a_copy(folder / "small", shape(), rounds),
        "large": {"layers": LARGE_LAYERS, **_beside_a_copy(folder / "large", large, rounds)},
        "codecs": [_codec(folder, codec, rounds) for codec in CODECS],
    }


def _beside_a_copy(folder: Path, spec: ModelSpec, rounds: int) -> dict[str, Any]:
    with ChunkStore.open(folder, mode="write") as store:
        prompt = Prompt(store, spec)
        flat = FlatFile(folder.with_suffix(".flat"), prompt)
        rows = []
        for threads in (1, 2):
            pool, buffers = prompt.pool(), flat.buffers()
            targets = prompt.targets(flat.buffers())
            seconds, median = best_and_median(
                {
                    "pool": lambda p=pool, n=threads: timed(lambda: prompt.load(p, n)),
                    "staging": lambda t=targets, n=threads: timed(lambda: prompt.copy_verified(t, n)),
                    "copy": lambda b=buffers, n=threads: timed(lambda: flat.copy(b, n)),
                    "fresh_pool": Fresh(prompt.pool, prompt.load, threads),
                    "fresh_copy": Fresh(flat.buffers, flat.copy, threads),
                },
                rounds,
            )
            ratios = {
                "pool": seconds["copy"] / seconds["pool"],
                "staging": seconds["copy"] / seconds["staging"],
                "fresh_pool": seconds["fresh_copy"] / seconds["fresh_pool"],
            }
            rows.append({"threads": threads, "seconds": seconds, "median_seconds": median, "ratio": ratios})
        return {"bytes": prompt.num_bytes, "rows": rows}


def _codec(folder: Path, codec: str, rounds: int) -> dict[str, Any]:
    """Into an fp32 pool that was used before, with one thread."""
    with ChunkStore.open(folder / f"load-{codec}", mode="write") as store:
        prompt = Prompt(store, shape(), codec)
        pool = prompt.pool()
        seconds = best_and_median({"load": lambda: timed(lambda: prompt.load(pool, 1))}, rounds)[0]["load"]
        spec = prompt.spec
        values = 2 * spec.num_layers * TOKENS * spec.num_kv_heads * spec.head_dim
        return {
            "codec": codec,
            "bytes_per_token": prompt.num_bytes / TOKENS,
            "bits_per_value": 8 * prompt.num_bytes / values,
            "load_ms": seconds * 1000,
            "load_gb_per_s": prompt.num_bytes / seconds / 1e9,
        }


def measure_stall(folder: Path, rounds: int) -> dict[str, Any]:
    """A blend at ratio .15 of TOKENS chunk tokens by codec: what it waits for its KV, as a share of its prefill."""
    model = load_model(
        write_checkpoint(folder / "model", ROOT / "configs/qwen2.5-0.5b.json"), "bench", CPU, "float32", "auto"
    )
    generator = torch.Generator().manual_seed(1)
    ids = [
        torch.randint(5, model.spec.vocab_size, (CHUNK_TOKENS,), generator=generator).tolist()
        for _ in range(TOKENS // CHUNK_TOKENS)
    ]
    prefix_ids = torch.randint(5, 1000, (4,), generator=generator).tolist()
    suffix = tuple(torch.randint(5, 1000, (SUFFIX_TOKENS,), generator=generator).tolist())
    runtime = Runtime(model, EngineConfig(block_size=BLOCK_SIZE))
    rows = []
    with ChunkStore.open(folder / "stall", mode="write") as store:
        for codec in CODECS:
            collection = Collection.of(model, prefix_ids, codec, "")
            collector = Collector(collection, store)
            collector.store_prefix()
            planned = [
                PlannedChunk(collection.key(i), "bench", TextChunk(n, "", tuple(i), 0, 0), (), "sink")
                for n, i in enumerate(ids)
            ]
            for _ in collector.store(planned):
                pass
            chunks = tuple(ChunkInput(p.key, p.source, p.chunk.token_ids) for p in planned)
            lossless = is_lossless(codec, torch.float32)
            request = Request(collection, store, suffix, chunks, blend=BlendConfig(ratio=RATIO), lossless=lossless)
            found = []
            for _ in range(rounds + 1):
                done = prefill(runtime, request)
                found.append((done.prefill_s, done.loader.stall_s, done.loader.load_s))
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
