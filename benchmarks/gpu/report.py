"""Markdown of a result of `gpu_check.py`, and its targets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

BIG, SHORT, LONG = "llama-3.1-8b", 4096, 16384
FASTER = 1.03


def targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows {what, target, measured, met}; measured and met are None without a measurement."""
    found: list[tuple[str, float, float | None]] = []
    for length, least in ((SHORT, 3.7), (LONG, 4.2)):
        blend = _row(result, "times", length, "blend 0.15")
        found.append((f"blend at ratio 0.15 over full prefill, N={length}", least, blend and blend.get("speedup")))
    for length in (SHORT, LONG):
        full, theirs = (_row(result, "times", length, case) for case in ("full", "transformers"))
        ratio = theirs["seconds"] / full["seconds"] if full and theirs else None
        found.append((f"transformers' SDPA prefill's time over ours, N={length}", 0.95, ratio))
    full = _row(result, "times", LONG, "full")
    matmul = (result.get("ceilings") or {}).get("matmul_tflop_s")
    share = full["tflop_s"] / matmul if full and matmul and "tflop_s" in full else None
    found.append((f"full prefill, share of the matrix product's ceiling, N={LONG}", 0.55, share))
    scattered = _kernels(result, "prefill_attention", f"{BIG} N={LONG} scattered 15%")
    found.append(
        (f"scattered-row attention, TFLOP/s, N={LONG}", 400, max((k["tflop_s"] for k in scattered), default=None))
    )
    decode = [
        k for k in _kernels(result, "decode_attention", f"{BIG} batch 1, context {LONG}") if "float8" not in k["case"]
    ]
    found.append(
        (
            f"decode attention, share of the copy's ceiling, context {LONG}",
            0.8,
            max((k["share"] for k in decode), default=None),
        )
    )
    steps = _row(result, "decode", SHORT, "graphs")
    found.append(
        (f"decoding, share of the weight-reading bound, context {SHORT}", 0.75, steps and steps["weight_bound_share"])
    )
    load = _row(result, "load", LONG, None)
    found.append(("store to pool, verified, GB/s", 25, load and load["gb_s"]))
    return [
        {"what": what, "target": least, "measured": got, "met": None if got is None else got >= least}
        for what, least, got in found
    ]


def dense_route(result: dict[str, Any]) -> tuple[str, int, float] | None:
    """Return (SDPA's kernel, least rows, speed-up over our best tile there) where the sweep supports a route to SDPA:
    from that length on it is at least FASTER times as fast. None if it is not, or was not measured."""
    times: dict[int, dict[str, float]] = {}
    for row in result["sweep"]:
        if (found := re.fullmatch(r"N=(\d+) full, \d+ rows, (?:SDPA by (\w+)|\d+ x \d+, 1 splits)", row["case"])) and (
            "seconds" in row
        ):
            of_length = times.setdefault(int(found[1]), {})
            kernel = found[2] or "ours"
            of_length[kernel] = min(row["seconds"], of_length.get(kernel, math.inf))
    route = None
    for length in sorted(times, reverse=True):
        ours = times[length].pop("ours", 0.0)
        kernel = min(times[length], key=times[length].__getitem__, default="") if route is None else route[0]
        faster = ours / times[length].get(kernel, math.inf)
        if faster < FASTER:
            break
        route = (kernel, length, faster)
    return route


def _dense(result: dict[str, Any]) -> str:
    route = dense_route(result)
    if route is None:
        return "\nDense full prefill: our kernel; no SDPA was measured to be faster."
    kernel, rows, faster = route
    return (
        f"\nDense full prefill, heads of 128: SDPA by {kernel} pays from {rows} rows on; there it is "
        f"{faster:.2f} x as fast as our best tile, and at every longer length that was measured it was faster, too."
    )


def markdown(result: dict[str, Any]) -> str:
    return "\n".join(_lines(result)) + "\n"


def _lines(result: dict[str, Any]) -> Iterator[str]:
    h, versions = result["hardware"], result["versions"]
    yield f"{h['device']}; {h['cpu']}, {h['cores']} cores, {h['memory_gib']} GiB; " + ", ".join(
        f"{name} {version}" for name, version in versions.items()
    )
    yield f"{'Tiny shapes. ' if result['tiny'] else ''}The run took {result['seconds']:.0f} s."
    for title, part in (("Left out", "skipped"), ("Failed", "faults")):
        if result[part]:
            yield f"\n{title}:\n"
            yield from (f"- {_cell(line)}" for line in result[part])
    if not result["tiny"]:
        yield "\n## Targets (8B shape)\n"
        yield from _table(
            ("", "at least", "measured", "met"),
            ((t["what"], f"{t['target']:g}", _number(t["measured"]), _yes(t["met"])) for t in targets(result)),
        )
    checks = result["checks"]
    bad = [row for row in checks if not row["ok"]]
    yield f"\n## Kernels against fp64\n\n{len(checks) - len(bad)} of {len(checks)} cases are within tolerance.\n"
    if checks:
        yield from _table(("kernel", "backend", "dtype", "cases", "largest error", "tolerance"), _summary(checks))
    for row in bad:
        yield f"- {row['kernel']} {row['case']} {row['dtype']} {row['backend']}: {_cell(row.get('message') or _number(row['error']))}"
    if result["sanitizer"]:
        yield "\n## compute-sanitizer\n"
        rows = ((s["tool"], s["cases"], _yes(s["ok"]), "; ".join(s["told"])) for s in result["sanitizer"])
        yield from _table(("tool", "cases", "clean", "its last words"), rows)
    if result["ceilings"]:
        yield "\n## Ceilings\n"
        assumed = result["assumed"]
        yield from _table(
            ("", "", ""),
            ((k, f"{v:.4g}", "not measured: an H200's" * (k in assumed)) for k, v in result["ceilings"].items()),
        )
    for model in result["end_to_end"]:
        yield from _model(model)
    for title, part in (("Kernels beside their ceilings", "kernels"), ("Tiles and splits", "sweep")):
        if result[part]:
            yield f"\n## {title}\n"
            speeds = (
                (k["kernel"], k["case"], f"{k['seconds'] * 1e6:.1f}", _speed(k), f"{k['share']:.0%}")
                for k in result[part]
            )
            yield from _table(("kernel", "case", "us", "speed", "of the ceiling"), speeds)
    if result["sweep"] and not result["tiny"]:
        yield _dense(result)


def _model(model: dict[str, Any]) -> Iterator[str]:
    filled = model["precompute"]
    yield (
        f"\n## {model['model']}, {model['dtype']}, {model['backend']} backend, random weights\n\n"
        f"Precompute: {filled['tokens']} tokens in {filled['seconds']:.1f} s. Warm-up and sizing of the pool: "
        f"{model['warm_up_s']:.1f} s.\n"
    )
    yield from _table(
        ("N", "first token", "ms", "floor, ms", "floor's share", "over full", "its ceiling", "load, GB/s", "stall, ms"),
        (
            (
                r["length"],
                r["case"],
                _number(r["seconds"] * 1e3),
                _number(r.get("floor_s"), 1e3),
                _share(r.get("share")),
                _number(r.get("speedup"), unit=" x"),
                _number(r.get("speedup_ceiling"), unit=" x"),
                _number(r.get("load_gb_s")),
                _number(r.get("stall_s"), 1e3),
            )
            for r in model["times"]
        ),
    )
    if model["profiles"]:
        yield ""
        yield from _table(
            ("N", "one run under the profiler", "kernels", "copies", "GPU busy, ms", "wall, ms"),
            (
                (p["length"], p["case"], p["kernels"], p["copies"], _number(p["busy_ms"]), _number(p["wall_ms"]))
                for p in model["profiles"]
            ),
        )
    yield ""
    yield from _table(
        ("N", "store to pool, MB", "ms", "GB/s", "of host to device"),
        (
            (r["length"], _number(r["bytes"] / 1e6), _number(r["seconds"], 1e3), _number(r["gb_s"]), _share(r["share"]))
            for r in model["load"]
        ),
    )
    yield ""
    yield from _table(
        ("context", "decoding", "tokens/s", "of the bound (weights and KV read once)", "of reading the weights"),
        (
            (r["length"], r["case"], _number(r["tokens_per_s"]), _share(r["share"]), _share(r["weight_bound_share"]))
            for r in model["decode"]
        ),
    )
    yield ""
    yield from _table(
        ("N", "whole path", "error", "tolerance", "ok"),
        ((r["length"], r["case"], _error(r["error"]), f"{r['tolerance']:.0e}", _yes(r["ok"])) for r in model["checks"]),
    )


def _summary(checks: list[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in checks:
        groups.setdefault((row["kernel"], row["backend"], row["dtype"]), []).append(row)
    for key, rows in groups.items():
        errors = [row["error"] for row in rows if row["error"] is not None]
        worst = f"{max(errors):.1e}" if errors else ""
        yield (*key, len(rows), worst, f"{max(row['tolerance'] for row in rows):.0e}")


def _row(result: dict[str, Any], part: str, length: int, case: str | None) -> dict[str, Any] | None:
    rows = (r for m in result["end_to_end"] if m["model"] == BIG for r in m[part])
    return next((r for r in rows if r["length"] == length and r.get("case") == case), None)


def _kernels(result: dict[str, Any], kernel: str, case: str) -> list[dict[str, Any]]:
    """Return the rows of a kernel's case, of every backend."""
    return [k for k in result["kernels"] if k["kernel"] == kernel and k["case"].startswith(case + ",")]


def _table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(_cell(str(cell)) for cell in row)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _speed(row: dict[str, Any]) -> str:
    return f"{row['tflop_s']:.1f} TFLOP/s" if "tflop_s" in row else f"{row['gb_s']:.0f} GB/s"


def _number(value: float | None, factor: float = 1.0, unit: str = "") -> str:
    return (
        ""
        if value is None
        else f"{value * factor:.3g}{unit}"
        if abs(value * factor) < 1000
        else f"{value * factor:.0f}{unit}"
    )


def _error(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.1e}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _yes(value: bool | None) -> str:
    return "not measured" if value is None else "yes" if value else "no"
