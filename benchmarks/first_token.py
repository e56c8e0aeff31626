"""From a shell's prompt to the first token, loading included: `cacheblend ask` beside a minimal script with transformers.

    python benchmarks/first_token.py [--rounds 5] [--out benchmarks/results/first_token.json]

SmolLM2-135M-Instruct as a checkpoint in float32 and in bfloat16, the same prompt ids, greedy, every run a process of its
own and in turn. Until the first byte on stdout; the medians. Peaks of memory are VmHWM at that moment.
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
from pathlib import Path
from typing import Any

from load_memory import write_models
from prefill import ROOT, hardware

WORDS = 700
THEIRS = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, dtype, ids = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model)
model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
row = torch.tensor([json.load(open(ids))])
out = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=1, do_sample=False)
print(tokenizer.decode(out[0, -1:]), flush=True)
"""
CLI = [sys.executable, "-c", "from cacheblend_cli.cli.main import main; main()"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/first_token.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models").mkdir()
        models = write_models(Path(folder) / "models")
        own = {dtype: path for name, (path, dtype) in models.items() if name == f"safetensors, {dtype}"}
        result = {
            "hardware": hardware(),
            **{dtype: measure(own[dtype], dtype, Path(folder) / dtype, arguments.rounds) for dtype in sorted(own)},
        }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    arguments.out.with_suffix(".md").write_text(table(result), encoding="utf-8")
    print(table(result))


def measure(model: str, dtype: str, folder: Path, rounds: int) -> dict[str, Any]:
    folder.mkdir()
    document = folder / "billing.txt"
    document.write_text(" ".join(f"In week {i} team {i % 7} billed client {i % 13}." for i in range(WORDS // 8)))
    common = ["--model", model, "--dtype", dtype, "--store", str(folder / "store")]
    subprocess.run([*CLI, "precompute", str(document), *common], check=True, stdout=subprocess.DEVNULL)
    ask = [
        *CLI,
        "ask",
        "What did team 3 bill?",
        "--local",
        "--top-k",
        "5",
        "--temperature",
        "0",
        "--max-tokens",
        "1",
        *common,
    ]
    told = json.loads(
        subprocess.run([*ask, "--mode", "full", "--json", "--ids"], check=True, capture_output=True).stdout
    )
    (folder / "ids.json").write_text(json.dumps(told["prompt_ids"]))
    commands = {
        "transformers": [sys.executable, "-c", THEIRS, model, dtype, str(folder / "ids.json")],
        "cacheblend ask --mode full": [*ask, "--mode", "full"],
        "cacheblend ask": ask,
    }
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            seconds = first_byte(command)
            if number:  # the first one warms the page cache and measures this machine
                runs[name].append(seconds)
    return {
        "prompt_tokens": told["prompt_tokens"],
        "seconds": {name: statistics.median(s for s, _ in found) for name, found in runs.items()},
        "all_seconds": {name: [s for s, _ in found] for name, found in runs.items()},
        "peak_mib": {name: statistics.median(m for _, m in found) for name, found in runs.items()},
    }


def first_byte(command: list[str]) -> tuple[float, float]:
    """Seconds until the command's first byte on stdout, and its peak in MiB then."""
    start = time.perf_counter()
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        first = os.read(child.stdout.fileno(), 1)
        seconds = time.perf_counter() - start
        status = Path(f"/proc/{child.pid}/status").read_text()
        _, errors = child.communicate()
    if not first or child.returncode:
        raise RuntimeError(f"{command[:3]} failed: {errors.decode()}")
    return seconds, int(next(s for s in status.splitlines() if s.startswith("VmHWM")).split()[1]) / 1024


def table(result: dict[str, Any]) -> str:
    h = result["hardware"]
    lines = [
        f"{h['cpu']}, {h['cores']} cores, torch {h['torch']}. Written by `python benchmarks/first_token.py`.",
        "",
        "| dtype | prompt, tokens | | first token, s | beside transformers | peak, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for dtype in ("bfloat16", "float32"):
        part = result[dtype]
        for name, seconds in part["seconds"].items():
            against = seconds / part["seconds"]["transformers"]
            lines.append(
                f"| {dtype} | {part['prompt_tokens']} | {name} | {seconds:.2f} | {against:.2f} x | {part['peak_mib'][name]:.0f} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
