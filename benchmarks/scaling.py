"""How time and memory grow with the store.

    python benchmarks/scaling.py [--seconds 360] [--largest 100000]
    python benchmarks/scaling.py --chunks 1000000 --work FOLDER
    python benchmarks/scaling.py --documents 10000

A model of one tiny layer, some 1,000 chunks and up to `--largest`, ten times as many each; CPU seconds and peak memory
of whole commands, CPU time of other processes meanwhile, and the reads of `ask` for eight chunks. With `--chunks`, one
store of about that many alone, whose row is added; a million takes a quarter of an hour of CPU and 6 GB below `--work`,
where finished phases are kept, so that the same command goes on after an interruption. With `--documents`, `precompute`
again over that many small files, of which none and then one has changed. Writes benchmarks/results/scaling.json and
benchmarks/results/scaling.md.
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
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from machine import ROOT, Others

RESULTS, PAGE = ROOT / "benchmarks/results/scaling.json", ROOT / "benchmarks/results/scaling.md"
CLI = [sys.executable, "-c", "from cacheblend_cli.cli.main import main; main()"]
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 1280,
    "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
    "rope_theta": 100000.0,
}  # fmt: skip
SHAPES = {"SmolLM2-135M": (30, 3, 64), "Qwen2.5-0.5B": (24, 2, 64), "Llama-3.1-8B": (32, 8, 128)}
"""Layers, KV heads, head_dim."""
PARAGRAPHS = 0.72
"""Paragraphs a chunk: a paragraph has one chunk or two, and some of the second ones recur."""
COMMANDS = {
    "first search": "first `search`", "search": "`search`", "ls": "`chunks ls`", "ask": "`ask`", "again": "`precompute` again",
    "one changed": "one changed", "precompute": "`precompute`",
}  # fmt: skip
CODECS = ("float32", "bfloat16", "float8_e4m3", "int7", "int4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=360)
    parser.add_argument("--largest", type=int, default=100_000)
    parser.add_argument("--chunks", type=int, help="measure one store of about this many chunks")
    parser.add_argument("--documents", type=int, help="measure precompute of this many small documents")
    parser.add_argument("--work", type=Path, help="keep documents, store and finished phases here")
    arguments = parser.parse_args()
    from machine import hardware, write_checkpoint

    result: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    result["bytes"] = bytes_per_million()
    if not arguments.documents:
        result["hardware"] = hardware()
    with ExitStack() as stack:
        folder = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not (folder / "tiny" / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "tiny.json").write_text(json.dumps(TINY))
            write_checkpoint(folder / "tiny", folder / "tiny.json")
        if not (arguments.chunks or arguments.documents):
            result["store"] = stores(folder, arguments.largest, arguments.seconds)
        if arguments.chunks:
            row = of_store(folder, arguments.chunks)
            others = [known for known in result.get("store", []) if known.get("wanted") != row["wanted"]]
            result["store"] = sorted([*others, row], key=lambda known: known["chunks"])
        if arguments.documents:
            result["documents"] = of_documents(folder, arguments.documents)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(result), encoding="utf-8")
    print(page(result))


def stores(folder: Path, largest: int, seconds: float) -> list[dict[str, float]]:
    """Measure stores of ten times as many chunks each, while ten times the last duration is left."""
    found: list[dict[str, float]] = []
    start, last, count = time.monotonic(), 0.0, 1000
    while count <= largest and time.monotonic() - start + 10 * last < seconds:
        begun = time.monotonic()
        found.append(of_store(folder, count))
        last, count = time.monotonic() - begun, 10 * count
    return found


def of_store(folder: Path, wanted: int) -> dict[str, Any]:
    """Fill a store of about `wanted` chunks from documents of 100 paragraphs; return the cost of each command.

    Phases that a former run finished in this folder are not run again.
    """
    docs, path, file = folder / f"docs{wanted}", folder / f"store{wanted}", folder / f"costs{wanted}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    count = round(wanted * PARAGRAPHS / 100)
    machine = ["--store", str(path), "--model", str(folder / "tiny"), "--dtype", "float32"]
    precompute = ["precompute", str(docs), "--chunk-tokens", "16", "--context", "sink", *machine]  # -q prints each id
    words = ["--search", "words", "--all", "-q"]
    search = ["search", "word7 word77", *words, "--store", str(path)]
    ask = [
        "ask",
        "Where are word7, word70, word77 and word700?",
        "--max-tokens",
        "4",
        "--top-k",
        "4",
        "--local",
        *words,
        *machine,
    ]

    def fill() -> dict[str, float]:
        shutil.rmtree(path, ignore_errors=True)
        docs.mkdir(exist_ok=True)
        for number in range(count):
            write_document(docs / f"{number}.txt", number)
        return command_cost(precompute)

    def change() -> dict[str, float]:
        write_document(docs / f"{count // 2}.txt", count)
        return command_cost(precompute)

    phases: dict[str, Callable[[], Any]] = {
        "precompute": fill,
        "look-up": lambda: look_up(path),
        "again": lambda: command_cost(precompute),
        "first search": lambda: command_cost(search),
        "search": lambda: command_cost(search),
        "ask": lambda: command_cost(ask),
        "ls": lambda: command_cost(["chunks", "ls", "--limit", "50", "--store", str(path)]),
        "one changed": change,
    }
    for name, phase in phases.items():
        if name not in found:
            found[name] = phase()
            print(wanted, name, json.dumps(found[name]), file=sys.stderr, flush=True)
            file.write_text(json.dumps(found))
    costs = [cost for cost in found.values() if "wall" in cost]
    others = sum(cost["others"] * cost["wall"] for cost in costs) / sum(cost["wall"] for cost in costs)
    return {"wanted": wanted, "chunks": found["look-up"]["chunks"], **found, "others": others}


def of_documents(folder: Path, count: int) -> dict[str, Any]:
    """Return the cost of `precompute` over documents of 7 paragraphs in 100 folders of which none, and one, changed."""
    from machine import hardware

    docs, path = folder / f"documents{count}", folder / f"documents-store{count}"
    for number in range(count):
        (docs / str(number % 100)).mkdir(parents=True, exist_ok=True)
        write_document(docs / str(number % 100) / f"{number}.txt", number, 7)
    given = [str(docs), "--store", str(path), "--model", str(folder / "tiny"), "--dtype", "float32"]
    command_cost(["precompute", *given, "--chunk-tokens", "16", "--context", "sink"])
    command_cost(["precompute", *given])  # reads the files again that were new in the run before
    again = [command_cost(["precompute", *given]) for _ in range(2)]
    write_document(docs / "50" / "50.txt", count, 7)
    chunks = look_up(path)["chunks"]
    changed = [command_cost(["precompute", *given])]
    machine = hardware()
    about = f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"
    return {"documents": count, "chunks": chunks, "again": again, "one changed": changed, "hardware": about}


def write_document(file: Path, seed: int, count: int = 100) -> None:
    """Write paragraphs of three random words."""
    rng = random.Random(seed)
    paragraphs = [" ".join(f"word{rng.randrange(2000)}" for _ in range(3)) for _ in range(count)]
    file.write_text("\n\n".join(paragraphs))


def look_up(path: Path) -> dict[str, float]:
    """Return the number of chunks, bytes of the store, and CPU milliseconds to read eight chunks by id: a median of
    50."""
    from cacheblend_store import ChunkStore

    rng, took = random.Random(0), list[float]()
    with ChunkStore.open(path) as store:
        keys = [manifest.key for manifest in store.chunks()]
        for _ in range(50):
            start = time.process_time()
            for _ in range(8):
                store.get_chunk(store.resolve(rng.choice(keys).hex()[:16]))
            took.append(time.process_time() - start)
    on_disk = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
    return {"chunks": len(keys), "bytes": on_disk, "ms": statistics.median(took) * 1000}


def command_cost(command: list[str]) -> dict[str, float]:
    """Run a command; return its CPU seconds, wall-clock seconds, peak memory of its own (without mapped files) in MiB,
    and the CPUs that other processes used meanwhile."""
    others, start, peak, said = Others(), time.perf_counter(), 0.0, ""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen([*CLI, *command], stdout=subprocess.DEVNULL, stderr=errors) as process,
    ):
        while True:
            found, status, usage = os.wait4(process.pid, os.WNOHANG)
            if found:
                break
            with suppress(OSError, StopIteration):
                status_file = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                peak = max(peak, int(next(x for x in status_file if x.startswith("RssAnon")).split()[1]) / 1024)
            time.sleep(0.05)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            said = errors.read()
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit {process.returncode}\n{said}")
    used = usage.ru_utime + usage.ru_stime
    return {"cpu": used, "wall": time.perf_counter() - start, "peak_mib": peak, "others": others.used()}


def bytes_per_million() -> dict[str, dict[str, float]]:
    """Return GB per million tokens in chunks of 512, by shape and codec: computed, not measured."""
    from cacheblend_store.format.blobs import blob_spec

    def of(codec: str, layers: int, heads: int, dim: int) -> float:
        return layers * sum(t.num_bytes for t in blob_spec(codec, 512, heads, dim).values()) / 512 / 1000

    return {name: {codec: of(codec, *shape) for codec in CODECS} for name, shape in SHAPES.items()}


def page(result: dict[str, Any]) -> str:
    h = result["hardware"]
    lines = [
        "# Scaling",
        "",
        f"Time and memory by store size. {h['cpu']}, {h['cores']} cores, torch {h['torch']}; written by "
        "`python benchmarks/scaling.py`.",
        "",
    ]
    lines += [
        "## Store size",
        "",
        "A model of one tiny layer, chunks of at most 16 tokens, documents of 100 paragraphs. CPU seconds of whole commands, interpreter and "
        "libraries included, and their peak memory in MiB, mapped files left out. The second `precompute` finds nothing to do, but reads "
        "files again that were written just before the first; the third has one changed document of 100 paragraphs; `search` is "
        "one query again, after the first has made the index; `ask` searches and "
        "answers with four tokens. Look-up: CPU time to read eight chunks by id, as `ask` does. Others: CPUs that other processes used "
        "meanwhile, in the mean; where they did, CPU seconds are above those of a quiet machine.",
        "",
        "| chunks | GB | look-up of 8, ms | " + " | ".join(COMMANDS.values()) + " | others |",
        "|---" * (4 + len(COMMANDS)) + "|",
    ]
    notes = list[str]()
    for row in result.get("store", []):
        cells = (f"{row[name]['cpu']:.1f} s, {row[name]['peak_mib']:,.0f}" for name in COMMANDS)
        size = f"{row['look-up']['bytes'] / 1e9:.2f} | {row['look-up']['ms']:.1f}" if "look-up" in row else " | "
        others = f"{row['others']:.1f}" if "others" in row else ""
        lines.append(f"| {int(row['chunks']):,} | {size} | {' | '.join(cells)} | {others} |")
        notes += ["", f"{int(row['chunks']):,} chunks: {row['note']}."] if "note" in row else []
    lines += notes
    if "documents" in result:
        lines += _of_documents(result["documents"])
    lines += [
        "",
        "## Size of stored KV",
        "",
        "GB per million tokens by codec (`--kv-dtype`), in chunks of 512:",
        "",
        "| | " + " | ".join(CODECS) + " |",
        "|---" * (len(CODECS) + 1) + "|",
    ]
    lines += [
        f"| {name} | " + " | ".join(f"{of[c]:.1f}" for c in CODECS) + " |" for name, of in result["bytes"].items()
    ]
    return "\n".join(lines) + "\n"


def _of_documents(found: dict[str, Any]) -> list[str]:
    def cost(runs: list[dict[str, float]]) -> str:
        seconds = " and ".join(f"{run['cpu']:.1f}" for run in runs)
        return f"{seconds} s, {max(run['peak_mib'] for run in runs):,.0f}"

    runs = [*found["again"], *found["one changed"]]
    others = sum(run["others"] for run in runs) / len(runs)
    return [
        "",
        "## Documents that did not change",
        "",
        f"{found['documents']:,} files of 7 paragraphs, with {found['chunks']:,} chunks. A file is read, and its chunks are looked up, only if it "
        f"changed (see [documents](../../docs/documents.md#keep-the-store-up-to-date)). CPU seconds of each run of the whole command and peak memory in MiB, as "
        f"above; {found['hardware']}. Other processes used {others:.1f} CPUs meanwhile.",
        "",
        "| `precompute` again | one changed |",
        "|---|---|",
        f"| {cost(found['again'])} | {cost(found['one changed'])} |",
    ]


if __name__ == "__main__":
    main()
