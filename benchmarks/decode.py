"""Where a decoded token's time goes: share of the matrix products and of the other parts of a step, tokens per second.

    python benchmarks/decode.py [--threads 1] [--tokens 40]

Qwen2.5-0.5B's shape with random weights, a context of 2,000 tokens, one answer. With one thread the shares are of CPU
time, which other programs hardly change; with more they are of wall-clock time, and only a quiet machine gives usable
ones. Each case is a process of its own.
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
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cacheblend_kernels import compiled
from cacheblend_kernels.torch_attention import onednn_multiplies
from cacheblend_kernels.torch_backend import TorchBackend
from cacheblend_store import ChunkStore
from machine import MOST_USED, RESULTS, ROOT, Others, hardware, machine_name, read_result, save, table, write_checkpoint

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.core import output_processor
from cacheblend_cli.engine.core.core import EngineCore, admit
from cacheblend_cli.engine.core.output_processor import OutputProcessor
from cacheblend_cli.engine.core.scheduler import Scheduler
from cacheblend_cli.engine.core.sequence import RequestState
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.events import Limits
from cacheblend_cli.engine.features import FEATURES
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker import decode
from cacheblend_cli.evaluation.speed import PromptLayout, SpeedPrompt, even_lengths, ordinary_ids, random_ids
from cacheblend_cli.types import BlendParams, SamplingParams

CONTEXT, SUFFIX, CHUNKS = 2000, 48, 8
CASES = {"float32": ("float32", "auto"), "bfloat16": ("bfloat16", "auto"), "int8 weights": ("bfloat16", "int8")}
"""Compute dtype and weight dtype."""
PARTS = (
    (compiled, "decode_product", "products"),
    (torch.nn.functional, "linear", "products"),
    (compiled, "decode_attention", "attention"),
    (compiled, "rms_norm", "norms and sums"),
    (compiled, "rope_and_cache", "RoPE and cache"),
    (TorchBackend, "act_and_mul", "activation"),
    (output_processor, "draw_next", "sampling"),
    (decode, "next_rows", "batch"),
    (decode, "filled", "batch"),
    (OutputProcessor, "append", "text"),
    (Scheduler, "schedule", "scheduling"),
)


class Parts:
    """Seconds by part of a step, without those of parts within it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.seconds, self.calls = clock, Counter[str](), Counter[str]()
        self._inner = [0.0]

    def time(self, owner: Any, name: str, part: str) -> None:
        """Replace a function by one that adds its time to the part."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = self.clock()
            try:
                return function(*args, **kwargs)
            finally:
                took = self.clock() - start
                self.seconds[part] += took - self._inner.pop()
                self.calls[part] += 1
                self._inner[-1] += took

        setattr(owner, name, timed)

    def clear(self) -> None:
        self.seconds.clear()
        self.calls.clear()


def steps_of(checkpoint: Path, case: str, store_folder: Path, tokens: int) -> Callable[[], object]:
    """Prefill a prompt of CONTEXT tokens, and return what computes the next token."""
    dtype, weights = CASES[case]
    config = EngineConfig(model=str(checkpoint), dtype=dtype, weight_dtype=weights, speculate="off")
    runtime = Runtime.load(config)
    ids, generator = ordinary_ids(runtime.model), torch.Generator().manual_seed(1)
    lengths = even_lengths(CONTEXT - SUFFIX - len(runtime.template.prefix_ids), CHUNKS)
    layout = PromptLayout(tuple(random_ids(ids, n, generator) for n in lengths), random_ids(ids, SUFFIX, generator))
    with ChunkStore.open(store_folder, mode="write") as store:
        request = SpeedPrompt.stored(Engine(runtime), store, layout, tokens).request
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        state = RequestState(replace(request, blend=BlendParams(mode="reuse"), sampling=sampling), 0)
        admit(runtime, state, FEATURES)
        memory = runtime.memory_for((state.num_tokens + tokens) // config.block_size + 3)
        core = EngineCore(runtime, Limits(max_sequences=1, enable_prefix_caching=False), memory, FEATURES)
        core.add(state)
        while state.sequences[0].output is None:
            core.step()
    return core.step


def measure(checkpoint: Path, case: str, tokens: int) -> dict[str, Any]:
    """Measure one case in this process."""
    with tempfile.TemporaryDirectory() as store:
        step = steps_of(checkpoint, case, Path(store), 2 * tokens + 16)
    for _ in range(3):
        step()
    others, times, cpu = Others(), list[float](), list[float]()
    for _ in range(tokens):
        wall, used = time.perf_counter(), time.process_time()
        step()
        times.append(time.perf_counter() - wall)
        cpu.append(time.process_time() - used)
    found: dict[str, Any] = {
        "ms": statistics.median(times) * 1000,
        "cpu_ms": statistics.median(cpu) * 1000,
        "others": others.used(),
    }
    parts = Parts(time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)
    for owner, name, part in PARTS:
        parts.time(owner, name, part)
    step()
    parts.clear()
    whole = parts.clock()
    for _ in range(tokens):
        step()
    whole = parts.clock() - whole
    seconds = dict(parts.seconds.most_common()) | {"other Python and tensors": whole - parts.seconds.total()}
    found["parts_ms"] = {part: s / tokens * 1000 for part, s in seconds.items()}
    return found


def page(result: dict[str, Any]) -> str:
    """Return the page: a table per machine and number of threads."""
    lines = [
        "# A decoded token",
        "",
        f"Qwen2.5-0.5B's shape, random weights, a context of {CONTEXT:,} tokens, one answer; a step from the scheduler to the text. Tokens/s and CPU time are medians of the "
        "steps; the parts, measured in other steps with timers around them, and the products' share are means. With one thread parts are CPU time, with more "
        "wall-clock time. Tensor operations and OpenMP regions are those of an earlier version, views left out. By `benchmarks/decode.py`.",
    ]
    for name, machine in result.items():
        for threads, here in machine["threads"].items():
            cases, h = here["cases"], here["hardware"]
            parts = list(dict.fromkeys(p for case in cases.values() for p in case["parts_ms"]))
            rows: dict[str, Callable[[dict[str, Any]], str]] = {
                "products' share": lambda c: f"{c['parts_ms']['products'] / sum(c['parts_ms'].values()):.0%}",
                "tokens/s": lambda c: f"{1000 / c['ms']:.1f}" if c["others"] <= MOST_USED else "not quiet",
                "CPU time, ms": lambda c: f"{c['cpu_ms']:.1f}",
                "tensor operations a product": lambda c: (
                    f"{c['operations'] / c['products']:.2f}" if "products" in c else ""
                ),
                "OpenMP regions": lambda c: str(c.get("regions", "")),
                "CPUs used by others": lambda c: f"{c['others']:.2f}",
                **{f"{p}, ms": lambda c, p=p: f"{c['parts_ms'].get(p, 0):.2f}" for p in parts},  # type: ignore[misc]
            }
            lines += ["", f"## {name}, {threads} thread{'s' * (threads != '1')}", ""]
            lines += [f"{h['cores']} cores, {h['memory_gib']} GiB, torch {h['torch']}.", ""]
            lines += table(("", *cases), ((title, *map(cell, cases.values())) for title, cell in rows.items()))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/qwen2.5-0.5b.json")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--case", nargs=2, metavar=("CASE", "CHECKPOINT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(Path(arguments.case[1]), arguments.case[0], arguments.tokens)))
        return
    out, threads = arguments.out / "decode.json", str(arguments.threads)
    result = read_result(out)
    here = result.setdefault(machine_name(), {"threads": {}})["threads"].setdefault(threads, {"cases": {}})
    here["hardware"] = hardware()
    narrow = onednn_multiplies(torch.bfloat16) and torch.cpu._is_vnni_supported()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "model", arguments.config)
        for case in ("bfloat16", "int8 weights") if narrow else ("float32",):
            command = [sys.executable, __file__, "--case", case, str(checkpoint), "--tokens", str(arguments.tokens)]
            environment = os.environ | {"OMP_NUM_THREADS": threads}
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            here["cases"][case] = json.loads(done.stdout.splitlines()[-1])
    save(result, out, page(result))
    print(page(result))


if __name__ == "__main__":
    main()
