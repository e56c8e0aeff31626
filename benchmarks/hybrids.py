"""A hybrid's document asked again after a restart: time to the first token, restored and in full.

    python benchmarks/hybrids.py [--documents 1,5] [--repeats 5] [--dtype bfloat16]

Qwen3.5-0.8B's shape with random weights: 18 of its 24 layers have a state of gated DeltaNet in place of K and V. 2,000
tokens in one document or in five, cut into chunks of at most 512; a question of some 30 tokens. Documents are collected
in a process of its own. Then a new process asks: once in each mode to warm up, then in turn in both modes. A single
question has a pool of its own, so nothing comes from the prefix cache. Then 32 tokens are decoded, and the logits of
both modes are compared bit by bit.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import ROOT, Others, hardware, write_checkpoint

TOKENS, CHUNK_TOKENS, MODES = 2000, 512, ("blend", "full")
QUESTION = "What does the keeper of the harbor say about the light, and who told her of the storm?"
RESULTS = ROOT / "benchmarks/results/hybrids.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", default="1,5")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/qwen3.5-0.8b.json")
    parser.add_argument("--work", type=Path, help="keep the checkpoint here")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", nargs=3, metavar=("WHAT", "MODEL", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, model, folder = arguments.child
        run = collect if what == "collect" else ask
        print(json.dumps(run(Path(model), Path(folder), arguments.dtype, arguments.repeats)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        if not (work / "model").exists():
            write_checkpoint(work / "model", arguments.config)
        for count in map(int, arguments.documents.split(",")):
            folder = Path(tempfile.mkdtemp(dir=temporary))
            write_documents(folder / "docs", count)
            others = Others()
            same = str(work / "model"), str(folder), "--dtype", arguments.dtype, "--repeats", str(arguments.repeats)
            found = {"documents": count}
            for what in ("collect", "ask"):
                command = [sys.executable, __file__, "--child", what, *same]
                found |= json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            found |= {
                "date": f"{datetime.now(UTC):%Y-%m-%d}",
                "others": round(others.used(), 2),
                "hardware": hardware(),
            }
            rows.append(found)
            print(json.dumps(found), file=sys.stderr, flush=True)
    arguments.out.write_text(json.dumps(rows, indent=2) + "\n")


def write_documents(folder: Path, count: int, tokens: int = TOKENS) -> None:
    """Write documents of so many tokens in all, of the demo's words."""
    from cacheblend_cli.demo import model_dir
    from cacheblend_cli.model.tokenizer import Tokenizer

    folder.mkdir(parents=True)
    pages = sorted((ROOT / "cacheblend_cli/demo/handbook").glob("*.md"))
    words, rng = " ".join(page.read_text() for page in pages).split(), random.Random(0)
    tokenizer = Tokenizer(model_dir(), 1 << 20)
    for number in range(count):
        ids = tokenizer.encode_text(" ".join(rng.choice(words) for _ in range(2 * tokens)))[: tokens // count]
        (folder / f"{number}.md").write_text(tokenizer.decode(ids) + "\n")


def opened(model: Path, folder: Path, dtype: str) -> Any:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.engine.config import EngineConfig
    from cacheblend_cli.engine.engine import Engine

    start = time.perf_counter()
    engine = Engine.load(EngineConfig(model=str(model), dtype=dtype))
    return engine, ChunkStore.open(folder / "store", mode="write"), time.perf_counter() - start


def collect(model: Path, folder: Path, dtype: str, repeats: int) -> dict[str, Any]:
    from cacheblend_cli.collect.precompute import PrecomputeOptions

    engine, store, _ = opened(model, folder, dtype)
    start = time.perf_counter()
    engine.precompute(store, [str(folder / "docs")], PrecomputeOptions(chunk_tokens=CHUNK_TOKENS), lambda event: None)
    seconds, stats = time.perf_counter() - start, [m.num_bytes for m in store.chunks()]
    layout = engine.model.decoder.state_layout
    store.close()
    return {"collect_s": round(seconds, 2), "stored_mib": round(sum(stats) / 2**20, 1),
            "state_mib": round(layout.num_bytes / 2**20, 1)}  # fmt: skip


def ask(model: Path, folder: Path, dtype: str, repeats: int) -> dict[str, Any]:
    import torch

    from cacheblend_cli.types import AskOptions, AskRequest, BlendParams, SamplingParams

    engine, store, load_s = opened(model, folder, dtype)
    chunks = sorted((m for m in store.chunks() if m.context != "prefix"), key=lambda m: (m.source, m.index))
    keys, one = [m.key for m in chunks], SamplingParams(max_tokens=1)
    requests = {mode: AskRequest(QUESTION, keys, BlendParams(mode=mode), one) for mode in MODES}
    seconds, logits = {mode: list[float]() for mode in MODES}, dict[str, torch.Tensor]()
    for number in range(1 + repeats):
        for mode in MODES:
            answer = engine.run_alone(store, requests[mode], AskOptions(save=False))
            if number:
                seconds[mode].append(answer.timing.ttft_s)
    longer = replace(requests["blend"], sampling=SamplingParams(max_tokens=33, ignore_eos=True))
    decoded = engine.run_alone(store, longer, AskOptions(save=False))
    for mode in MODES:
        done = engine.hold_prefill(engine.resolve(store, requests[mode]))
        logits[mode] = done.result.logits
        done.sequence.release()
    plan = engine.resolve(store, requests["blend"]).plan
    found = {mode: round(statistics.median(of), 4) for mode, of in seconds.items()}
    return {
        "load_s": round(load_s, 1), "prompt_tokens": plan.num_tokens, "restored_tokens": plan.stored_until,
        "restored_ttft_s": found["blend"], "full_ttft_s": found["full"], "share": round(found["blend"] / found["full"], 3),
        "ttft_s": {mode: [round(s, 4) for s in of] for mode, of in seconds.items()}, "dtype": dtype,
        "decode_tokens_per_s": round(decoded.timing.decode_tokens_per_s, 1),
        "same_bits": torch.equal(logits["blend"], logits["full"]),
    }  # fmt: skip


if __name__ == "__main__":
    main()
