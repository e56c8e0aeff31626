"""Speed of the store: loading by codec, commits, what a blend waits for its KV, and look-ups among many chunks.

    python benchmarks/store.py [--only load,write,stall,many] [--rounds 9] [--out benchmarks/results/store.json]

Writes are compared with a plain file of the same bytes, in alternating order; results are the best of the rounds after
a warm-up, and medians. The parts:

load    2048 tokens of Qwen2.5-0.5B's shape from the page cache into a bf16 pool, every digest checked, K rotated, from
        every --kv-dtype; the same from the disk; and encoding a chunk
write   groups of chunks as `precompute` commits them, durable on return, against write() and one fsync; and one chunk
        per commit against write() and fsync of each
stall   time that a blend of these tokens waits for its KV, by codec
many    100,000 chunks: opening, look-ups, one page of `chunks ls`, ids by prefix
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import ROOT, Others, hardware
from store_load import measure_load, measure_stall
from store_many import measure_many
from store_write import measure_write

PARTS = ("load", "write", "stall", "many")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure; the others stay as they were")
    parser.add_argument("--rounds", type=int, default=9)
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
        }
        for part in PARTS:
            if part in parts:
                others, start = Others(), time.perf_counter()
                result[part] = measures[part]()
                result[part]["conditions"] = {
                    "date": f"{datetime.now(UTC):%Y-%m-%d}",
                    "seconds": round(time.perf_counter() - start, 1),
                    "others": round(others.used(), 2),
                    "hardware": hardware(),
                }
                print(part, json.dumps(result[part])[:2000], file=sys.stderr, flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    arguments.out.with_suffix(".md").write_text(table(result))
    print(table(result))


def table(result: dict[str, Any]) -> str:
    lines = list[str]()
    for part, write in (("load", _load), ("write", _write), ("stall", _stall), ("many", _many)):
        if part in result:
            conditions = result[part]["conditions"]
            h = conditions["hardware"]
            where = f"{h['cpu']}, {h['cores']} cores, {h['memory_gib']} GiB, torch {h['torch']}, {conditions['date']}"
            others = f" CPUs used by other processes: {conditions['others']}." if "others" in conditions else ""
            lines += [*write(result[part]), "", f"{where}.{others}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _load(part: dict[str, Any]) -> list[str]:
    lines = [
        "## Loading",
        "",
        f"{part['tokens']} tokens of Qwen2.5-0.5B's shape in chunks of {part['chunk_tokens']}, out of the page cache with every "
        "digest checked, into a bf16 pool that was used before: dequantised, and K rotated on the way. CPU: of all threads. cold: after the file's pages were "
        "dropped from the page cache. encode: a chunk of fp32 KV. One thread loads for every two cores. Best of "
        f"{part['rounds']} rounds, each of all codecs.",
        "",
        "| KV dtype | bytes a token | bits a value | load, ms | CPU, ms | GB/s | cold, ms | encode a chunk, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in part["codecs"]:
        lines.append(
            f"| {row['codec']} | {row['bytes_per_token']:,.0f} | {row['bits_per_value']:.2f} | {row['load_ms']:.1f} | {row['cpu_ms']:.1f} | "
            f"{row['load_gb_per_s']:.2f} | {row['cold_ms']:.1f} | {row['encode_ms']:.1f} |"
        )
    return lines


def _write(part: dict[str, Any]) -> list[str]:
    seconds, ratio, size = part["seconds"], part["ratio"], part["bytes"]

    def row(what: str, ours: str, plain: str, value: float) -> str:
        return f"| {what} | {size / seconds[ours] / 1e9:.2f} | {size / seconds[plain] / 1e9:.2f} | {value:.2f} |"

    return [
        "## Writing",
        "",
        f"{part['chunks']} chunks of 512 tokens, {size / 2**20:.0f} MiB, durable on return. The aim: 0.9 or more of a plain "
        f"write and fsync of the same bytes. `precompute` commits groups of up to {part['group_bytes'] >> 20} MiB when "
        "chunks come faster than they are written, else each chunk at once. "
        f"Best of {part['rounds']} rounds; medians are in the JSON.",
        "",
        "| | store, GB/s | file, GB/s | ratio |",
        "|---|---|---|---|",
        row(f"{part['commits']} groups; file with one fsync", "groups", "file", ratio["groups"]),
        row("groups; file with an fsync a group", "groups", "file_groups", ratio["groups_to_fsync_each"]),
        row(
            "groups in pages that removed chunks left; file overwritten", "reused", "file_overwritten", ratio["reused"]
        ),
        row("the same; a new file", "reused", "file_groups", ratio["reused_to_new_file"]),
        row("one chunk a commit; file with an fsync a chunk", "single", "file_single", ratio["single_to_fsync_each"]),
        "",
        f"A commit of one chunk ({part['bytes_of_a_chunk'] / 2**20:.1f} MiB) takes "
        f"{part['chunk_commit_s'] * 1000:.1f} ms.",
    ]


def _stall(part: dict[str, Any]) -> list[str]:
    lines = [
        "## What a blend waits for",
        "",
        f"{part['tokens']} chunk tokens of Qwen2.5-0.5B's shape, ratio {part['ratio']}, fp32. The aim: 1 % or less.",
        "",
        "| KV dtype | prefill, ms | load beside it, ms | waited, ms | share |",
        "|---|---|---|---|---|",
    ]
    for row in part["rows"]:
        lines.append(
            f"| {row['codec']} | {row['prefill_s'] * 1000:.0f} | {row['load_s'] * 1000:.0f} | {row['stall_s'] * 1000:.2f} | "
            f"{row['share']:.2%} |"
        )
    return lines


def _many(part: dict[str, Any]) -> list[str]:
    lines = [
        "## Many chunks",
        "",
        f"{part['chunks']:,} chunks in {part['file_bytes'] / 2**20:.0f} MiB.",
        "",
        "| | ms |",
        "|---|---|",
    ]
    return lines + [f"| {what} | {value:.2f} |" for what, value in part["milliseconds"].items()]


if __name__ == "__main__":
    main()
