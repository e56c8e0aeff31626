"""Memory that loading takes: peaks of processes that load SmolLM2 as a checkpoint and as a GGUF file, beside its size.

    python benchmarks/load_memory.py [--out benchmarks/results/load_memory.md]

Each load is a process of its own (Linux). A peak is VmHWM, mapped pages included, less what a process has (VmRSS) that has
loaded the libraries, the handbook's model of 3 MB and this model's tokenizer. The size is that of the weights as they are computed in.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IDLE, LOADED = "idle", "loaded"
CHILD = """
import sys
import gguf.quants
from cacheblend_cli.api import Engine, EngineConfig
from cacheblend_cli.model.loading import resolve_model
from cacheblend_cli.model.tokenizer import Tokenizer
wanted, model, dtype = sys.argv[1:]
engine = Engine.load(EngineConfig(model=model if wanted == "loaded" else "handbook", dtype=dtype))
tokenizer = None if wanted == "loaded" else Tokenizer(resolve_model(model))
field = "VmHWM" if wanted == "loaded" else "VmRSS"
memory = next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1]
decoder = engine.runtime.decoder
print(decoder.num_parameters * decoder.dtype.itemsize, memory)
"""
SMALL = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
SHARD = "64MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/load_memory.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = write_models(Path(folder))
        rows = []
        for name, (model, dtype) in models.items():
            (_, idle), (size, highest) = (memory(kind, model, dtype) for kind in (IDLE, LOADED))
            taken = highest - idle
            rows.append((name, dtype, size, taken, taken / size))
            print(f"{name}, {dtype}: {taken >> 20} MiB for {size >> 20} MiB, {taken / size:.2f}", file=sys.stderr)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(table(rows, idle), encoding="utf-8")


def write_models(folder: Path) -> dict[str, tuple[str, str]]:
    """What is loaded: a name, what --model takes, and the dtype."""
    # in a process of its own: no peak of this one is inherited
    subprocess.run([sys.executable, __file__, "--write", str(folder)], check=True, env=environment())
    models = {"GGUF Q4_1": ("smollm2", "float32"), "GGUF Q4_1 ": ("smollm2", "bfloat16")}
    for path in sorted(folder.iterdir()):
        dtype = json.loads((path / "config.json").read_text())["dtype"]
        models[f"safetensors, {path.name}"] = (str(path), dtype)
    return models


def write(folder: Path) -> None:
    """SmolLM2 as checkpoints: float32, bfloat16, and float32 in shards."""
    import torch
    from huggingface_hub import save_torch_state_dict

    from cacheblend_cli.model.loading import resolve_model
    from cacheblend_cli.model.tensor_source import tensor_source

    source_dir = resolve_model("smollm2")
    source = tensor_source(source_dir)
    for name, dtype, shard in (
        ("float32", torch.float32, "4GB"), ("bfloat16", torch.bfloat16, "4GB"), ("float32 in shards", torch.float32, SHARD),
    ):  # fmt: skip
        weights = {n: source.read(n, 0, shape[0]).to(dtype).view(shape) for n, _, shape in source.headers()}
        path = folder / name
        path.mkdir()
        save_torch_state_dict(weights, path, max_shard_size=shard)
        for file in SMALL:
            if (source_dir / file).is_file():
                shutil.copy(source_dir / file, path / file)
        config = json.loads((path / "config.json").read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
        (path / "config.json").write_text(json.dumps(config))


def memory(kind: str, model: str, dtype: str) -> tuple[int, int]:
    """Bytes of the weights, and of the process: the most it had (LOADED), or what it has in the end (IDLE)."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, kind, model, dtype], check=True, capture_output=True, text=True, env=environment()
    )
    size, highest = done.stdout.split()
    return int(size), int(highest) << 10


def environment() -> dict[str, str]:
    """One thread, so that no thread's heap is counted by chance."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def table(rows: list[tuple[str, str, int, int, float]], idle: int) -> str:
    lines = [
        f"Peaks of loading SmolLM2-135M-Instruct, less the {idle >> 20} MiB of the libraries and its tokenizer. Written by",
        "`python benchmarks/load_memory.py`.",
        "",
        "| model | computed in | weights, MiB | peak, MiB | peak / weights |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {n.strip()} | {d} | {s / 2**20:.0f} | {t / 2**20:.0f} | {r:.2f} |" for n, d, s, t, r in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        write(Path(sys.argv[2]))
    else:
        main()
