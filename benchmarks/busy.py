"""A busy machine: the first token and decoding beside other programs, by how OpenMP's threads wait for each other.

    python benchmarks/busy.py [--seconds 360]

SmolLM2-135M-Instruct in bfloat16, five chunks of 320 tokens and a question of 32, a ratio of .15, answers of 24 tokens;
quiet, beside one busy loop and beside two. Each way to wait is a process of its own, since libgomp reads it when it is
loaded; they run in turn until the time is up, and medians over their runs are told. Writes
benchmarks/results/busy.{json,md}.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quiet import Others

from cacheblend_cli.cli.main import VARIABLES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/busy.json"
CHUNKS, CHUNK_TOKENS, SUFFIX_TOKENS, ANSWER_TOKENS = 5, 320, 32, 24
LOOPS = {"quiet": 0, "one busy loop": 1, "two busy loops": 2}
WAYS = {
    "unset": {},
    "GOMP_SPINCOUNT=100000": {"GOMP_SPINCOUNT": "100000"},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
}


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def child() -> dict[str, list[float]]:
    """Of each load: seconds to the first token, and tokens a second."""
    import torch
    from cacheblend_store import ChunkStore

    from cacheblend_cli.engine.config import BlendConfig, EngineConfig
    from cacheblend_cli.engine.runtime import Runtime
    from cacheblend_cli.evaluation.speed import Layout, SpeedPrompt, ordinary_ids, random_ids
    from cacheblend_cli.model.loading import Precision, load_model, resolve_model
    from cacheblend_cli.model.named import SMOLLM2

    blend = BlendConfig(ratio=0.15)
    model = load_model(resolve_model(SMOLLM2), SMOLLM2, torch.device("cpu"), Precision("bfloat16"), "auto")
    runtime = Runtime(model, EngineConfig())
    generator, ordinary = torch.Generator().manual_seed(1), ordinary_ids(model)
    chunks = tuple(random_ids(ordinary, CHUNK_TOKENS, generator) for _ in range(CHUNKS))
    layout = Layout(chunks, random_ids(ordinary, SUFFIX_TOKENS, generator))
    found = {}
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(Path(folder) / "store", mode="write") as store:
        prompt = SpeedPrompt.stored(runtime, store, layout, ANSWER_TOKENS)
        prompt.first_token(blend)
        prompt.decode(4)
        for name, loops in LOOPS.items():
            with busy_loops(loops):
                seconds = statistics.median(prompt.first_token(blend).seconds for _ in range(3))
                found[name] = [seconds, prompt.decode(ANSWER_TOKENS)]
    return found


def run_child(way: dict[str, str]) -> dict[str, list[float]]:
    unset = ("OMP_NUM_THREADS", *VARIABLES)
    environment = {name: value for name, value in os.environ.items() if name not in unset} | way
    done = subprocess.run([sys.executable, __file__, "--child"], check=True, capture_output=True, env=environment)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def measure(seconds: float) -> dict[str, Any]:
    runs: dict[str, list[dict[str, list[float]]]] = {name: [] for name in WAYS}
    start, slowest, others = time.monotonic(), 0.0, Others()
    while time.monotonic() - start + slowest < seconds or not runs["unset"]:
        round_start = time.monotonic()
        for name, way in WAYS.items():
            runs[name].append(run_child(way))
        slowest = max(slowest, time.monotonic() - round_start)
    medians = {
        name: {load: [statistics.median(run[load][i] for run in found) for i in (0, 1)] for load in LOOPS}
        for name, found in runs.items()
    }
    return {"others": others.used(), "rounds": len(runs["unset"]), "medians": medians, "runs": runs}


def table(result: dict[str, Any]) -> str:
    h = result["hardware"]
    lines = [
        "# Beside other programs",
        "",
        f"{h['cpu']}, {h['cores']} cores, torch {h['torch']}; SmolLM2-135M-Instruct in bfloat16, {CHUNKS} chunks of {CHUNK_TOKENS} "
        f"tokens, r=.15, {ANSWER_TOKENS} tokens of answer. Seconds to the first token / tokens a second; medians of "
        f"{result['rounds']} processes each, in turn.",
        "",
        "| | " + " | ".join(LOOPS) + " | two loops, times slower |",
        "|---" * (len(LOOPS) + 2) + "|",
    ]
    for name, found in result["medians"].items():
        cells = [f"{first:.2f} / {rate:.1f}" for first, rate in found.values()]
        quiet, loud = found["quiet"], found["two busy loops"]
        cells.append(f"{loud[0] / quiet[0]:.1f} / {quiet[1] / loud[1]:.1f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "By `benchmarks/busy.py`.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=360)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child()))
        return
    from prefill import hardware

    result = {"hardware": hardware(), **measure(arguments.seconds)}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text(table(result), encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
