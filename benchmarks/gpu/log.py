"""Log of a run of `gpu_check.py` as JSON lines, and the result assembled from it.

A line is {step, case, process, event}. Events: "ready"; "start"; "row", with `part` and `row`; "slow", with the `limit`
of a slow start; "done"; "fault" and "skipped", with `message`. A case ends with "done", "fault" or "skipped". Several
processes append to one file: a line is one write.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OVER = ("done", "fault", "skipped")
ASSUMED = {"device_copy_gb_s": 3000.0, "matmul_tflop_s": 790.0, "host_to_device_gb_s": 55.0}
"""An H100's ceilings, used where one could not be measured."""
PARTS = ("environment", "times", "profiles", "stamps", "load", "decode", "checks", "kernels", "commands")

Line = dict[str, Any]
Row = dict[str, Any]


class Log:
    """Append-only log of events. process: number of the writing process among those of its step."""

    def __init__(self, path: Path, process: int = 0) -> None:
        self.path, self.process = path, process
        self._read = 0

    def write(self, step: str, case: str, event: str, *, process: int | None = None, **more: Any) -> None:
        process = self.process if process is None else process
        line = {"step": step, "case": case, "process": process, "event": event, **more}
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, (json.dumps(plain(line)) + "\n").encode())
        finally:
            os.close(descriptor)

    def lines(self) -> list[Line]:
        """Return the complete lines."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def new(self) -> list[Line]:
        """Return the complete lines since the last call."""
        lines = self.lines()
        found, self._read = lines[self._read :], len(lines)
        return found

    def over(self, step: str, process: int | None = None) -> set[str]:
        """Return the names of the cases that a step, or one of its processes, has ended; not its preparation, which has
        no name and runs in every process."""
        ends = [n for n in self.lines() if n["step"] == step and n["event"] in OVER and n["case"]]
        return {n["case"] for n in ends if process in (None, n["process"])}

    def started(self, step: str, process: int) -> list[str]:
        """Return the cases of a process that started and did not end."""
        over = self.over(step)
        starts = (n for n in self.lines() if n["event"] == "start" and (n["step"], n["process"]) == (step, process))
        return list(dict.fromkeys(n["case"] for n in starts if n["case"] not in over))

    def ceilings(self) -> Row:
        measured = {k: v for _, part, row in rows_of(self.lines()) if part == "ceilings" for k, v in row.items()}
        return ASSUMED | measured


def is_wrong(row: Row) -> bool:
    """Return whether a row has a wrong number or an exception."""
    return not row.get("ok", True) or "message" in row


def rows_of(lines: Iterable[Line]) -> list[tuple[str, str, Row]]:
    """Return (step, part, row) in order."""
    return [(line["step"], line["part"], line["row"]) for line in lines if line["event"] == "row"]


def assemble(lines: list[Line], on: str, tiny: bool, earlier: Row | None = None) -> Row:
    """Return the result that `report.py` prints: the rows of each part, failures, and what was left out. earlier: a
    result whose other steps are kept."""
    result: Row = {"on": on, "tiny": tiny, "ceilings": {}, "compiled": {}} | {part: [] for part in PARTS}
    compiled = Counter[str]()
    for step, part, row in rows_of(lines):
        if part == "compiled":
            compiled[row["kernel"].removesuffix("_kernel")] += 1
        elif part == "ceilings":
            result["ceilings"] |= row
        else:
            result[part].append({"step": step, **row})
    result["compiled"] = dict(compiled)
    ends = [n for n in lines if n["event"] in ("fault", "skipped")]
    result["faults"] = [_named(n["step"], n["case"], n["message"]) for n in ends if n["event"] == "fault"]
    left_out: dict[tuple[str, str], list[str]] = {}
    for n in (n for n in ends if n["event"] == "skipped"):
        left_out.setdefault((n["step"], n["message"]), []).append(n["case"])
    result["skipped"] = [
        _named(step, f"{cases[0]}{f' and {len(cases) - 1} more' * (len(cases) > 1)}", message)
        for (step, message), cases in left_out.items()
    ]
    result["faults"] += [f"{k['kernel']} {k['case']}: {k['message']}" for k in result["kernels"] if "message" in k]
    result["kernels"] = [k for k in result["kernels"] if "message" not in k]
    result["checks"] = summed_checks(result["checks"])
    if earlier:
        steps = {line["step"] for line in lines if line["event"] == "ready"}
        for part in PARTS:
            result[part] = [row for row in earlier.get(part, ()) if row["step"] not in steps] + result[part]
        for part in ("faults", "skipped"):
            result[part] = [line for line in earlier[part] if not line.startswith(tuple(steps))] + result[part]
    result["times"] = with_speedups(result["times"])
    result["assumed"] = [name for name in ASSUMED if name not in result["ceilings"]]
    result["ceilings"] = ASSUMED | result["ceilings"]
    return plain(result)  # type: ignore[no-any-return]


def _named(step: str, case: str, message: str) -> str:
    return f"{', '.join(filter(None, (step, case)))}: {message}"


def summed_checks(rows: list[Row]) -> list[Row]:
    """Return a row per step, kernel, backend and dtype: number of cases, the largest error, the largest tolerance, and
    the cases that are wrong."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["step"], row["kernel"], row["backend"], row["dtype"]), []).append(row)
    return [
        dict(zip(("step", "kernel", "backend", "dtype"), key, strict=True))
        | {
            "cases": len(own),
            "error": max((r["error"] for r in own if r["error"] is not None), default=None),
            "tolerance": max(r["tolerance"] for r in own),
            "wrong": [{k: r.get(k) for k in ("case", "error", "tolerance", "message")} for r in own if is_wrong(r)],
        }
        for key, own in groups.items()
    ]


def with_speedups(times: list[Row]) -> list[Row]:
    """Return the times with the speed-up over the full prefill of the same model and length."""
    full = {(row["step"], row["length"]): row["seconds"] for row in times if row["case"] == "full"}
    own = [full.get((row["step"], row["length"])) if row["case"] != "full" else None for row in times]
    return [row | ({"speedup": f / row["seconds"]} if f else {}) for row, f in zip(times, own, strict=True)]


def plain(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null, and round to eight digits."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return (float(f"{value:.8g}") if math.isfinite(value) else None) if isinstance(value, float) else value
