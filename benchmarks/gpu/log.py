"""Log of a run of `gpu_check.py` as JSON lines, the result assembled from it, and the time budget.

A line is {step, case, event}. Events: "start"; "row", with `part` and `row`; "done"; "fault" and "skipped", with
`message`. A case ends with "done", "fault" or "skipped"; `--resume` runs others again and ignores their rows. Several
processes append to one file: a line is one write.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OVER = ("done", "fault", "skipped")
ASSUMED = {"device_copy_gb_s": 4300.0, "matmul_tflop_s": 790.0, "host_to_device_gb_s": 55.0}
"""An H200's ceilings, used where one could not be measured."""


class Log:
    """Append-only log of events."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: str, case: str, event: str, **more: Any) -> None:
        line = json.dumps(plain({"step": step, "case": case, "event": event, **more})) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def lines(self) -> list[dict[str, Any]]:
        """Return the complete lines."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n") and line[0] == "{"]

    def over(self, step: str) -> set[str]:
        """Return the names of a step's ended cases, without its preparation, which has no name and runs in every
        process."""
        return {n["case"] for n in self.lines() if n["step"] == step and n["event"] in OVER and n["case"]}

    def started(self, step: str) -> list[str]:
        """Return the cases of a step that started and did not end."""
        over, starts = self.over(step), (line for line in self.lines() if line["event"] == "start")
        return list(dict.fromkeys(s["case"] for s in starts if s["step"] == step and s["case"] not in over))

    def reopen(self, again: bool = False) -> None:
        """Prepare a resumed run: keep only cases that are done or failed. again: repeat failed cases and wrong numbers,
        too."""
        lines = self.lines()
        events = ("done",) if again else ("done", "fault")
        ended = {(n["step"], n["case"]) for n in lines if n["event"] in events and n["case"]}
        if again:
            ended -= {(n["step"], n["case"]) for n in lines if n["event"] == "row" and is_wrong(n["row"])}
        kept = [json.dumps(n) + "\n" for n in lines if (n["step"], n["case"]) in ended and n["event"] != "skipped"]
        self.path.write_text("".join(kept), encoding="utf-8")


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether a row has a wrong number or an exception."""
    return not row.get("ok", True) or "message" in row


def rows_of(lines: Iterable[dict[str, Any]]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (step, part, row) in order, of the last start of each case."""
    cases: dict[tuple[str, str], list[tuple[str, str, dict[str, Any]]]] = {}
    for line in lines:
        key = line["step"], line["case"]
        if line["event"] == "start":
            cases[key] = []
        elif line["event"] == "row":
            cases.setdefault(key, []).append((line["step"], line["part"], line["row"]))
    return [row for rows in cases.values() for row in rows]


def assemble(lines: list[dict[str, Any]], tiny: bool) -> dict[str, Any]:
    """Return the result that `report.py` prints."""
    rows = rows_of(lines)
    unknown = {"device": "device not known", "cpu": "CPU not known", "cores": "?", "memory_gib": "?"}
    result: dict[str, Any] = {"hardware": unknown, "versions": {}, "tiny": tiny, "skipped": [], "faults": []}
    result |= {"ceilings": {}, "checks": [], "end_to_end": [], "kernels": [], "sweep": [], "sanitizer": []}
    models: dict[str, dict[str, Any]] = {}
    for step, part, row in rows:
        if part == "environment":
            result["hardware"], result["versions"] = row["hardware"], row["versions"]
        elif part == "ceilings":
            result["ceilings"] |= row
        elif part in ("model", "times", "profiles", "load", "decode", "path"):
            model = models.setdefault(step, {"times": [], "profiles": [], "load": [], "decode": [], "checks": []})
            if part == "model":
                model.update(row)
            else:
                model["checks" if part == "path" else part].append(row)
        elif part in ("kernels", "sweep") and "message" in row:
            result["faults"].append(f"{row['kernel']} {row['case']}: {row['message']}")
        else:
            result[part].append(row)
    result["end_to_end"] = [with_speedups(model) for model in models.values() if "model" in model]
    for line in lines:
        if line["event"] in ("fault", "skipped"):
            told = (
                f"{line['step']}, {line['case']}: {line['message']}"
                if line["case"]
                else f"{line['step']}: {line['message']}"
            )
            result["faults" if line["event"] == "fault" else "skipped"].append(told)
    result["assumed"] = [name for name in ASSUMED if name not in result["ceilings"]]
    result["ceilings"] = ASSUMED | result["ceilings"]
    return result


def with_speedups(model: dict[str, Any]) -> dict[str, Any]:
    """Add the speed-up over the full prefill of the same length to each time."""
    full = {row["length"]: row for row in model["times"] if row["case"] == "full"}
    for row in model["times"]:
        if row["case"] != "full" and (whole := full.get(row["length"])):
            row["speedup"] = whole["seconds"] / row["seconds"]
            row["speedup_ceiling"] = whole["floor_s"] / row["floor_s"]
    return model


def plain(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Budget:
    """Seconds from construction on. `skipped`: what was left out."""

    def __init__(self, seconds: float) -> None:
        self._start, self.seconds = time.monotonic(), seconds
        self.skipped: list[str] = []

    @property
    def used(self) -> float:
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        return self.seconds - self.used

    def take_skipped(self) -> list[str]:
        """Return what was left out since the last call."""
        taken, self.skipped = self.skipped, []
        return taken

    def allows(self, seconds: float, what: str) -> bool:
        """Return whether there is time for this many seconds; if not, record it as left out."""
        if seconds <= self.left:
            return True
        self.skipped.append(what)
        print(f"  left out, {max(0.0, self.left):.0f} s are left: {what}", file=sys.stderr, flush=True)
        return False
