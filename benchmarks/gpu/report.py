"""Markdown of a result of `gpu_check.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from gpu.plan import LARGE, PLAN

SHORT = 4096
Row = dict[str, Any]
COLUMNS = {
    "times": "length case seconds p90_s expected_s floor_s share speedup speedup_ceiling load_gb_s stall_s first_run_s",
    "load": "length case bytes seconds gb_s share tokens_per_s codec",
    "decode": "length case first_token_s tokens_per_s step_s floor_s share",
    "profiles": "length case kernels copies busy_ms wall_ms busy_share gaps gap_ms kernel count ms",
    "stamps": "length case host count first_ms ms",
    "kernels": "kernel case seconds tflop_s gb_s share",
    "commands": "case seconds ok told",
}
"""What is shown of each part's rows."""


def targets(result: Row) -> list[tuple[str, float, float | None]]:
    """Return (what, target, measured); measured is None without a measurement."""
    times = {row["case"]: row for row in result["times"] if (row["step"], row["length"]) == (LARGE, SHORT)}
    seconds = {case: row["seconds"] for case, row in times.items()}
    shares = [r["share"] for r in result["decode"] if (r["step"], r["case"]) == (LARGE, "batch 1")]
    both = "full" in seconds and "transformers" in seconds
    return [
        ("the default at .15 over full prefill", 3.0, times.get("query 0.15", {}).get("speedup")),
        ("hkvd at .15 over full prefill", 3.0, times.get("hkvd 0.15", {}).get("speedup")),
        ("transformers' time over full prefill's", 0.95, seconds["transformers"] / seconds["full"] if both else None),
        ("decoding at batch 1, share of reading weights and KV once", 0.75, shares[0] if shares else None),
    ]


def markdown(result: Row) -> str:
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Row) -> Iterator[str]:
    yield f"- {result['on']}"
    for row in result["environment"]:
        yield f"- {row['cpu']}, {row['cores']} cores, {row['memory_gib']} GiB; {row['minutes']:g} minutes"
    if result["tiny"]:
        yield "- tiny shapes"
    if compiled := result["compiled"]:
        yield f"- {sum(compiled.values())} kernels were compiled there: {', '.join(sorted(compiled))}"
    for title, part in (("Failed", "faults"), ("Left out", "skipped")):
        if result[part]:
            yield f"\n{title}:\n"
            yield from (f"- {_cell(line)}" for line in result[part])
    if not result["tiny"]:
        yield f"\n## Targets ({LARGE}, N={SHORT})\n"
        rows = ((what, least, got, None if got is None else got >= least) for what, least, got in targets(result))
        yield from _table(("", "at least", "measured", "met"), rows)
    yield "\n## Ceilings\n"
    ceilings, assumed = result["ceilings"], result["assumed"]
    yield from _table(("", ""), ((k, f"{v:.4g}{', assumed' * (k in assumed)}") for k, v in ceilings.items()))
    yield from _checks(result["checks"])
    for step in (part.name for part in PLAN):
        for part, columns in COLUMNS.items():
            rows = [row for row in result.get(part, ()) if row["step"] == step]
            keys = [key for key in columns.split() if any(key in row for row in rows)]
            if rows:
                yield f"\n## {step}: {part}\n"
                yield from _table(keys, ([row.get(key) for key in keys] for row in rows))


def _checks(checks: list[Row]) -> Iterator[str]:
    wrong = [(row, case) for row in checks for case in row["wrong"]]
    count = sum(row["cases"] for row in checks)
    yield f"\n## Numbers\n\n{count - len(wrong)} of {count} are within tolerance.\n"
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in checks:
        groups.setdefault((row["kernel"], row["backend"], row["dtype"]), []).append(row)
    yield from _table(
        ("kernel", "backend", "dtype", "cases", "largest error", "tolerance"),
        (
            (*key, sum(r["cases"] for r in rows), _error(max((r["error"] for r in rows if r["error"] is not None), default=None)),
             f"{max(r['tolerance'] for r in rows):.0e}")
            for key, rows in groups.items()
        ),
    )  # fmt: skip
    yield ""
    for row, case in wrong:
        why = case["message"] or f"{_error(case['error'])} > {case['tolerance']:.0e}"
        yield f"- {row['kernel']} {case['case']} {row['dtype']} {row['backend']}: {_cell(why)}"


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    head = list(head)
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(_cell(_shown(cell)) for cell in row)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _shown(value: Any) -> str:
    """Return three digits of a number."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return {None: "", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else str(value)


def _error(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.1e}"
