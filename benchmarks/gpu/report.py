"""Markdown of a result of `gpu_check.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from gpu.plan import PLAN, part_of

BIG, SHORT = part_of("llama-3.1-8b").name, 4096
Row = dict[str, Any]
COLUMNS = {
    "times": "length case seconds expected_s floor_s share speedup speedup_ceiling load_gb_s stall_s first_run_s",
    "load": "length case bytes seconds gb_s share tokens_per_s codec",
    "decode": "length case first_token_s tokens_per_s step_s floor_s share",
    "profiles": "length case kernels copies busy_ms wall_ms busy_share",
    "kernels": "kernel case seconds tflop_s gb_s share",
    "commands": "case seconds ok told",
    "slow": "what seconds",
}
"""What is shown of each part's rows."""


def targets(result: Row) -> list[Row]:
    """Return rows {what, target, measured, met}; measured and met are None without a measurement."""
    full, theirs, query, hkvd = (_time(result, case) for case in ("full", "transformers", "query 0.15", "hkvd 0.15"))
    steps = next((r for r in result["decode"] if (r["step"], r["case"]) == (BIG, "batch 1")), None)
    found = [
        ("the default at .15 over full prefill", 3.0, query and query.get("speedup")),
        ("hkvd at .15 over full prefill", 3.0, hkvd and hkvd.get("speedup")),
        (
            "transformers' time over full prefill's",
            0.95,
            theirs["seconds"] / full["seconds"] if full and theirs else None,
        ),
        ("decoding at batch 1, share of reading weights and KV once", 0.75, steps and steps["share"]),
    ]
    return [
        {"what": what, "target": least, "measured": got, "met": None if got is None else got >= least}
        for what, least, got in found
    ]


def markdown(result: Row) -> str:
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Row) -> Iterator[str]:
    yield from (f"- {on}" for on in result["on"])
    for row in result["environment"]:
        yield f"- {row['cpu']}, {row['cores']} cores, {row['memory_gib']} GiB; {row['minutes']:g} minutes"
    if result["tiny"]:
        yield "- tiny shapes"
    if result["compiled"]:
        names = sorted({row["kernel"].removesuffix("_kernel") for row in result["compiled"]})
        yield f"- {len(result['compiled'])} kernels were compiled there: {', '.join(names)}"
    for title, part in (("Failed", "faults"), ("Left out", "skipped")):
        if result[part]:
            yield f"\n{title}:\n"
            yield from (f"- {_cell(line)}" for line in result[part])
    if not result["tiny"]:
        yield f"\n## Targets ({BIG}, N={SHORT})\n"
        yield from _table(
            ("", "at least", "measured", "met"),
            ([_shown(t[key]) for key in ("what", "target", "measured", "met")] for t in targets(result)),
        )
    yield "\n## Ceilings\n"
    ceilings, assumed = result["ceilings"], result["assumed"]
    yield from _table(("", ""), ((k, f"{v:.4g}{', assumed' * (k in assumed)}") for k, v in ceilings.items()))
    yield from _checks(result["checks"])
    for step in (part.name for part in PLAN):
        for part, columns in COLUMNS.items():
            rows = [row for row in result[part] if row["step"] == step]
            keys = [key for key in columns.split() if any(key in row for row in rows)]
            if rows:
                yield f"\n## {step}: {part}\n"
                yield from _table(keys, ([_shown(row.get(key)) for key in keys] for row in rows))


def _checks(checks: list[Row]) -> Iterator[str]:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in checks:
        groups.setdefault((row["kernel"], row["backend"], row["dtype"]), []).append(row)
    bad = [row for row in checks if not row["ok"]]
    yield f"\n## Numbers\n\n{len(checks) - len(bad)} of {len(checks)} are within tolerance.\n"
    yield from _table(
        ("kernel", "backend", "dtype", "cases", "largest error", "tolerance"),
        (
            (*key, len(rows), _error(max((r["error"] for r in rows if r["error"] is not None), default=None)),
             f"{max(r['tolerance'] for r in rows):.0e}")
            for key, rows in groups.items()
        ),
    )  # fmt: skip
    yield ""
    for row in bad:
        why = row.get("message") or f"{_error(row['error'])} > {row['tolerance']:.0e}"
        yield f"- {row['kernel']} {row['case']} {row['dtype']} {row['backend']}: {_cell(why)}"


def _time(result: Row, case: str) -> Row | None:
    wanted = BIG, SHORT, case
    return next((r for r in result["times"] if (r["step"], r["length"], r["case"]) == wanted), None)


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    head = list(head)
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(_cell(str(cell)) for cell in row)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _shown(value: Any) -> str:
    """Return three digits of a number."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return {None: "", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else str(value)


def _error(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.1e}"
