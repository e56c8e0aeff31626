"""Reading documents on a CPU: tokens a second of a full prefill and of collecting, by instruction set.

    python benchmarks/reading.py [FILE.gguf ...] [--isa avx2] [--rounds 3] [--llama-python PYTHON]

FILE: as for `peers.py`, which writes the 7B's shape. Reads chunks of 512 tokens as `precompute` does (document context,
KV in the default codec, written to a store), then the same chunks and a question in a full prefill: 2,048 tokens, 512
with a file of more than 2 GB. Every run is a process of its own after a short warm-up; in each round the ways to read
take turns: products in floats, the default's products, and llama.cpp (--llama-python: an interpreter with `xllamacpp`,
whose library is built for AVX2). Runs during which other processes used more than a fifth of a CPU are dropped.

--isa: limit the CPU to these instructions; native does not. Results are kept per machine; a run adds to them, --anew
replaces the rows that it measures. The peak is of the memory that is not mapped from files.

Times on eight cores are computed: products and attention, which all threads share, take less time in proportion to the
cores, and the rest stays as measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cacheblend_kernels import compiled
from cacheblend_kernels.torch_backend import TorchBackend
from cacheblend_store import ChunkStore
from decode import Parts
from machine import (
    AVX2,
    MOST_USED,
    RESULTS,
    ROOT,
    VNNI,
    Others,
    fill,
    hardware,
    machine_name,
    memory_kib,
    read_result,
    save,
    table,
)
from peers import LLAMA_CPP_STARTED, Died, default_files, environment

from cacheblend_cli.collect.collector import Collector, PlannedChunk
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.corpus.contexts import document_contexts
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.evaluation.speed import SpeedPrompt, ordinary_ids, random_ids
from cacheblend_cli.types import AskRequest, BlendParams

LIMITS: dict[str, dict[str, str]] = {"avx2": AVX2, "vnni": VNNI, "native": {}}
SIZES = re.compile(r"[\d.]+[bm](?![a-z])")  # in names of files
ISAS = {"avx2": "AVX2", "vnni": "AVX-512 with VNNI", "native": "not limited"}
OWN_WAYS, LLAMA = ("default", "floats"), "llama.cpp"
WAYS = (*OWN_WAYS, LLAMA)
CHUNK_TOKENS, QUESTION_TOKENS, WARM_UP_TOKENS = 512, 32, 64
MACHINE = "Intel(R) Xeon(R) Processor, AMX"  # of docs/speed.md
WINDOW = 2048  # tokens, `precompute`'s
CORES = 8  # of the computed times
PARTS = ((compiled, "prefill_product"), (TorchBackend, "prefill_attention"))
"""What all threads share."""
LLAMA_CPP = (
    LLAMA_CPP_STARTED
    + """
import re
def read(ids):
    body = {"prompt": ids, "n_predict": 1, "temperature": 0, "cache_prompt": False}
    asked = Request(server.listening_address + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    timings = json.load(urlopen(asked))["timings"]
    assert timings["prompt_n"] == len(ids), timings
    return timings["prompt_ms"] / 1000
read(prompt[-64:])
full_s, status = read(prompt), open("/proc/self/status").read()
peak, mapped = (int(re.search(rf"{name}:\\s+(\\d+)", status)[1]) for name in ("VmHWM", "RssFile"))
print(json.dumps({"full_tokens": len(prompt), "full_s": full_s, "peak_mib": (peak - mapped) / 1024}), flush=True)
os._exit(0)
"""
)
ABOUT = f"""\
# Reading documents on a CPU

A full prefill, and collecting chunks of {CHUNK_TOKENS} tokens as `precompute` does, with GGUF files of Q4_K_M as
published and random blocks in Qwen2.5-7B's shape (shape7b). In floats: the same with products in floats. Every run is a
process of its own, in turns; medians of the runs in the last table. Computed for {CORES} cores: products and attention, which all threads share, take
less time in proportion to the cores, and the rest stays as measured. By `benchmarks/reading.py`."""
Run = dict[str, float]
Runs = dict[str, list[Run]]  # by way


def read_here(path: Path, way: str, ids: Path) -> Run:
    """Collect chunks of random ids in this process, then read them in a full prefill, whose ids it writes to a file."""
    runtime = Runtime.load(EngineConfig(model=str(path)))
    if way == "floats":
        compiled.prefill_product = partial(compiled.prefill_product, way=0)
    shared = Parts(time.perf_counter)
    for owner, name in PARTS:
        shared.time(owner, name, name)
    draw = partial(random_ids, ordinary_ids(runtime.model), generator=torch.Generator().manual_seed(1))

    def measured(work: Callable[[], Any]) -> tuple[Any, float, float]:
        shared.clear()
        start = time.perf_counter()
        return work(), time.perf_counter() - start, shared.seconds.total()

    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(Path(folder) / "store", mode="write") as store:
        collector, engine = Collector(runtime.collection(), store), Engine(runtime)

        def read(count: int, size: int) -> Run:
            chunks = planned(collector, [draw(count=size) for _ in range(count)])
            _, collect_s, collect_shared_s = measured(lambda: list(collector.store(chunks)))
            ask, question = AskRequest("", [chunk.key for chunk in chunks]), draw(count=QUESTION_TOKENS)
            prompt = SpeedPrompt(engine, engine.resolve(store, ask, suffix_ids=question), 2)
            ids.write_text(json.dumps(prompt.request.plan.token_ids), encoding="utf-8")
            _, full_s, full_shared_s = measured(lambda: prompt.first_token(BlendParams(mode="full")))
            return {
                "collect_tokens": count * size, "collect_s": collect_s, "collect_shared_s": collect_shared_s,
                "full_tokens": prompt.request.plan.num_tokens, "full_s": full_s, "full_shared_s": full_shared_s,
            }  # fmt: skip

        read(1, WARM_UP_TOKENS)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        found = read(number_of_chunks(path), CHUNK_TOKENS)
        return found | {
            "threads": torch.get_num_threads(),
            "peak_mib": (memory_kib("VmHWM") - memory_kib("RssFile")) / 1024,
        }


def planned(collector: Collector, chunks: list[tuple[int, ...]]) -> list[PlannedChunk]:
    """Return chunks of one document in its context, as `precompute` plans them."""
    collection = collector.collection
    lefts = document_contexts(chunks, collection.window(WINDOW))
    return [
        PlannedChunk(collection.key(ids, left), "bench", Chunk(number, "", ids, 0, 0), left, "document")
        for number, (ids, left) in enumerate(zip(chunks, lefts, strict=True))
    ]


def number_of_chunks(path: Path) -> int:
    return 1 if path.stat().st_size > 2 << 30 else WINDOW // CHUNK_TOKENS


def run(path: Path, way: str, ids: Path, llama: str | None) -> Run:
    """Read in a process of its own. Raises Died."""
    command = [sys.executable, __file__, "--child", str(path), way, str(ids)]
    if way == LLAMA:
        command = [str(llama), "-c", LLAMA_CPP, str(path), str(ids)]
    others = Others()
    done = subprocess.run(command, capture_output=True, text=True, env=environment(command[0]))
    if done.returncode:
        raise Died(f"exit {done.returncode}: {done.stderr[-1500:]}")
    found = json.loads(done.stdout.splitlines()[-1]) | {"others": others.used()}
    return {name: value if isinstance(value, int) else float(f"{value:.4g}") for name, value in found.items()}


def measure(path: Path, isa: str, runs: Runs, arguments: argparse.Namespace, keep: Callable[[], None]) -> None:
    """Read once a round and way. keep: called after every kept run."""
    os.environ.update(LIMITS[isa])
    left_out = {"floats": not LIMITS[isa], LLAMA: not arguments.llama_python}
    ways = [way for way in arguments.way or WAYS if not left_out.get(way)]
    for _ in range(arguments.rounds):
        for way in ways:
            found = run(path, way, arguments.folder / f"{path.stem} reading.json", arguments.llama_python)
            kept = found["others"] <= arguments.others
            print(f"{path.stem}, {isa}, {way}: {found}{'' if kept else ', not kept'}", file=sys.stderr)
            if kept:
                runs[way].append(found)
                keep()
    for name in LIMITS[isa]:
        del os.environ[name]


def rate(runs: list[Run], work: str, cores: int = 0) -> float:
    """Return the median of tokens per second, computed for `cores` if given; NaN without runs."""
    rates = []
    for r in runs:
        saved_s = r[f"{work}_shared_s"] * (1 - r["threads"] / cores) if cores else 0.0
        rates.append(r[f"{work}_tokens"] / (r[f"{work}_s"] - saved_s))
    return statistics.median(rates) if rates else math.nan


def full_cells(runs: Runs) -> list[str]:
    own, floats, llama = (rate(runs[way], "full") for way in WAYS)
    speeds = own, floats, llama, rate(runs["default"], "full", CORES)
    return [*map(_shown, speeds), _shown(own / floats, ".2f"), _shown(own / llama, ".2f")]


def collect_cells(runs: Runs) -> list[str]:
    own, floats = (runs[way] for way in OWN_WAYS)
    speeds = rate(own, "collect"), rate(floats, "collect"), rate(own, "collect", CORES)
    return [*map(_shown, speeds), _shown(speeds[0] / speeds[1], ".2f"), _shown(speeds[0] / rate(own, "full"), ".2f")]


def memory_cells(runs: Runs) -> list[str]:
    peaks = ([r["peak_mib"] for r in runs[way]] for way in WAYS)
    return [*(f"{statistics.median(of):,.0f}" if of else "" for of in peaks), str(len(runs["default"]))]


def _shown(value: float, form: str = ".1f") -> str:
    return "" if math.isnan(value) else format(value, form)


TABLES = {
    f"Full prefill, tokens/s ({CORES} cores: computed)": (
        ("", "in floats", "llama.cpp", f"{CORES} cores", "times floats", "times llama.cpp"),
        full_cells,
    ),
    f"Collecting, tokens/s ({CORES} cores: computed)": (
        ("", "in floats", f"{CORES} cores", "times floats", "share of a full prefill's"),
        collect_cells,
    ),
    "Peak memory that is not mapped from files, MiB": (("", "in floats", "llama.cpp", "runs"), memory_cells),
}


def page(result: dict[str, Any]) -> str:
    """Return the page: a table per machine and figure."""
    lines = [ABOUT]
    for machine, here in result["machines"].items():
        h = here["hardware"]
        lines += ["", f"## {machine}", "", f"{h['cores']} cores, {h['memory_gib']} GiB, torch {h['torch']}."]
        rows = {
            f"{model}, {isa}": runs | {LLAMA: here[LLAMA].get(model, [])}
            for model, of in here["runs"].items()
            for isa, runs in of.items()
        }
        for title, (columns, cells) in TABLES.items():
            filled = ((name, *cells(runs)) for name, runs in rows.items())
            lines += ["", f"{title}:", "", *table(("", *columns), filled)]
    return "\n".join(lines) + "\n"


def docs_table(result: dict[str, Any]) -> str:
    """Return the table of docs/speed.md: tokens per second while collecting, and computed for more cores."""
    rows = []
    for model, of in result["machines"][MACHINE]["runs"].items():
        runs = (of.get(isa, {}).get("default") for isa in ISAS.values())
        cells = (f"{rate(r, 'collect'):.0f} ({rate(r, 'collect', CORES):.0f})" if r else "" for r in runs)
        rows.append((found[0].upper() if (found := SIZES.search(model)) else model, *cells))
    return "\n".join(table(("", "AVX2", "AVX-512 with VNNI", "AMX"), rows)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--isa", choices=LIMITS, action="append", help="repeatable; default: each")
    parser.add_argument("--way", choices=WAYS, action="append", help="repeatable; default: each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-python", help="an interpreter with xllamacpp")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "cacheblend-peers")
    parser.add_argument("--anew", action="store_true", help="drop the measured rows first")
    parser.add_argument("--others", type=float, default=MOST_USED, help="CPUs that others may use in a kept run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--child", nargs=3, metavar=("FILE", "WAY", "IDS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        path, way, ids = arguments.child
        print(json.dumps(read_here(Path(path), way, Path(ids))))
        return
    out = arguments.out / "reading.json"
    result = {"machines": {}} | read_result(out)
    here = result["machines"].setdefault(machine_name(), {"runs": {}, LLAMA: {}})
    here["hardware"] = hardware()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for path in arguments.files or default_files(arguments.folder):
        for isa in arguments.isa or LIMITS:
            of_model = here["runs"].setdefault(path.stem, {})
            if arguments.anew:
                of_model.pop(ISAS[isa], None)
            runs = of_model.setdefault(ISAS[isa], {way: [] for way in OWN_WAYS})
            runs = runs | {LLAMA: here[LLAMA].setdefault(path.stem, [])}
            measure(path, isa, runs, arguments, lambda: save(result, out, page(result)))
    if out.parent == RESULTS and machine_name() == MACHINE:
        fill(ROOT / "docs" / "speed.md", reading=docs_table(result))
    print(page(result))


if __name__ == "__main__":
    main()
