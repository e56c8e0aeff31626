"""Products with a model's weights on this CPU: as torch keeps them, and packed for oneDNN (`model/linear.py`).

    python benchmarks/linear.py [--config configs/qwen2.5-0.5b.json] [--rounds 9]

All layers' weights are multiplied in turn, so that they come from memory as in a real pass. Writes
benchmarks/results/linear.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cacheblend_cli.evaluation.speed import device_name
from cacheblend_cli.model.families import spec_from_config
from cacheblend_cli.model.linear import Linear
from cacheblend_cli.model.spec import ModelSpec

ROOT = Path(__file__).parents[1]
ROWS = (1, 8, 32, 340, 2048)
DTYPES = (torch.float32, torch.bfloat16)


def shapes_of(spec: ModelSpec) -> list[tuple[int, int]]:
    """[out, in] of a layer's products."""
    hidden, inter = spec.hidden_size, spec.intermediate_size
    return [(spec.q_size + 2 * spec.kv_size, hidden), (hidden, spec.q_size), (2 * inter, hidden), (hidden, inter)]


def seconds(run: Callable[[], None], rounds: int) -> float:
    run()
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


@torch.inference_mode()
def measure(spec: ModelSpec, rounds: int) -> list[dict[str, Any]]:
    found = []
    for dtype in DTYPES:
        plain = [
            [Linear(torch.randn(s).to(dtype), pack=False) for s in shapes_of(spec)] for _ in range(spec.num_layers)
        ]
        packed = [[Linear(part.weight) for part in layer] for layer in plain]
        weights = sum(part.weight.numel() for layer in plain for part in layer)
        for rows in ROWS:
            inputs = [torch.randn(rows, s[1]).to(dtype) for s in shapes_of(spec)]

            def run(layers: Sequence[Sequence[Linear]], inputs: Sequence[torch.Tensor] = inputs) -> None:
                for layer in layers:
                    for part, x in zip(layer, inputs, strict=True):
                        part(x)

            for name, layers in (("torch", plain), ("packed", packed)):
                took = seconds(lambda layers=layers, run=run: run(layers), rounds)
                found.append(
                    {
                        "dtype": str(dtype).removeprefix("torch."),
                        "rows": rows,
                        "layout": name,
                        "ms": took * 1000,
                        "gflop_per_s": 2 * rows * weights / took / 1e9,
                        "gb_per_s": weights * dtype.itemsize / took / 1e9,
                    }
                )
    return found


def table(result: dict[str, Any]) -> str:
    h = result["hardware"]
    lines = [
        "# Products with a model's weights",
        "",
        f"{h['cpu']}, {h['cores']} cores, torch {h['torch']}; {result['config']}'s shapes, all layers in turn; median of "
        f"{result['rounds']} rounds. By `benchmarks/linear.py`.",
        "",
        "| dtype | rows | torch, ms | packed, ms | faster | packed, GFLOP/s | packed, GB/s of weights |",
        "|---|---|---|---|---|---|---|",
    ]
    by = {(r["dtype"], r["rows"], r["layout"]): r for r in result["products"]}
    for dtype, rows, layout in by:
        if layout == "packed":
            plain, packed = by[dtype, rows, "torch"], by[dtype, rows, "packed"]
            lines.append(
                f"| {dtype} | {rows} | {plain['ms']:.1f} | {packed['ms']:.1f} | {plain['ms'] / packed['ms']:.2f} x | "
                f"{packed['gflop_per_s']:.0f} | {packed['gb_per_s']:.1f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/qwen2.5-0.5b.json")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    spec = spec_from_config(json.loads(arguments.config.read_text(encoding="utf-8")))
    hardware = {"cpu": device_name(torch.device("cpu")), "cores": os.cpu_count(), "torch": torch.__version__}
    result = {
        "hardware": hardware,
        "config": arguments.config.stem,
        "rounds": arguments.rounds,
        "products": measure(spec, arguments.rounds),
    }
    out = ROOT / "benchmarks/results/linear.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(table(result), encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
