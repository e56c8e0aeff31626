"""The store's speed, in ratios of one run, and what each codec costs and keeps.

    python benchmarks/store.py [--only load,write,stall,many,codecs] [--rounds 9] [--out benchmarks/results/store.json]

Writes are compared in turn with the plainest thing that moves the same bytes on this machine, under the same conditions
and in an order of its own every round; the best of the rounds after a warm-up, and medians. The parts:

load    2048 tokens of Qwen2.5-0.5B's shape from the page cache into an fp32 pool, every digest checked, K rotated, from
        every --kv-dtype; what counts is `stall`
write   groups of chunks as `precompute` commits them, durable on return, beside write and one fsync; and one chunk a
        commit beside write and fsync of each
stall   what a blend of those tokens waits for its KV, by codec
many    100,000 chunks: opening, look-ups, one page of `chunks ls`, ids by prefix
codecs  for each --kv-dtype: error of K and V and answers of the demo model (no times: it needs no quiet machine)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

from prefill import hardware  # noqa: E402
from store_codecs import measure_codecs  # noqa: E402
from store_load import measure_load, measure_stall  # noqa: E402
from store_many import measure_many  # noqa: E402
from store_report import table  # noqa: E402
from store_write import measure_write  # noqa: E402

PARTS = ("load", "write", "stall", "many", "codecs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure; the others stay as they were")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--questions", type=int, default=60, help="held-out questions of the demo a codec")
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where the stores are made; its disk is what is measured")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/store.json")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if set(parts) - set(PARTS):
        parser.error(f"parts are {', '.join(PARTS)}")
    result: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        measures = {
            "load": lambda: measure_load(folder, arguments.rounds),
            "write": lambda: measure_write(folder, arguments.rounds),
            "stall": lambda: measure_stall(folder, max(3, arguments.rounds // 3)),
            "many": lambda: measure_many(folder, arguments.chunks),
            "codecs": lambda: measure_codecs(folder, arguments.questions),
        }
        for part in PARTS:
            if part in parts:
                busy = other_load()
                start = time.perf_counter()
                result[part] = measures[part]()
                result[part]["conditions"] = {
                    "date": f"{datetime.now(UTC):%Y-%m-%d}",
                    "seconds": round(time.perf_counter() - start, 1),
                    "busy_cores_before": busy,
                    "hardware": hardware(),
                }
                print(part, json.dumps(result[part])[:2000], file=sys.stderr, flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    arguments.out.with_suffix(".md").write_text(table(result))
    print(table(result))


def other_load(seconds: float = 2.0) -> float:
    """Cores that others kept busy while this process slept: near 0 on a quiet machine."""

    def busy() -> int:
        fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        return sum(fields[:3]) + sum(fields[5:8])

    before = busy()
    time.sleep(seconds)
    return round((busy() - before) / os.sysconf("SC_CLK_TCK") / seconds, 2)


if __name__ == "__main__":
    main()
