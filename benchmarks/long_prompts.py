"""Long prompts: time to the first token, what loading takes of it, and peak memory.

    python benchmarks/long_prompts.py [--tokens 4096,8192,16384,32768] [--modes reuse,.05,.15,full]

Qwen2.5-0.5B's shape with random weights in bfloat16, chunks of 512 tokens stored in the default codec, a question of 32
tokens. Stored KV is random: times do not depend on it. Each mode of a prompt runs in a process of its own, once to warm
up on a prompt of four chunks and once to be measured; the peak is of the memory that is not mapped from files. Rows
that are not measured anew stay as they were.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import ROOT, Others, hardware, write_checkpoint

CHUNK_TOKENS, SUFFIX_TOKENS, WARM_UP_CHUNKS = 512, 32, 4
MODES = ("reuse", ".05", ".15", "full")
RESULTS = ROOT / "benchmarks/results/long_prompts.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="4096,8192,16384,32768")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--config", type=Path, default=ROOT / "configs/qwen2.5-0.5b.json")
    parser.add_argument("--work", type=Path, help="keep the checkpoint here")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", nargs=3, metavar=("MODEL", "TOKENS", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        model, tokens, mode = arguments.child
        print(json.dumps(measured(Path(model), int(tokens), mode)))
        return
    rows: list[dict[str, Any]] = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        model = (arguments.work or Path(folder)) / "model"
        if not (model / "config.json").exists():
            config = json.loads(arguments.config.read_text()) | {"max_position_embeddings": 65536}
            model.parent.mkdir(parents=True, exist_ok=True)
            (model.parent / "config.json").write_text(json.dumps(config))
            write_checkpoint(model, model.parent / "config.json")
        for tokens in map(int, arguments.tokens.split(",")):
            for mode in arguments.modes.split(","):
                rows = [row for row in rows if (row["tokens"], row["mode"]) != (tokens, mode)]
                rows.append({"tokens": tokens, "mode": mode, **in_child(model, tokens, mode)})
                rows.sort(key=lambda row: (row["tokens"], MODES.index(row["mode"])))
                arguments.out.write_text(json.dumps(rows, indent=2) + "\n")
                arguments.out.with_suffix(".md").write_text(page(rows))
                print(rows, file=sys.stderr, flush=True)
    print(page(rows))


def in_child(model: Path, tokens: int, mode: str) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CACHEBLEND_") and k != "OMP_NUM_THREADS"}
    others = Others()
    command = [sys.executable, __file__, "--child", str(model), str(tokens), mode]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    conditions = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "others": round(others.used(), 2), "hardware": hardware()}
    return json.loads(done.stdout) | conditions


def measured(model: Path, tokens: int, mode: str) -> dict[str, Any]:
    """Return seconds to the first token, of loading and waited for it, and peak memory in MiB, of one mode in this
    process."""
    import torch
    from cacheblend_store import ChunkStore

    from cacheblend_cli.engine.config import EngineConfig
    from cacheblend_cli.engine.runtime import Runtime
    from cacheblend_cli.model.loading import Precision, load_model
    from cacheblend_cli.types import BlendParams

    runtime = Runtime(load_model(model, "bench", torch.device("cpu"), Precision("bfloat16"), "auto"), EngineConfig())
    blend = BlendParams(ratio=float(mode)) if mode[0] == "." else BlendParams(mode=mode)
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(Path(folder) / "store", mode="write") as store:
        stored(runtime, store, WARM_UP_CHUNKS).first_token(blend)
        prompt = stored(runtime, store, tokens // CHUNK_TOKENS)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        before, start = resident("RssAnon"), time.process_time()
        run = prompt.first_token(blend)
        cpu_s = time.process_time() - start
        return {
            "seconds": run.seconds, "cpu_s": cpu_s, "load_s": run.load_s, "stall_s": run.stall_s, "kv_bytes": run.kv_bytes,
            "codec": runtime.collection().codec, "before_mib": before, "peak_mib": resident("VmHWM") - resident("RssFile"),
        }  # fmt: skip


def stored(runtime: Any, store: Any, count: int) -> Any:
    """Return a prompt of `count` chunks with random KV in the store."""
    import torch
    from cacheblend_store.format.codecs import encode_kv

    from cacheblend_cli.collect.collector import Collector, PlannedChunk
    from cacheblend_cli.corpus.chunker import Chunk
    from cacheblend_cli.engine.engine import Engine
    from cacheblend_cli.evaluation.speed import SpeedPrompt, ordinary_ids, random_ids
    from cacheblend_cli.types import AskRequest

    spec, collection = runtime.model.spec, runtime.collection()
    generator, ordinary = torch.Generator().manual_seed(count), ordinary_ids(runtime.model)
    collector, keys = Collector(collection, store), list[bytes]()
    collector.begin()
    for number in range(count):
        ids = random_ids(ordinary, CHUNK_TOKENS, generator)
        planned = PlannedChunk(collection.key(ids), "bench", Chunk(number, "", ids, 0, 0), (), "sink")
        kv = [torch.randn(2, CHUNK_TOKENS, heads, dim, generator=generator) for heads, dim in spec.kv_shapes]
        collector.put_blobs(planned, [encode_kv(k, v, collection.codec) for k, v in kv])
        keys.append(planned.key)
    suffix = random_ids(ordinary, SUFFIX_TOKENS, generator)
    engine = Engine(runtime)
    return SpeedPrompt(engine, engine.resolve(store, AskRequest("", keys), suffix_ids=suffix), 2)


def resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def page(rows: list[dict[str, Any]]) -> str:
    of = {(row["tokens"], row["mode"]): row for row in rows}
    lengths = sorted({tokens for tokens, _ in of})
    h, codec = rows[-1]["hardware"], rows[-1]["codec"]
    lines = [
        "# Long prompts",
        "",
        f"Qwen2.5-0.5B's shape in bfloat16, chunks of {CHUNK_TOKENS} tokens in {codec}, a question of {SUFFIX_TOKENS}. {h['cpu']}, "
        f"{h['cores']} cores, torch {h['torch']}; written by `benchmarks/long_prompts.py`. In brackets: CPUs that other processes used.",
        "",
        "Seconds to the first token:",
        "",
        "| tokens | " + " | ".join(MODES) + " |",
        "|---|" + "---|" * len(MODES),
    ]

    def table(cell: Any) -> list[str]:
        return [
            f"| {tokens:,} | "
            + " | ".join(cell(of[tokens, mode]) if (tokens, mode) in of else "" for mode in MODES)
            + " |"
            for tokens in lengths
        ]

    lines += table(lambda row: f"{row['seconds']:.2f} [{row['others']:.1f}]")
    lines += ["", "CPU seconds a thousand tokens:", "", *lines[6:8]]
    lines += table(lambda row: f"{row['cpu_s'] / row['tokens'] * 1000:.2f}")
    lines += ["", "Share of that time that computing waited for stored KV:", "", *lines[6:8]]
    lines += table(lambda row: f"{row['stall_s'] / row['seconds']:.2%}")
    lines += ["", "Peak memory in MiB, without mapped files, and what the process held before:", "", *lines[6:8]]
    lines += table(lambda row: f"{row['peak_mib']:,.0f} ({row['before_mib']:,.0f})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
