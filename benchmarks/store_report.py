"""The store's results as a page."""

from __future__ import annotations

from typing import Any


def table(result: dict[str, Any]) -> str:
    lines = list[str]()
    for part, write in (("load", _load), ("write", _write), ("stall", _stall), ("many", _many), ("codecs", _codecs)):
        if part in result:
            conditions = result[part]["conditions"]
            h, busy = conditions["hardware"], conditions["busy_cores_before"]
            where = f"{h['cpu']}, {h['cores']} cores, {h['memory_gib']} GiB, torch {h['torch']}, {conditions['date']}"
            lines += [*write(result[part]), "", f"{where}. Cores that others kept busy before this part: {busy}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def _load(part: dict[str, Any]) -> list[str]:
    lines = [
        "## Loading",
        "",
        f"{part['tokens']} tokens of Qwen2.5-0.5B's shape in chunks of {part['chunk_tokens']}, out of the page cache with every "
        "digest checked, into an fp32 pool that was used before: dequantised, and K rotated on the way. Best of "
        f"{part['rounds']} rounds.",
        "",
        "| KV dtype | bytes a token | bits a value | load, ms | GB/s |",
        "|---|---|---|---|---|",
    ]
    for row in part["codecs"]:
        lines.append(
            f"| {row['codec']} | {row['bytes_per_token']:,.0f} | {row['bits_per_value']:.2f} | {row['load_ms']:.1f} | "
            f"{row['load_gb_per_s']:.2f} |"
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


def _codecs(part: dict[str, Any]) -> list[str]:
    lines = [
        "## What codecs keep",
        "",
        f"Errors: relative RMSE after the round trip, the demo model's KV of its handbook ({part['handbook_chunks']} chunks). "
        f"Answers: exact matches on {part['questions']} held-out questions of the demo, 95 % intervals.",
        "",
        "| KV dtype | K error | V error | full prefill | reuse | blend .15 |",
        "|---|---|---|---|---|---|",
    ]
    for row in part["rows"]:
        answers = " | ".join(
            f"{a['accuracy']:.0%} ({a['low']:.0%} to {a['high']:.0%})" for a in row["answers"].values()
        )
        lines.append(f"| {row['codec']} | {row['k_error']:.2g} | {row['v_error']:.2g} | {answers} |")
    return lines
