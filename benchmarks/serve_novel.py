"""`serve.py --novel`: a `cacheblend serve` process under questions over ever new sets of documents, of which no prompt
begins as another one does."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import ROOT, Others, hardware, write_checkpoint

from cacheblend_cli.client import Client

COMMAND = [sys.executable, "-c", "from cacheblend_cli.cli.main import main; main()"]
DOCUMENTS, PER_QUESTION, CHUNK_TOKENS, ANSWER_TOKENS = 40, 6, 256, 8
RESULTS = ROOT / "benchmarks/results/serve_novel.json"
WORDS = (
    "harbor parrot ledger Bergen Mara billing keeps lead river stone winter letter engine garden copper signal".split()
)


def measure_novel(folder: Path, config: Path, count: int, seconds: float) -> dict[str, Any]:
    """Ask up to `count` questions for up to `seconds`. Returns their figures, and what the server said of its
    memory."""
    model = write_checkpoint(folder / "model", config)
    shared = ["--store", str(folder / "store"), "--model", str(model), "--dtype", "bfloat16"]
    environment = os.environ | {"XDG_CONFIG_HOME": str(folder), "CACHEBLEND_SEARCH": "words"}
    documents(folder / "docs")
    precompute = [
        "precompute",
        str(folder / "docs"),
        "--chunk-tokens",
        str(CHUNK_TOKENS),
        "--context",
        "sink",
        "-q",
        "--yes",
    ]
    done = subprocess.run([*COMMAND, *precompute, *shared], check=True, capture_output=True, text=True, env=environment)
    ids = done.stdout.split()[:DOCUMENTS]
    sets, rng = set[tuple[str, ...]](), random.Random(1)
    while len(sets) < count:
        sets.add(tuple(rng.sample(ids, PER_QUESTION)))
    others, rows = Others(), list[dict[str, Any]]()
    with served(shared, folder / "serve.log", environment) as pid:
        client = Client.connect(store=str(folder / "store"), model=str(model), dtype="bfloat16")
        until = time.monotonic() + seconds
        for number, chosen in enumerate(sorted(sets, key=lambda _: rng.random())):
            if time.monotonic() > until:
                break
            answer = client.ask(
                f"what does {rng.choice(WORDS)} say of {number}?", chunks=chosen, max_tokens=ANSWER_TOKENS
            )
            rows.append(
                {
                    "ttft_s": answer.timing.ttft_s,
                    "reused": 1 - answer.recomputed_tokens / sum(chunk.tokens for chunk in answer.chunks),
                    "cached": answer.cached_tokens / answer.prompt_tokens,
                    "resident_mib": resident(pid),
                }
            )
        line = next(x for x in (folder / "serve.log").read_text().splitlines() if "memory:" in x)
    return {
        "documents": DOCUMENTS, "per_question": PER_QUESTION, "chunk_tokens": CHUNK_TOKENS, "questions": len(rows), "said": line,
        "rows": rows, "date": f"{datetime.now(UTC):%Y-%m-%d}", "others": round(others.used(), 2), "hardware": hardware(),
    }  # fmt: skip


def documents(folder: Path) -> None:
    """Write documents of somewhat less than CHUNK_TOKENS tokens: a token of the benchmarks' tokenizer is a word or
    less."""
    folder.mkdir()
    for number in range(DOCUMENTS):
        rng = random.Random(number)
        (folder / f"{number}.md").write_text(f"{number}: " + " ".join(rng.choices(WORDS, k=CHUNK_TOKENS // 3)) + "\n")


@contextmanager
def served(shared: list[str], log: Path, environment: dict[str, str]) -> Iterator[int]:
    """Run a server. Yields its process id once it answers."""
    with log.open("wb") as out:
        server = subprocess.Popen([*COMMAND, "serve", "--port", "0", *shared], stdout=out, stderr=out, env=environment)
    try:
        while "answers at" not in log.read_text():
            if server.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.2)
        yield server.pid
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def resident(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"^VmRSS:\s+(\d+)", text, re.M)[0]) / 1024


def write_novel(result: dict[str, Any], out: Path = RESULTS) -> str:
    """Write the result, and a table of ten parts of the questions. Returns the table."""
    rows, h = result["rows"], result["hardware"]
    step = max(1, math.ceil(len(rows) / 10))
    lines = [
        "# Ever new sets of documents",
        "",
        f"`benchmarks/serve.py --novel`: {result['questions']} questions, one after another, each over {result['per_question']} of {result['documents']} documents "
        f"of at most {result['chunk_tokens']} tokens in an order that none had before. Qwen2.5-0.5B's shape in bfloat16. {h['cpu']}, {h['cores']} cores, torch {h['torch']}, {result['date']}. "
        f"CPUs used by other processes: {result['others']}.",
        "",
        f"At its start the server says: {result['said'].strip()}",
        "",
        "| questions | first token, ms (median) | p95, ms | chunk tokens reused | prompt from the store | resident, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        ttft = sorted(row["ttft_s"] * 1000 for row in part)
        reused, cached = (statistics.median(row[key] for row in part) for key in ("reused", "cached"))
        lines.append(
            f"| {start + 1} to {start + len(part)} | {statistics.median(ttft):.0f} | {ttft[min(len(ttft) - 1, int(0.95 * len(ttft)))]:.0f} | "
            f"{reused:.2f} | {cached:.2f} | {part[-1]['resident_mib']:,.0f} |"
        )
    out.write_text(json.dumps({**result, "rows": [{k: round(v, 4) for k, v in row.items()} for row in rows]}) + "\n")
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return "\n".join(lines)
