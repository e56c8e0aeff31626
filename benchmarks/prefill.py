"""Time to the first token: transformers, our full prefill and our blended prefill, in one process and in turn.

    python benchmarks/prefill.py [--rounds 5] [--out benchmarks/results/prefill.json]

Qwen2.5-0.5B's shape with random weights, fp32 on CPU, 2048 chunk tokens in 8 chunks, a question of 32 tokens. The blend
reads its KV from the store in the page cache, with digests checked. Medians over rounds after one warm-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cacheblend_store import ChunkStore
from machine import ROOT, hardware, write_checkpoint
from transformers import AutoModelForCausalLM

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
from cacheblend_cli.model.loading import Precision, load_model
from cacheblend_cli.types import BlendParams

CHUNKS, CHUNK_TOKENS, SUFFIX_TOKENS, PREFIX_TOKENS, ANSWER_TOKENS = 8, 256, 32, 4, 32
BLENDS = {
    "reuse": BlendParams(mode="reuse"),
    **{f"hkvd {r:.2f}": BlendParams(selector="hkvd", ratio=r) for r in (0.05, 0.15, 0.30)},
    **{f"query {r:.2f}": BlendParams(selector="query", ratio=r) for r in (0.05, 0.15, 0.30)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/qwen2.5-0.5b.json")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/prefill.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "model", arguments.config)
        memory = measure_memory(checkpoint, Path(folder))
        result = {
            "hardware": hardware(),
            "shape": shape(),
            "memory": memory,
            **measure(checkpoint, Path(folder), arguments.rounds),
        }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    arguments.out.with_suffix(".md").write_text(table(result))
    print(table(result))


def measure(checkpoint: Path, folder: Path, rounds: int) -> dict[str, Any]:
    ours = load_model(checkpoint, "bench", torch.device("cpu"), Precision("float32"), "auto")
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    generator, ordinary = torch.Generator().manual_seed(1), ordinary_ids(ours)
    ids = tuple(random_ids(ordinary, CHUNK_TOKENS, generator) for _ in range(CHUNKS))
    prefix, suffix = (random_ids(ordinary, count, generator) for count in (PREFIX_TOKENS, SUFFIX_TOKENS))
    runtime = Runtime(ours, EngineConfig())
    runtime.template = replace(runtime.template, prefix_ids=prefix)
    with ChunkStore.open(folder / "bench-store", mode="write") as store:
        own = SpeedPrompt.stored(Engine(runtime), store, PromptLayout(ids, suffix), ANSWER_TOKENS)
        full = own.prefill(BlendParams(mode="full"))
        prompt = torch.tensor([full.plan.token_ids])

        @torch.inference_mode()
        def their_logits() -> torch.Tensor:
            logits: torch.Tensor = theirs(prompt, use_cache=True, logits_to_keep=1).logits[0, -1]
            return logits

        def their_first_token() -> FirstToken:
            start = time.perf_counter()
            int(their_logits().argmax())
            return FirstToken(time.perf_counter() - start)

        agree = float((full.result.logits[-1] - their_logits()).abs().max())
        del full
        cases: dict[str, Callable[[], FirstToken]] = {
            "transformers": their_first_token,
            "full": partial(own.first_token, BlendParams(mode="full")),
            **{name: partial(own.first_token, blend) for name, blend in BLENDS.items()},
        }
        found = in_turn(cases, rounds)
    median = {name: statistics.median(r.seconds for r in runs) for name, runs in found.items()}
    return {
        "seconds": median,
        "all_seconds": {name: [r.seconds for r in runs] for name, runs in found.items()},
        "max_logit_difference_to_transformers": agree,
        "full_over_transformers": median["full"] / median["transformers"],
        "speedup_over_full": {n: median["full"] / median[n] for n in BLENDS},
        "ceiling": {n: ceiling(own.plan(blend), ours.spec.num_layers, blend) for n, blend in BLENDS.items()},
        "store_share_of_ttft": {n: statistics.median(r.stall_s for r in found[n]) / median[n] for n in BLENDS},
        "load_seconds": {n: statistics.median(r.load_s for r in found[n]) for n in BLENDS},
        "kv_bytes_loaded": found["reuse"][-1].kv_bytes,
    }


def measure_memory(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Return peak MiB of `precompute` and `ask` over a corpus of the same number of tokens, and of the weights."""
    docs = folder / "docs"
    docs.mkdir()
    for n in range(CHUNKS):
        words = " ".join(f"billing {i % 7} team {n}" for i in range(60))
        (docs / f"{n}.txt").write_text(words + "\n")
    common = ["--model", str(checkpoint), "--store", str(folder / "memory-store"), "--dtype", "float32"]
    cli = [sys.executable, "-c", "from cacheblend_cli.cli.main import main; main()"]
    peaks = {"idle": peak([sys.executable, "-c", "import torch, transformers, cacheblend_cli.engine.engine"])}
    peaks["precompute"] = peak([*cli, "precompute", str(docs), "--chunk-tokens", str(CHUNK_TOKENS), "--json", *common])
    peaks["ask"] = peak([*cli, "ask", "billing team", "--top-k", str(CHUNKS), "--max-tokens", "2", "--json", *common])
    weights = (checkpoint / "model.safetensors").stat().st_size / 2**20
    return {**peaks, "weights": weights}


def peak(command: list[str]) -> dict[str, float]:
    """Return peak MiB of a command: resident, and anonymous (without mapped files, whose pages belong to the page
    cache)."""
    anonymous = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        while child.poll() is None:
            try:
                fields = dict(line.split(":", 1) for line in Path(f"/proc/{child.pid}/status").read_text().splitlines())
            except FileNotFoundError:
                break
            if "RssAnon" in fields:
                anonymous = max(anonymous, int(fields["RssAnon"].split()[0]))
                resident = int(fields["VmHWM"].split()[0])
            time.sleep(0.002)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return {"resident": resident / 1024, "anonymous": anonymous / 1024}


def shape() -> dict[str, int]:
    return {
        "chunks": CHUNKS,
        "chunk_tokens": CHUNK_TOKENS,
        "prefix_tokens": PREFIX_TOKENS,
        "suffix_tokens": SUFFIX_TOKENS,
    }


def table(result: dict[str, Any]) -> str:
    h, seconds = result["hardware"], result["seconds"]
    lines = [
        f"{h['cpu']}, {h['cores']} cores, torch {h['torch']}, fp32; Qwen2.5-0.5B's shape, random weights, "
        f"{CHUNKS} chunks of {CHUNK_TOKENS} tokens and a question of {SUFFIX_TOKENS}.",
        "",
        "| | first token, ms | faster than our full prefill | ceiling | store's part |",
        "|---|---|---|---|---|",
    ]
    for name, value in seconds.items():
        speedup, top, share = (result[k].get(name) for k in ("speedup_over_full", "ceiling", "store_share_of_ttft"))
        cells = [
            f"{speedup:.2f} x" if speedup else "",
            f"{top:.2f} x" if top else "",
            f"{share:.1%}" if share is not None else "",
        ]
        lines.append(f"| {name} | {value * 1000:.0f} | " + " | ".join(cells) + " |")
    m = result["memory"]
    lines += [
        "",
        f"Full prefill over transformers: {result['full_over_transformers']:.3f}. KV loaded: {result['kv_bytes_loaded'] / 2**20:.1f} MiB.",
        "",
        f"Peak memory, MiB, anonymous (resident with mapped files): libraries alone {_pair(m['idle'])}, precompute "
        f"{_pair(m['precompute'])}, ask {_pair(m['ask'])}; of these the weights are {m['weights']:.0f}.",
    ]
    return "\n".join(lines) + "\n"


def _pair(peaks: dict[str, float]) -> str:
    return f"{peaks['anonymous']:.0f} ({peaks['resident']:.0f})"


if __name__ == "__main__":
    main()
