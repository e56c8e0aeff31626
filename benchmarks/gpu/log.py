"""Log of a run of `gpu_check.py` as JSON lines, and the result assembled from it.

A line is {step, case, process, event, on}. Events: "ready"; "start"; "row", with `part` and `row`; "slow", with the
`limit` of a slow start; "done"; "fault" and "skipped", with `message`; "end" if one of `processes` processes has
reached the end of its cases; "again" for a case to repeat. `on` names the device and the versions. A case ends with
"done", "fault" or "skipped"; a resumed run ignores the rows of others. Several processes append to one file: a line is
one write.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OVER = ("done", "fault", "skipped")
ASSUMED = {"device_copy_gb_s": 3000.0, "matmul_tflop_s": 790.0, "host_to_device_gb_s": 55.0}
"""An H100's ceilings, used where one could not be measured."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Where:
    """What rows depend on. Rows of one file have the same device and versions; `code` may change between calls."""

    device: str
    versions: str
    code: str

    def __str__(self) -> str:
        return f"{self.device}; {self.versions}; code {self.code}"

    def has(self, on: str) -> bool:
        """Return whether rows with that tag may stand beside this run's."""
        return on.startswith(f"{self.device}; {self.versions}; ")


class Log:
    """Append-only log of events, tagged with `on`. process: number of the writing process among those of its step."""

    def __init__(self, path: Path, on: str, process: int = 0) -> None:
        self.path, self.on, self.process = path, on, process
        self._read = 0

    def write(self, step: str, case: str, event: str, *, process: int | None = None, **more: Any) -> None:
        process = self.process if process is None else process
        line = {"step": step, "case": case, "process": process, "event": event, **more, "on": self.on}
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, (json.dumps(plain(line)) + "\n").encode())
        finally:
            os.close(descriptor)

    def lines(self) -> list[Line]:
        """Return the complete lines."""
        return read_lines(self.path)

    def new(self) -> list[Line]:
        """Return the complete lines since the last call."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self._read)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        return [json.loads(line) for line in text.splitlines()]

    def over(self, step: str, process: int | None = None) -> set[str]:
        """Return the names of the cases that a step, or one of its processes, has ended; not its preparation, which has
        no name and runs in every process."""
        ends = [n for n in self.lines() if n["step"] == step and n["event"] in OVER and n["case"]]
        return {n["case"] for n in ends if process in (None, n["process"])}

    def again(self, step: str) -> set[str]:
        """Return the cases to which a repetition is limited; empty if it is not."""
        found = {n["case"] for n in self.lines() if n["step"] == step and n["event"] == "again"}
        return set() if "" in found else found

    def started(self, step: str, process: int) -> list[str]:
        """Return the cases of a process that started and did not end."""
        over = self.over(step)
        starts = (n for n in self.lines() if n["event"] == "start" and (n["step"], n["process"]) == (step, process))
        return list(dict.fromkeys(n["case"] for n in starts if n["case"] not in over))

    def resume(self, source: Path, again: bool = False) -> None:
        """Begin with the cases of an earlier log that are done or failed. again: name failed cases and wrong numbers as
        those to repeat, and nothing else."""
        lines = read_lines(source)
        ended = {(n["step"], n["case"]) for n in lines if n["event"] in ("done", "fault") and n["case"]}
        ended |= {(n["step"], n["case"]) for n in lines if n["event"] == "end"}
        bad = failed(lines) if again else []
        whole = {step for step, case in bad if not case}
        kept = [n for n in lines if (n["step"], n["case"]) in ended and n["event"] not in ("skipped", "again")]
        kept = [
            n for n in kept if (n["step"], n["case"]) not in bad and not (n["event"] == "end" and n["step"] in whole)
        ]
        kept += [{"step": s, "case": c, "process": 0, "event": "again", "on": self.on} for s, c in bad]
        target = self.path.with_name(self.path.name + ".new")
        target.write_text("".join(json.dumps(n) + "\n" for n in kept), encoding="utf-8")
        target.replace(self.path)


def read_lines(path: Path) -> list[Line]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def failed(lines: list[Line]) -> list[tuple[str, str]]:
    """Return (step, case) of cases that failed or have a wrong number; case "" for a step's preparation."""
    bad = [n for n in lines if n["event"] == "fault" or (n["event"] == "row" and is_wrong(n["row"]))]
    return list(dict.fromkeys((n["step"], n["case"]) for n in bad))


def is_wrong(row: dict[str, Any]) -> bool:
    """Return whether a row has a wrong number or an exception."""
    return not row.get("ok", True) or "message" in row


def has_work(lines: list[Line], step: str, again: bool) -> bool:
    """Return whether a step has cases to run: not after it has reached its end, and in a repetition only if it has
    failed cases."""
    own = [n for n in lines if n["step"] == step]
    if any(n["event"] == "again" for n in own):
        return True
    ends = {(n["process"], n["processes"]) for n in own if n["event"] == "end"}
    complete = any(all((number, count) in ends for number in range(count)) for _, count in ends)
    return not again and not complete


def rows_of(lines: Iterable[Line]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (step, part, row) in order, of the last start of each case."""
    cases: dict[tuple[str, str], list[tuple[str, str, dict[str, Any]]]] = {}
    for line in lines:
        key = line["step"], line["case"]
        if line["event"] == "start":
            cases[key] = []
        elif line["event"] == "row":
            cases.setdefault(key, []).append((line["step"], line["part"], line["row"]))
    return [row for rows in cases.values() for row in rows]


def assemble(lines: list[Line], tiny: bool) -> dict[str, Any]:
    """Return the result that `report.py` prints: the rows of each part, failures, and what was left out."""
    result: dict[str, Any] = {"on": sorted({n["on"] for n in lines}), "tiny": tiny, "ceilings": {}}
    parts = ("environment", "times", "profiles", "load", "decode", "checks", "kernels", "commands", "slow", "compiled")
    result |= {part: [] for part in parts}
    for step, part, row in rows_of(lines):
        if part == "ceilings":
            result["ceilings"] |= row
        else:
            result[part].append({"step": step, **row})
    add_speedups(result["times"])
    result["faults"] = [f"{', '.join(filter(None, key))}: {n['message']}" for key, n in _ends(lines, "fault")]
    left_out: dict[tuple[str, str], list[str]] = {}
    for (step, case), line in _ends(lines, "skipped"):
        left_out.setdefault((step, line["message"]), []).append(case or "all of it")
    result["skipped"] = [
        f"{step}, {cases[0]}{f' and {len(cases) - 1} more' * (len(cases) > 1)}: {message}"
        for (step, message), cases in left_out.items()
    ]
    result["faults"] += [f"{k['kernel']} {k['case']}: {k['message']}" for k in result["kernels"] if "message" in k]
    result["kernels"] = [k for k in result["kernels"] if "message" not in k]
    result["assumed"] = [name for name in ASSUMED if name not in result["ceilings"]]
    result["ceilings"] = ASSUMED | result["ceilings"]
    return result


def _ends(lines: list[Line], event: str) -> list[tuple[tuple[str, str], Line]]:
    return [((n["step"], n["case"]), n) for n in lines if n["event"] == event]


def add_speedups(times: list[dict[str, Any]]) -> None:
    """Add the speed-up over the full prefill of the same model and length to each time."""
    full = {(row["step"], row["length"]): row for row in times if row["case"] == "full"}
    for row in times:
        if row["case"] != "full" and (whole := full.get((row["step"], row["length"]))):
            row["speedup"] = whole["seconds"] / row["seconds"]
            if "floor_s" in row:
                row["speedup_ceiling"] = whole["floor_s"] / row["floor_s"]


def plain(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Budget:
    """Seconds from construction on."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()
