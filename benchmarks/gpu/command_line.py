"""The command line with a trained model: `precompute` and `ask` of the handbook model, on the device and on the CPU.

The answers on the device equal the CPU's, and blended answers equal the handbook's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

from gpu.context import Cases, Context, Rows

from cacheblend_cli.demo import CHUNK_TOKENS, handbook_dir, questions

PROGRAM = "import sys; from cacheblend_cli.cli.main import main; sys.exit(main())"
LIMIT_S = 55.0  # below the limit of its slow start
NUM_QUESTIONS = 4


def cases(context: Context) -> Cases:
    yield "precompute and ask", lambda: chain(precompute(context), ask(context))


def precompute(context: Context) -> Rows:
    done, seconds = _commands(context, "precompute", str(handbook_dir()), "--chunk-tokens", str(CHUNK_TOKENS))
    for device, (code, stored, err) in done.items():
        row = {"case": f"precompute on {device}", "seconds": seconds, "told": f"{len(stored)} chunks"}
        yield "commands", {**row, "ok": code == 0 and len(stored) > 0, **({"message": err[-400:]} if code else {})}


def ask(context: Context) -> Rows:
    asked = [q for q in questions() if q.across][:NUM_QUESTIONS]
    file = context.folder / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": q.question}) + "\n" for q in asked), encoding="utf-8")
    blended = "--ratio", "0.15"  # a GPU may compute in full otherwise
    done, seconds = _commands(context, "ask", "--batch", str(file), "--max-tokens", "32", *blended)
    answers = {}
    for device, (code, found, err) in done.items():
        answers[device] = [one["answer"] for one in found]
        blended = sum(chunk["status"] == "blended" for one in found for chunk in one["chunks"])
        right = sum(one["answer"] == q.answer for one, q in zip(found, asked, strict=False))
        told = f"{right} of {len(asked)} answers are the handbook's, {blended} chunks were blended"
        row = {"case": f"ask on {device}", "seconds": seconds, "told": told}
        ok = code == 0 and len(found) == len(asked) and blended > 0
        yield "commands", {**row, "ok": ok, **({"message": err[-400:]} if code else {})}
    first, *others = answers.values()
    for other in others:
        told = f"{sum(a == b for a, b in zip(first, other, strict=False))} of {len(asked)} are equal"
        yield "commands", {"case": "answers on the CPU", "ok": first == other, "told": told}


def _commands(context: Context, *command: str) -> tuple[dict[str, tuple[int, list[Any], str]], float]:
    """Run a command on the device and on the CPU, side by side. Returns exit code, records and stderr of each, and the
    seconds until the last ended."""
    start, done = time.perf_counter(), {}
    with context.slow("command"):
        running = {device: _start(context, device, command) for device in (context.device.type, "cpu")}
        for device, process in running.items():
            try:
                out, err = process.communicate(timeout=max(1.0, LIMIT_S - (time.perf_counter() - start)))
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = "", f"not done after {LIMIT_S:.0f} s"
            records = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            done[device] = process.wait(), records, err
    return done, time.perf_counter() - start


def _start(context: Context, device: str, command: Sequence[str]) -> subprocess.Popen[str]:
    home = context.folder / f"home-{device}"
    home.mkdir(exist_ok=True)
    environment = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "OMP_NUM_THREADS": "2"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    options = ["--model", "handbook", "--store", str(home / "store"), "--device", device, "--json"]
    arguments = [sys.executable, "-c", PROGRAM, *command, *options, *(["--local"] if command[0] == "ask" else [])]
    pipes: dict[str, Any] = {"cwd": home, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(arguments, env=environment, **pipes)
