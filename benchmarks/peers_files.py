"""Whole processes with files as people download them, beside llama.cpp, ik_llama.cpp and transformers.

    python benchmarks/peers_files.py [FILE.gguf ...] [--seconds 1800] [--folder DIR] [--only TEXT] [--isa avx2]
    [--ik-llama-source DIR] [--anew] [--prepare]

FILE: by default Qwen2.5-Coder-0.5B and 1.5B in Q4_K_M, as `tools/fetch_real.py` keeps them, and a file of random blocks
in Qwen2.5-7B's shape (`random_blocks.py`; 4.7 GB, written once into --folder). A prompt of 8 chunks of up to 256
tokens and a question, the same ids for all, greedy, 100 tokens, past an end of text; the rest as in `peers.py`.

"CPU until loaded" is the CPU time of a process until model and ids are ready, less that of a process that only imports
the same modules. Peak memory is VmHWM: the largest resident set, pages of the mapped file included.

--isa avx2 measures what a CPU with AVX2 alone computes: cacheblend and transformers through ATEN_CPU_CAPABILITY and
ONEDNN_MAX_CPU_ISA; xllamacpp is built for AVX2 anyway, ik_llama.cpp is built so. transformers in bfloat16 is left out,
since torch chooses its kernels by the CPU. --ik-llama-source: its source folder, built with CMake and a C++ compiler
that are installed. What is left out is named under the table.

Results are kept per machine in benchmarks/results/peers_files.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peers
from machine import MOST_USED, ROOT, hardware, machine_name
from peer_ik_llama import build
from peer_models import ANSWER_TOKENS, CHUNK_TOKENS, CHUNKS, environment
from peer_programs import TRANSFORMERS, XLLAMACPP

RESULTS = ROOT / "benchmarks/results/peers_files.json"
REAL = Path(os.environ.get("REAL_MODELS") or Path.home() / ".cache/cacheblend-real")  # as tools/fetch_real.py
DOWNLOADED = ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf")
SHAPE_7B = "shape7b-q4_k_m.gguf"
QUESTION = "Which clients did team 3 bill, and in which weeks?"
SETTINGS = {"CACHEBLEND_SPECULATE": "off"}  # a token a step, as the others
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
COLUMNS = {
    "CPU until loaded, s": "load_cpu_s",
    "process to first token, s": "process_first_s",
    "to the 100th, s": "process_last_s",
    "decode, tokens/s": "tokens_per_s",
    "peak memory, MiB": "peak_mib",
}
FLOAT32_TWICE = 14  # bytes of two float32 copies for a byte of a file with 4.6 bits a weight
LOADED = "loaded = time.time()"
REPORT = 'import json, sys, time\nprint(json.dumps({"cpu": time.process_time(), "modules": list(sys.modules)}))\n'
OURS = f"import sys, time\nfrom cacheblend_cli import Engine\nengine = Engine.load(sys.argv[1])\n{LOADED}\n"
ASK = """
from cacheblend_cli.types.sampling import SamplingParams
init = SamplingParams.__init__
SamplingParams.__init__ = lambda self, *values, **named: init(self, *values, **({"ignore_eos": True} | named))
from cacheblend_cli.cli.main import main
main()
"""  # the command, with answers that go on after an end of text
IMPORTS = """
import importlib, json, sys, time
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except Exception:
        pass
print(json.dumps({"cpu": time.process_time()}))
"""
BLENDS = {name: peers.BLENDS[name] for name in ("full", "query .15")}
OWN_RATIOS = dict(zip(DOWNLOADED, (".30", ".50"), strict=True))
"""Ratios that `models check` chooses on MuSiQue (study/own_ratio.md)."""
Rows = dict[str, tuple[list[str], list[str]]]  # a row's command, and the command that only loads


@dataclass(frozen=True)
class ModelFile:
    """A GGUF file with the store and the prompt of its runs in a folder."""

    path: Path
    folder: Path

    @property
    def ids(self) -> Path:
        return self.folder / f"{self.path.stem} ids.json"

    def command(self, *command: str) -> list[str]:
        return [
            sys.executable,
            "-c",
            ASK,
            *command,
            "--model",
            str(self.path),
            "--store",
            str(self.folder / f"{self.path.stem} store"),
        ]

    def ask(self, *flags: str) -> list[str]:
        chunks = (self.folder / f"{self.path.stem} chunks").read_text(encoding="utf-8")
        asked = ["ask", QUESTION, "--chunks", chunks, "--local", "--json", "--ids", "--temperature", "0"]
        return self.command(*asked, "--max-tokens", str(ANSWER_TOKENS), *flags)

    def prepare(self) -> None:
        """Store the chunks, and write their ids and the prompt's."""
        if self.ids.exists():
            return
        document = self.folder / "billing.txt"
        sentences = (f"In week {i} team {i % 7} billed client {i % 13}." for i in range(CHUNKS * CHUNK_TOKENS // 10))
        document.write_text(" ".join(sentences), encoding="utf-8")
        cut = ["--chunk-tokens", str(CHUNK_TOKENS), "--context", "sink", "--json"]
        chunks = [json.loads(line) for line in _output(self.command("precompute", str(document), *cut)).splitlines()]
        assert len(chunks) >= CHUNKS
        chosen = ",".join(chunk["id"] for chunk in chunks[:CHUNKS])
        (self.folder / f"{self.path.stem} chunks").write_text(chosen, encoding="utf-8")
        asked = json.loads(_output([*self.ask("--mode", "reuse"), "--max-tokens", "1"]))
        self.ids.write_text(json.dumps(asked["prompt_ids"]), encoding="utf-8")


def _output(command: list[str], given: str | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment(command[0]))
    if done.returncode:
        raise peers.Died(f"exit {done.returncode}: {done.stderr[-1500:]}", max(0, -done.returncode))
    return done.stdout


def only_loading(program: str) -> str:
    """Return the program up to where its model is loaded, with a report of CPU time and modules."""
    before, marker, _ = program.partition(LOADED)
    assert marker
    return before + REPORT


def load_cpu_s(command: list[str]) -> float:
    """Return the CPU seconds of a command that loads, beyond the imports of its modules."""
    found = json.loads(_output(command).strip().splitlines()[-1])
    return max(0.0, found["cpu"] - _import_cpu_s(tuple(found["modules"])))


@cache
def _import_cpu_s(modules: tuple[str, ...]) -> float:
    """Return the CPU seconds of a process that imports these: the least of three, the first of which may read a cold
    disk."""
    command = [sys.executable, "-c", IMPORTS]
    return min(json.loads(_output(command, json.dumps(modules)))["cpu"] for _ in range(3)) if modules else 0.0


def rows_of(file: ModelFile, ik_llama: Path | None, avx2: bool, memory_gib: float) -> tuple[Rows, list[str]]:
    """Return the rows of a file, and lines about those that are left out."""
    name, path, ids = file.path.stem, str(file.path), str(file.ids)
    rows: Rows = {}
    left_out = []

    def add(row: str, program: str, *arguments: str) -> None:
        whole = [sys.executable, "-c", program, path, ids, *arguments]
        rows[f"{name}: {row}"] = whole, [sys.executable, "-c", only_loading(program), path, ids, *arguments]

    if avx2 and not _ours_is_avx2():
        left_out.append("cacheblend: its compiled code for AVX2 is not built")
    else:
        loads = [sys.executable, "-c", only_loading(OURS), path]
        blends = dict(BLENDS)
        if own := OWN_RATIOS.get(file.path.name):
            blends[f"query {own}"] = ["--selector", "query", "--ratio", own]
        rows |= {f"{name}: cacheblend, {blend}": (file.ask(*flags), loads) for blend, flags in blends.items()}
    if find_spec("xllamacpp"):
        add(f"llama.cpp (xllamacpp {version('xllamacpp')}, built for AVX2)", XLLAMACPP)
    else:
        left_out.append("llama.cpp: xllamacpp is not installed")
    if ik_llama:
        rows[f"{name}: ik_llama.cpp"] = [str(ik_llama), path, ids], [str(ik_llama), path, ids, "load"]
    if not find_spec("accelerate"):
        left_out.append("transformers: it needs accelerate for GGUF files, which is not installed")
    elif file.path.stat().st_size * FLOAT32_TWICE > memory_gib * 2**30:
        left_out.append(f"transformers with {name}: it dequantises to float32, which does not fit the memory twice")
    else:
        for dtype in ("float32", "bfloat16"):
            if dtype == "bfloat16" and avx2:
                left_out.append("transformers in bfloat16: torch chooses its kernels by the CPU, not by the variables")
            else:
                add(f"transformers, dequantised to {dtype}", TRANSFORMERS, dtype)
    return rows, left_out


def _ours_is_avx2() -> bool:
    program = "from cacheblend_kernels import compiled; print(compiled.library()._name)"
    return "_cpu_avx2" in _output([sys.executable, "-c", program])


def run_row(loads: dict[tuple[str, ...], list[str]], command: list[str]) -> dict[str, float]:
    """Run a row and the command that only loads, one after the other."""
    found = peers.run(command)
    return found | {"load_cpu_s": load_cpu_s(loads[tuple(command)])}


def write(result: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text(table(result), encoding="utf-8")


def table(result: dict[str, Any]) -> str:
    lines = [
        "# Whole processes with downloaded files",
        "",
        f"""\
GGUF files as published, and one of random blocks in Qwen2.5-7B's shape (shape7b). A prompt of about 2,000 tokens in
{CHUNKS} chunks and a question, the same ids for all programs, {ANSWER_TOKENS} tokens of answer. Every run is a process
of its own; medians. CPU until loaded: beyond the imports of the same modules. Peak memory: VmHWM, pages of the mapped
file included. By `benchmarks/peers_files.py`.""",
        *peers.machine_tables(result, COLUMNS),
    ]
    return "\n".join(lines).rstrip() + "\n"


def chosen_files(paths: list[Path], folder: Path) -> list[Path]:
    """Return the files of the arguments, or those of the default that are there; writes the 7B's."""
    if paths:
        return paths
    found = [path for name in DOWNLOADED if (path := REAL / name).exists()]
    for name in DOWNLOADED:
        if REAL / name not in found:
            print(f"{name} is not in {REAL}: run tools/fetch_real.py", file=sys.stderr)
    shape = folder / SHAPE_7B
    if not shape.exists() and found:
        subprocess.run([sys.executable, ROOT / "benchmarks/random_blocks.py", shape, found[-1]], check=True)
    return [*found, *([shape] if shape.exists() else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "cacheblend-peers-files")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--isa", choices=("avx2",), help="limit every program to these instructions")
    parser.add_argument("--ik-llama-source", type=Path, help="source folder of ik_llama.cpp")
    parser.add_argument("--anew", action="store_true", help="drop this machine's rows first")
    parser.add_argument("--others", type=float, default=MOST_USED, help="CPUs that others may use in a kept run")
    parser.add_argument("--prepare", action="store_true", help="write files and stores only")
    arguments = parser.parse_args()
    folder, avx2 = arguments.folder, arguments.isa == "avx2"
    isa_folder = folder / (arguments.isa or "native")
    isa_folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(SETTINGS | (AVX2 if avx2 else {}))
    machine = machine_name() + (", limited to AVX2" if avx2 else "")
    result = peers.results_of(RESULTS, machine, arguments.anew)
    here = result["machines"][machine]
    here["hardware"] = hardware()
    left_out, ik_llama = list[str](), None
    if arguments.ik_llama_source is None:
        left_out.append("ik_llama.cpp: no source folder was given")
    else:
        try:
            ik_llama = build(arguments.ik_llama_source, isa_folder / "ik", avx2)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            print(getattr(error, "stderr", error), file=sys.stderr)
            left_out.append("ik_llama.cpp: not built, CMake or the compiler is missing or failed")
    rows: Rows = {}
    for path in chosen_files(arguments.files, folder):
        file = ModelFile(path, isa_folder)
        file.prepare()
        own, lacking = rows_of(file, ik_llama, avx2, here["hardware"]["memory_gib"])
        rows |= {name: row for name, row in own.items() if arguments.only in name}
        left_out += lacking
    here["left_out"] = list(dict.fromkeys(left_out))
    if arguments.prepare:
        return
    commands = {name: command for name, (command, _) in rows.items()}
    run: Callable[[list[str]], dict[str, float]] = partial(run_row, {tuple(c): loads for c, loads in rows.values()})
    peers.measure(commands, result, machine, arguments.seconds, arguments.others, run, write)
    write(result)
    print(table(result))


if __name__ == "__main__":
    main()
