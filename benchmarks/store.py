"""Speed and size of the store: loading by codec, commits, and look-ups among many chunks.

    python benchmarks/store.py [--only load,write,many,sizes] [--rounds 9] [--folder DIR]

The parts; the others stay as they were:

load    2,048 tokens of Qwen2.5-0.5B's shape from the page cache into a bf16 pool, every digest checked, K rotated, from
        every --kv-dtype; best of the rounds after a warm-up
write   groups of chunks as `precompute` commits them, durable on return, against write() and one fsync; and one chunk
        per commit against write() and fsync of each; in alternating order, best of the rounds
many    100,000 chunks: opening, look-ups, one page of `chunks ls`, ids by prefix; medians
sizes   GB of KV per million tokens, by codec and model: computed
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from cacheblend_kernels import select_backend
from cacheblend_store import AmbiguousId, ChunkManifest, ChunkStore, KeyParts, chunk_key, collection_id, stats
from cacheblend_store.format.blobs import CODECS, blob_spec, encode_blob
from cacheblend_store.format.codecs import encode_kv
from cacheblend_store.lmdb_file.datafile import DATA
from machine import CLI, RESULTS, ROOT, Others, read_result, save, table, timed

from cacheblend_cli.collect.commits import GROUP_BYTES
from cacheblend_cli.kv.loading import make_loader
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.families import spec_from_config
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.weight_map import expected_shapes
from cacheblend_cli.prompt.plan import ChunkInput, plan_prompt

TOKENS, CHUNK_TOKENS, BLOCK_SIZE, NUM_WRITTEN = 2048, 512, 64, 32
SMALL = {"num_layers": 4, "num_kv_heads": 1, "head_dim": 8}  # of a chunk of 64 tokens: look-ups do not read KV
SHAPES = {"SmolLM2-135M": (30, 3, 64), "Qwen2.5-0.5B": (24, 2, 64), "Llama-3.1-8B": (32, 8, 128)}
"""Layers, KV heads, head_dim."""
CPU = torch.device("cpu")
Chunk = tuple[ChunkManifest, list[bytes]]
Groups = Sequence[Sequence[Chunk]]
Part = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure; the others stay as they were")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where the stores are made; its disk is what is measured")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    if unknown := set(arguments.only.split(",")) - set(PARTS):
        parser.error(f"no parts: {', '.join(unknown)}")
    out = arguments.out / "store.json"
    result = read_result(out)
    for name in arguments.only.split(","):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            others = Others()
            result[name] = PARTS[name][0](Path(folder), arguments)
            result[name]["conditions"] = others.conditions()
        print(name, json.dumps(result[name])[:2000], file=sys.stderr, flush=True)
    save(result, out, page(result))
    print(page(result))


def shape() -> ModelSpec:
    """Return Qwen2.5-0.5B with its KV, and small matrices."""
    config = json.loads((ROOT / "configs/qwen2.5-0.5b.json").read_text())
    return spec_from_config(config | {"head_dim": 64, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 512})


def chunk_of(seed: int, codec: str, ids: tuple[int, ...], text: str, blobs: list[bytes], **shape: int) -> Chunk:
    parts = KeyParts("model", "tokenizer", (1,), (), codec)
    manifest = ChunkManifest(
        key=chunk_key(parts, ids), token_ids=ids, text=text, model="model", model_name="m", tokenizer="tokenizer",
        collection=collection_id(parts), context="sink", left_context_ids=(), collected_len=len(ids) + 1, codec=codec,
        source=f"docs/{seed // 20}.md", index=seed % 20, span=(0, len(text)), created=1.0, **shape,
    )  # fmt: skip
    return manifest, blobs


def make_chunk(spec: ModelSpec, seed: int, codec: str = "float32") -> Chunk:
    """Return a chunk of normally distributed KV in the shape."""
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(0, spec.vocab_size, (CHUNK_TOKENS,), generator=generator).tolist())
    size = (2, CHUNK_TOKENS, spec.num_kv_heads, spec.head_dim)
    blobs = [encode_kv(*torch.randn(size, generator=generator), codec) for _ in range(spec.num_layers)]
    own = {"num_layers": spec.num_layers, "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    return chunk_of(seed, codec, ids, "x" * 4 * CHUNK_TOKENS, blobs, **own)


class Prompt:
    """TOKENS tokens of stored chunks at their places in a prompt, and a pool that a decoder without weights reads."""

    def __init__(self, store: ChunkStore, spec: ModelSpec, codec: str) -> None:
        self.store = store
        chunks = [make_chunk(spec, seed, codec) for seed in range(TOKENS // CHUNK_TOKENS)]
        store.put_chunks(chunks)
        self.num_bytes = sum(len(b) for _, blobs in chunks for b in blobs)
        weights = {target: torch.zeros(shape) for _, target, _, shape in expected_shapes(spec).values()}
        weights["lm_head"] = weights["embed"]
        self.decoder = Decoder(spec, weights, select_backend("torch", CPU), torch.bfloat16)
        self.plan = plan_prompt((), [ChunkInput(m.key, m.source, m.token_ids) for m, _ in chunks], ())
        self.pool = KVPool.of(self.decoder, TOKENS // BLOCK_SIZE, BLOCK_SIZE)

    def load(self) -> None:
        """Load everything into the pool, from the first manifest to the last layer."""
        sequence = self.pool.new_sequence(TOKENS)
        with make_loader(self.decoder, self.store, sequence, self.plan) as loader:
            loader.wait(self.decoder.spec.num_layers - 1)  # leaving waits for the other threads
        sequence.release()


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


def measure_load(folder: Path, arguments: argparse.Namespace) -> Part:
    spec, cases, prompts = shape(), dict[str, Callable[[], float]](), dict[str, Prompt]()
    with ExitStack() as stores:
        for codec in CODECS:
            path = folder / codec
            prompts[codec] = prompt = Prompt(stores.enter_context(ChunkStore.open(path, mode="write")), spec, codec)
            cases |= {
                f"{codec} load": partial(timed, prompt.load),
                f"{codec} cpu": partial(timed, prompt.load, time.process_time),
            }
        best = best_and_median(cases, arguments.rounds)[0]
    values = 2 * spec.num_layers * TOKENS * spec.num_kv_heads * spec.head_dim
    rows = [
        {
            "codec": codec,
            "bytes_per_token": prompt.num_bytes / TOKENS,
            "bits_per_value": 8 * prompt.num_bytes / values,
            "load_gb_per_s": prompt.num_bytes / best[f"{codec} load"] / 1e9,
            **{f"{name}_ms": best[f"{codec} {name}"] * 1000 for name in ("load", "cpu")},
        }
        for codec, prompt in prompts.items()
    ]
    return {"rounds": arguments.rounds, "codecs": rows}


def measure_write(folder: Path, arguments: argparse.Namespace) -> Part:
    """Measure chunks in float32, encoded beforehand. Each round starts with an empty store or file and after a sync."""
    spec = shape()
    chunks = [make_chunk(spec, seed) for seed in range(NUM_WRITTEN)]
    sizes = [sum(map(len, blobs)) for _, blobs in chunks]
    count = -(-GROUP_BYTES // sizes[0])  # of a group, if chunks come faster than they are written
    groups = [chunks[first : first + count] for first in range(0, NUM_WRITTEN, count)]
    single = [[chunk] for chunk in chunks]
    cases = {
        "groups": lambda: write_store(folder, groups),
        "file": lambda: write_file(folder, [chunks]),
        "single": lambda: write_store(folder, single),
        "file_single": lambda: write_file(folder, single),
    }
    seconds, median = best_and_median(cases, arguments.rounds)
    return {
        "bytes": sum(sizes), "chunks": NUM_WRITTEN, "group_bytes": GROUP_BYTES, "commits": len(groups),
        "rounds": arguments.rounds, "seconds": seconds, "median_seconds": median,
        "chunk_commit_s": median["single"] / NUM_WRITTEN, "bytes_of_a_chunk": int(statistics.median(sizes)),
    }  # fmt: skip


def write_store(folder: Path, groups: Groups) -> float:
    """Return seconds of commits into an empty store."""
    path = folder / "written"
    shutil.rmtree(path, ignore_errors=True)
    with ChunkStore.open(path, mode="write") as store:
        os.sync()
        seconds = timed(lambda: [store.put_chunks(group) for group in groups])
    shutil.rmtree(path)
    return seconds


def write_file(folder: Path, groups: Groups) -> float:
    """Return seconds of write() of the same blobs one after another, with fsync after each group."""
    path = folder / "written.bin"
    handle = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)

    def work() -> None:
        for group in groups:
            for _, blobs in group:
                for blob in blobs:
                    os.write(handle, blob)
            os.fsync(handle)

    os.sync()
    seconds = timed(work)
    os.close(handle)
    path.unlink()
    return seconds


def measure_many(folder: Path, arguments: argparse.Namespace) -> Part:
    """Measure a store of small chunks: each a manifest of 64 tokens with its text and four blobs."""
    path, rng, count = folder / "many", random.Random(0), arguments.chunks
    with ChunkStore.open(path, mode="write") as store:
        for first in range(0, count, 2000):
            store.put_chunks([small_chunk(number) for number in range(first, min(first + 2000, count))])
    keys = [small_chunk(number)[0].key for number in rng.sample(range(count), min(400, count))]
    prefix = lambda digits: rng.choice(keys).hex()[:digits]  # noqa: E731

    def ambiguous() -> None:
        with suppress(AmbiguousId):
            store.resolve(prefix(2))

    with ChunkStore.open(path) as store:
        milliseconds = {
            "look-up of 8 chunks by id prefix (ask)": median_ms(
                lambda: [store.get_chunk(store.resolve(prefix(12))) for _ in range(8)]
            ),
            "one page of 50 chunks, anywhere (chunks ls)": median_ms(
                lambda: list(islice(store.chunks(start_after=rng.choice(keys)), 50))
            ),
            "an id by its first 12 digits": median_ms(lambda: store.resolve(prefix(12))),
            "an ambiguous prefix of 2 digits": median_ms(ambiguous),
            "totals (chunks stats)": median_ms(lambda: stats(store)),
        }
    milliseconds["opening the store"] = median_ms(lambda: ChunkStore.open(path).close())
    command = [*CLI, "chunks", "ls", "--store", str(path), "--limit", "50", "--json"]
    milliseconds["the command chunks ls of a page, with the interpreter"] = median_ms(
        lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), 7
    )
    return {"chunks": count, "file_bytes": (path / DATA).stat().st_size, "milliseconds": milliseconds}


def median_ms(work: Callable[[], Any], rounds: int = 51) -> float:
    work()
    return statistics.median(timed(work) for _ in range(rounds)) * 1000


def small_chunk(number: int) -> Chunk:
    spec = blob_spec("bfloat16", 64, SMALL["num_kv_heads"], SMALL["head_dim"])
    blob = encode_blob(spec, {name: number.to_bytes(8, "big") * (t.num_bytes // 8) for name, t in spec.items()})
    ids, blobs = tuple(range(number, number + 64)), [blob] * SMALL["num_layers"]
    return chunk_of(number, "bfloat16", ids, f"chunk {number} " * 20, blobs, **SMALL)


def compute_sizes(folder: Path, arguments: argparse.Namespace) -> Part:
    """Return GB per million tokens in chunks of 512."""

    def of(codec: str, layers: int, heads: int, dim: int) -> float:
        return layers * sum(t.num_bytes for t in blob_spec(codec, 512, heads, dim).values()) / 512 / 1000

    return {"gb": {name: {codec: of(codec, *shape) for codec in CODECS} for name, shape in SHAPES.items()}}


def page(result: dict[str, Any]) -> str:
    lines = list[str]()
    for name, (_, write) in PARTS.items():
        if name in result:
            conditions = result[name]["conditions"]
            h = conditions["hardware"]
            where = f"{h['cpu']}, {h['cores']} cores, {h['memory_gib']} GiB, torch {h['torch']}, {conditions['date']}"
            others = f" CPUs used by other processes: {conditions['others']}." if "others" in conditions else ""
            lines += [*write(result[name]), *(["", f"{where}.{others}"] if name != "sizes" else []), ""]
    return "\n".join(lines).rstrip() + "\n"


def _load(part: Part) -> list[str]:
    figures = {
        "KV dtype": "{codec}", "bytes a token": "{bytes_per_token:,.0f}", "bits a value": "{bits_per_value:.2f}",
        "load, ms": "{load_ms:.1f}", "CPU, ms": "{cpu_ms:.1f}", "GB/s": "{load_gb_per_s:.2f}",
        "cold, ms": "{cold_ms:.1f}", "encode a chunk, ms": "{encode_ms:.1f}",
    }  # fmt: skip
    figures = {
        title: form for title, form in figures.items() if form[1:].split(":")[0].rstrip("}") in part["codecs"][0]
    }
    return [
        "## Loading",
        "",
        f"{TOKENS} tokens of Qwen2.5-0.5B's shape in chunks of {CHUNK_TOKENS}, out of the page cache with every "
        "digest checked, into a bf16 pool that was used before: dequantised, and K rotated on the way. CPU: of all "
        "threads. cold: after the file's pages were dropped from the page cache; encode: a chunk of fp32 KV (both in an "
        f"earlier version). One thread loads for every two cores. Best of {part['rounds']} rounds, each of all codecs.",
        "",
        *table(tuple(figures), ([form.format(**row) for form in figures.values()] for row in part["codecs"])),
    ]


def _write(part: Part) -> list[str]:
    size, seconds = part["bytes"], part["seconds"]
    pairs = {
        f"{part['commits']} groups; file with one fsync": ("groups", "file"),
        "groups; file with an fsync a group": ("groups", "file_groups"),
        "groups in pages that removed chunks left; file overwritten": ("reused", "file_overwritten"),
        "the same; a new file": ("reused", "file_groups"),
        "one chunk a commit; file with an fsync a chunk": ("single", "file_single"),
    }  # the three in the middle are of an earlier version
    speeds = {name: size / value / 1e9 for name, value in seconds.items()}
    rows = [
        (what, f"{speeds[ours]:.2f}", f"{speeds[plain]:.2f}", f"{speeds[ours] / speeds[plain]:.2f}")
        for what, (ours, plain) in pairs.items()
        if {ours, plain} <= speeds.keys()
    ]
    return [
        "## Writing",
        "",
        f"{part['chunks']} chunks of 512 tokens, {size / 2**20:.0f} MiB, durable on return. The aim: 0.9 or more of a "
        "plain write and fsync of the same bytes. `precompute` commits groups of up to "
        f"{part['group_bytes'] >> 20} MiB when chunks come faster than they are written, else each chunk at once. "
        f"Best of {part['rounds']} rounds; medians are in the JSON.",
        "",
        *table(("", "store, GB/s", "file, GB/s", "ratio"), rows),
        "",
        f"A commit of one chunk ({part['bytes_of_a_chunk'] / 2**20:.1f} MiB) takes {part['chunk_commit_s'] * 1000:.1f} ms.",
    ]


def _many(part: Part) -> list[str]:
    rows = [(what, f"{value:.2f}") for what, value in part["milliseconds"].items()]
    size = f"{part['chunks']:,} chunks in {part['file_bytes'] / 2**20:.0f} MiB."
    return ["## Many chunks", "", size, "", *table(("", "ms"), rows)]


def _sizes(part: Part) -> list[str]:
    codecs = tuple(next(iter(part["gb"].values())))
    rows = [(name, *(f"{gb:.1f}" for gb in of.values())) for name, of in part["gb"].items()]
    about = "GB per million tokens by codec (`--kv-dtype`), in chunks of 512:"
    return ["## Size of stored KV", "", about, "", *table(("", *codecs), rows)]


PARTS: dict[str, tuple[Callable[[Path, argparse.Namespace], Part], Callable[[Part], list[str]]]] = {
    "load": (measure_load, _load), "write": (measure_write, _write), "many": (measure_many, _many),
    "sizes": (compute_sizes, _sizes),
}  # fmt: skip


if __name__ == "__main__":
    main()
