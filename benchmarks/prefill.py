"""Time to the first token: transformers, our full prefill and our blended prefill, in one process and in turn.

    python benchmarks/prefill.py [--rounds 5]                               # writes results/prefill.*
    python benchmarks/prefill.py --long [--tokens 4096,32768] [--modes .15] # writes results/long_prompts.*
    python benchmarks/prefill.py --float32 [--tokens 340,1096]              # writes results/prefill_float32.*

Qwen2.5-0.5B's shape with random weights on CPU. The first has 2,048 chunk tokens in 8 chunks, a question of 32 tokens
and float32; KV is read from the store in the page cache, with digests checked; medians over rounds after one warm-up.

--long: bfloat16, chunks of 512 tokens in the default codec. Stored KV is random: times do not depend on it. Each mode
of a prompt runs in a process of its own, once to warm up on four chunks and once to be measured; the peak is of the
memory that is not mapped from files. Rows that are not measured anew stay as they were.

--float32: full prefills of checkpoints in float32 and in bfloat16, computed in float32 with the instructions of each of
LIMITS, beside transformers. Each pair of checkpoint and limit has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cacheblend_store import ChunkStore
from machine import AVX2, RESULTS, ROOT, VNNI, Others, hardware, memory_kib, read_result, save, table, write_checkpoint
from transformers import AutoModelForCausalLM

from cacheblend_cli.collect.collector import Collector, PlannedChunk
from cacheblend_cli.collect.prefill import ChunkKV
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.evaluation.speed import (
    FirstToken,
    PromptLayout,
    SpeedPrompt,
    ceiling,
    in_turn,
    ordinary_ids,
    random_ids,
)
from cacheblend_cli.model.description import Precision
from cacheblend_cli.model.loading import load_model
from cacheblend_cli.types import AskRequest, BlendParams

SHAPE = {"chunks": 8, "chunk_tokens": 256, "prefix_tokens": 4, "suffix_tokens": 32}
ANSWER_TOKENS = 32
BLENDS = {
    "reuse": BlendParams(mode="reuse"),
    **{f"hkvd {r:.2f}": BlendParams(selector="hkvd", ratio=r) for r in (0.05, 0.15, 0.30)},
    **{f"query {r:.2f}": BlendParams(selector="query", ratio=r) for r in (0.05, 0.15, 0.30)},
}
LONG_CHUNK_TOKENS, WARM_UP_CHUNKS = 512, 4
MODES = ("reuse", ".05", ".15", "full")
LIMITS = {"AVX2": AVX2, "AVX-512 with VNNI": VNNI}
STORED = ("float32", "bfloat16")  # dtypes of checkpoints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/qwen2.5-0.5b.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long", action="store_true", help="measure long prompts")
    parser.add_argument("--float32", action="store_true", help="measure full prefills in float32 beside transformers")
    parser.add_argument("--tokens", help="with --long (default 4096,8192,16384,32768), --float32 (340,1096,2048)")
    parser.add_argument("--modes", default=",".join(MODES), help="with --long")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--child", nargs=3, metavar=("MODEL", "TOKENS", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.tokens = arguments.tokens or ("340,1096,2048" if arguments.float32 else "4096,8192,16384,32768")
    if arguments.child:
        model, tokens, mode = arguments.child
        lengths = list(map(int, tokens.split(",")))
        measured = measure_float32(Path(model), lengths, arguments.rounds) if arguments.float32 else None
        print(json.dumps(measured or measure_long(Path(model), lengths[0], mode)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.float32:
            print(float32_prompts(Path(folder), arguments))
            return
        room = {"max_position_embeddings": 65536} if arguments.long else {}
        checkpoint = write_checkpoint(Path(folder) / "model", arguments.config, **room)
        if arguments.long:
            print(long_prompts(checkpoint, arguments))
            return
        measured = measure(checkpoint, Path(folder), arguments.rounds)
    result = {"hardware": hardware(), "shape": SHAPE, **measured}
    save(result, arguments.out / "prefill.json", page(result))
    print(page(result))


def load(checkpoint: Path, dtype: str) -> Runtime:
    return Runtime(load_model(checkpoint, "bench", torch.device("cpu"), Precision(dtype), "auto"), EngineConfig())


@torch.inference_mode()
def their_logits(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(prompt, use_cache=True, logits_to_keep=1).logits[0, -1]
    return logits


def their_first_token(model: Any, prompt: torch.Tensor) -> FirstToken:
    start = time.perf_counter()
    int(their_logits(model, prompt).argmax())
    return FirstToken(time.perf_counter() - start)


def measure(checkpoint: Path, folder: Path, rounds: int) -> dict[str, Any]:
    runtime = load(checkpoint, "float32")
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    draw = partial(random_ids, ordinary_ids(runtime.model), generator=torch.Generator().manual_seed(1))
    ids = tuple(draw(count=SHAPE["chunk_tokens"]) for _ in range(SHAPE["chunks"]))
    runtime.template = replace(runtime.template, prefix_ids=draw(count=SHAPE["prefix_tokens"]))
    with ChunkStore.open(folder / "bench-store", mode="write") as store:
        layout = PromptLayout(ids, draw(count=SHAPE["suffix_tokens"]))
        own = SpeedPrompt.stored(Engine(runtime), store, layout, ANSWER_TOKENS)
        full = own.prefill(BlendParams(mode="full"))
        prompt = torch.tensor([full.plan.token_ids])
        agree = float((full.result.logits[-1] - their_logits(theirs, prompt)).abs().max())
        del full
        blends = {"full": BlendParams(mode="full"), **BLENDS}
        cases: dict[str, Callable[[], FirstToken]] = {"transformers": partial(their_first_token, theirs, prompt)}
        found = in_turn(cases | {name: partial(own.first_token, blend) for name, blend in blends.items()}, rounds)
    median = {name: statistics.median(r.seconds for r in runs) for name, runs in found.items()}
    return {
        "seconds": median,
        "all_seconds": {name: [r.seconds for r in runs] for name, runs in found.items()},
        "max_logit_difference_to_transformers": agree,
        "full_over_transformers": median["full"] / median["transformers"],
        "speedup_over_full": {n: median["full"] / median[n] for n in BLENDS},
        "ceiling": {n: ceiling(own.plan(blend), runtime.model.spec.num_layers, blend) for n, blend in BLENDS.items()},
        "store_share_of_ttft": {n: statistics.median(r.stall_s for r in found[n]) / median[n] for n in BLENDS},
        "load_seconds": {n: statistics.median(r.load_s for r in found[n]) for n in BLENDS},
        "kv_bytes_loaded": found["reuse"][-1].kv_bytes,
    }


def page(result: dict[str, Any]) -> str:
    h, shape = result["hardware"], result["shape"]

    def row(name: str, seconds: float) -> Sequence[str]:
        figures = (result[key].get(name) for key in ("speedup_over_full", "ceiling", "store_share_of_ttft"))
        cells = (
            "" if v is None else form.format(v)
            for v, form in zip(figures, ("{:.2f} x",) * 2 + ("{:.1%}",), strict=True)
        )
        return name, f"{seconds * 1000:.0f}", *cells

    lines = [
        f"{h['cpu']}, {h['cores']} cores, torch {h['torch']}, fp32; Qwen2.5-0.5B's shape, random weights, "
        f"{shape['chunks']} chunks of {shape['chunk_tokens']} tokens and a question of {shape['suffix_tokens']}. By "
        "`benchmarks/prefill.py`.",
        "",
        *table(
            ("", "first token, ms", "faster than our full prefill", "ceiling", "store's part"),
            (row(name, seconds) for name, seconds in result["seconds"].items()),
        ),
        "",
        f"Full prefill over transformers: {result['full_over_transformers']:.3f}. KV loaded: "
        f"{result['kv_bytes_loaded'] / 2**20:.1f} MiB.",
    ]
    return "\n".join(lines) + "\n"


def float32_prompts(folder: Path, arguments: argparse.Namespace) -> str:
    """Measure each pair of checkpoint and limit, and return the page."""
    out = arguments.out / "prefill_float32.json"
    rows = read_result(out).get("rows", [])
    for dtype in STORED:
        checkpoint = write_checkpoint(folder / dtype, arguments.config, dtype=dtype)
        for limit, environment in LIMITS.items():
            others, options = Others(), ("--float32", "--rounds", str(arguments.rounds))
            command = [sys.executable, __file__, *options, "--child", str(checkpoint), arguments.tokens, "full"]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=os.environ | environment)
            about = {"limit": limit, "checkpoint": dtype, **others.conditions()}
            by_key = {float32_key(row): row for row in (*rows, *(about | row for row in json.loads(done.stdout)))}
            rows = [by_key[key] for key in sorted(by_key)]
            save({"rows": rows}, out, float32_page({"rows": rows}))
    return float32_page({"rows": rows})


def float32_key(row: dict[str, Any]) -> tuple[int, int, int]:
    return list(LIMITS).index(row["limit"]), STORED.index(row["checkpoint"]), row["tokens"]


def measure_float32(checkpoint: Path, lengths: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Return the median seconds of our full prefill and of transformers', in turn, for prompts of these lengths."""
    runtime, full = load(checkpoint, "float32"), BlendParams(mode="full")
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    draw = partial(random_ids, ordinary_ids(runtime.model), generator=torch.Generator().manual_seed(1))
    runtime.template = replace(runtime.template, prefix_ids=draw(count=SHAPE["prefix_tokens"]))
    cases: dict[str, Callable[[], FirstToken]] = {}
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(Path(folder) / "store", mode="write") as store:
        for tokens in lengths:
            chunk_tokens = tokens - SHAPE["prefix_tokens"] - SHAPE["suffix_tokens"]
            layout = PromptLayout((draw(count=chunk_tokens),), draw(count=SHAPE["suffix_tokens"]))
            own = SpeedPrompt.stored(Engine(runtime), store, layout, ANSWER_TOKENS)
            prompt = torch.tensor([own.plan(full).token_ids])
            cases |= {
                f"{tokens} ours": partial(own.first_token, full),
                f"{tokens} theirs": partial(their_first_token, theirs, prompt),
            }
        found = in_turn(cases, rounds)
    median = {name: statistics.median(run.seconds for run in runs) for name, runs in found.items()}
    return [{"tokens": n, "ours": median[f"{n} ours"], "theirs": median[f"{n} theirs"]} for n in lengths]


def float32_page(result: dict[str, Any]) -> str:
    rows, h = result["rows"], result["rows"][-1]["hardware"]
    cells = (
        (
            row["limit"], row["checkpoint"], f"{row['tokens']:,}", f"{row['ours']:.2f}", f"{row['theirs']:.2f}",
            f"{row['ours'] / row['theirs']:.2f}", f"{row['others']:.2f}",
        )
        for row in rows
    )  # fmt: skip
    lines = [
        "# Full prefill in float32",
        "",
        f"Qwen2.5-0.5B's shape with random weights, computed in float32. {h['cpu']}, {h['cores']} cores, torch "
        f"{h['torch']}, with the instructions named only. By `benchmarks/prefill.py --float32`.",
        "",
        *table(
            ("instructions", "checkpoint", "tokens", "first token, s", "transformers, s", "ratio", "CPUs others used"),
            cells,
        ),
    ]
    return "\n".join(lines) + "\n"


def long_prompts(model: Path, arguments: argparse.Namespace) -> str:
    """Measure each mode of each length, and return the page."""
    out = arguments.out / "long_prompts.json"
    rows = read_result(out).get("rows", [])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CACHEBLEND_") and k != "OMP_NUM_THREADS"}
    for tokens in map(int, arguments.tokens.split(",")):
        for mode in arguments.modes.split(","):
            others = Others()
            command = [sys.executable, __file__, "--child", str(model), str(tokens), mode]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
            rows = [row for row in rows if (row["tokens"], row["mode"]) != (tokens, mode)]
            rows.append({"tokens": tokens, "mode": mode, **json.loads(done.stdout), **others.conditions()})
            rows.sort(key=lambda row: (row["tokens"], MODES.index(row["mode"])))
            save({"rows": rows}, out, long_page({"rows": rows}))
            print(rows[-1], file=sys.stderr, flush=True)
    return long_page({"rows": rows})


def measure_long(checkpoint: Path, tokens: int, mode: str) -> dict[str, Any]:
    """Return seconds to the first token, of loading and waited for it, and peak memory in MiB, of one mode in this
    process."""
    runtime = load(checkpoint, "bfloat16")
    blend = BlendParams(ratio=float(mode)) if mode[0] == "." else BlendParams(mode=mode)
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(Path(folder) / "store", mode="write") as store:
        stored(runtime, store, WARM_UP_CHUNKS).first_token(blend)
        prompt = stored(runtime, store, tokens // LONG_CHUNK_TOKENS)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        before, start = memory_kib("RssAnon") / 1024, time.process_time()
        run = prompt.first_token(blend)
        cpu_s = time.process_time() - start
        peak = (memory_kib("VmHWM") - memory_kib("RssFile")) / 1024
    return {
        "seconds": run.seconds, "cpu_s": cpu_s, "load_s": run.load_s, "stall_s": run.stall_s, "kv_bytes": run.kv_bytes,
        "codec": runtime.collection().codec, "before_mib": before, "peak_mib": peak,
    }  # fmt: skip


def stored(runtime: Runtime, store: ChunkStore, count: int) -> SpeedPrompt:
    """Return a prompt of `count` chunks with random KV in the store."""
    spec, collection = runtime.model.spec, runtime.collection()
    generator = torch.Generator().manual_seed(count)
    draw = partial(random_ids, ordinary_ids(runtime.model), generator=generator)
    collector, keys = Collector(collection, store), list[bytes]()
    collector.begin()
    for number in range(count):
        ids = draw(count=LONG_CHUNK_TOKENS)
        planned = PlannedChunk(collection.key(ids), "bench", Chunk(number, "", ids, 0, 0), (), "sink")
        kv = [torch.randn(2, LONG_CHUNK_TOKENS, heads, dim, generator=generator) for heads, dim in spec.kv_shapes]
        collector.put(planned, ChunkKV(planned.key, [k for k, _ in kv], [v for _, v in kv]))
        keys.append(planned.key)
    engine, suffix = Engine(runtime), draw(count=SHAPE["suffix_tokens"])
    return SpeedPrompt(engine, engine.resolve(store, AskRequest("", keys), suffix_ids=suffix), 2)


def long_page(result: dict[str, Any]) -> str:
    rows = result["rows"]
    of, h = {(row["tokens"], row["mode"]): row for row in rows}, rows[-1]["hardware"]
    figures: dict[str, Callable[[dict[str, Any]], str]] = {
        "Seconds to the first token": lambda row: f"{row['seconds']:.2f} [{row['others']:.1f}]",
        "CPU seconds a thousand tokens": lambda row: f"{row['cpu_s'] / row['tokens'] * 1000:.2f}",
        "Share of that time that computing waited for stored KV": lambda row: f"{row['stall_s'] / row['seconds']:.2%}",
        "Peak memory in MiB, without mapped files, and what the process held before": lambda row: (
            f"{row['peak_mib']:,.0f} ({row['before_mib']:,.0f})"
        ),
    }
    lines = [
        "# Long prompts",
        "",
        f"Qwen2.5-0.5B's shape in bfloat16, chunks of {LONG_CHUNK_TOKENS} tokens in {rows[-1]['codec']}, a question of "
        f"{SHAPE['suffix_tokens']}. {h['cpu']}, {h['cores']} cores, torch {h['torch']}; written by "
        "`benchmarks/prefill.py --long`. In brackets: CPUs that other processes used.",
    ]
    for title, cell in figures.items():
        cells = (
            (f"{tokens:,}", *(cell(of[tokens, mode]) if (tokens, mode) in of else "" for mode in MODES))
            for tokens in sorted({tokens for tokens, _ in of})
        )
        lines += ["", f"{title}:", "", *table(("tokens", *MODES), cells)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
