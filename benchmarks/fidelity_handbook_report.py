"""The tables and plots of docs/fidelity_handbook.md. The prose is the page's own: only what stands between markers is replaced."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from contexts import cell
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from cacheblend_cli.evaluation.plot import COLOURS, MARKERS, label_lines

HEAD = (
    "| setting | ratio | budget | exact | F1 | NormF1 (95 %) | top-1 | KL | K error |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
LEVELS = ("full prefill", "noise floor", "reuse")
ORDER = ("random", "first", "hkvd", "query", "draft")  # a colour each in every panel; the last is for one more
SAME = ("model", "questions", "hardware")


def mismatch(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What keeps the groups of two results off one page, which names one model, number of questions and machine."""
    return [name for name in SAME if old[name] != new[name]]


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The old result with the new one's groups in the place of its own. Raises ValueError where they do not match."""
    if different := mismatch(old, new):
        raise ValueError(f"different {', '.join(different)}")
    groups = old["groups"] | new["groups"]
    rows = {row["label"]: row for row in (*old["settings"], *new["settings"])}
    shown = {*LEVELS, *(label for labels in groups.values() for label in labels)}
    return {**new, "groups": groups, "settings": [row for label, row in rows.items() if label in shown]}


def write_report(result: dict[str, Any], page: Path) -> None:
    """Fill the page's `<!-- NAME -->` ... `<!-- end -->` blocks and draw its plot beside it. A page that is not there is
    made of the blocks alone."""
    rows = {row["label"]: row for row in result["settings"]}
    blocks = {"setup": _setup(result), "levels": _table(rows, [n for n in LEVELS if n in rows])}
    for name, labels in result["groups"].items():
        blocks[name] = _table(rows, labels)
    blocks["layers"] = _layers(rows)
    empty = "\n\n".join(f"<!-- {name} -->\n<!-- end -->" for name in blocks) + "\n"
    text = page.read_text(encoding="utf-8") if page.exists() else empty
    for name, block in blocks.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda m, block=block: f"{m[1]}\n{block}\n\n{m[2]}", text, flags=re.DOTALL)
    page.write_text(text, encoding="utf-8")
    _plot(result, rows, page.with_suffix(".svg"))


def _setup(result: dict[str, Any]) -> str:
    h = result["hardware"]
    return (
        f"{result['questions']} questions, model `{result['model']}`, fp32, greedy; {h['cpu']}, {h['cores']} cores "
        f"({h['threads']} thread(s) used), torch {h['torch']}."
    )


def _table(rows: dict[str, dict[str, Any]], labels: list[str]) -> str:
    return "\n".join([HEAD, *(_row(rows[label]) for label in labels)])


def _row(row: dict[str, Any]) -> str:
    full = row["setting"]["mode"] == "full"
    cells = [
        row["label"],
        "" if full else f"{row['ratio']:g}",
        "" if full else f"{row['budget']:.1%}",
        cell(row["exact_match"], "{value:.1%}"),
        cell(row["f1"], "{value:.3f}"),
        cell(row["norm_f1"], "{value:.3f} ({low:.3f} to {high:.3f})"),
        cell(row["top1"], "{value:.1%}"),
        cell(row["kl"], "{value:.2g}"),
        f"{sum(row['k_error'][1:]) / (len(row['k_error']) - 1):.3f}" if row["k_error"] else "",
    ]
    return "| " + " | ".join(cells) + " |"


def _layers(rows: dict[str, dict[str, Any]]) -> str:
    """Error of K, V and attention output a layer, of a few settings."""
    shown = ["reuse", "hkvd 0.15", "draft 0.15", "random, shifted 0.15", "reuse, document", "query, document 0.05"]
    lines = ["| setting | of | layers 0, 1, ... |", "|---|---|---|"]
    for label in (s for s in shown if s in rows):
        for name, key in (("K", "k_error"), ("V", "v_error"), ("attention output", "attention_error")):
            lines.append(f"| {label} | {name} | {', '.join(f'{e:.3f}' for e in rows[label][key])} |")
    return "\n".join(lines)


def _plot(result: dict[str, Any], rows: dict[str, dict[str, Any]], path: Path) -> None:
    """NormF1 over the budget, a line a selector: chunks collected alone, the same with the mean shift, behind their page."""
    figure = Figure(figsize=(13, 4.4), layout=ConstrainedLayoutEngine(w_pad=0.15))
    labels = result["groups"]
    panels = (
        ("chunks collected alone", labels.get("selectors", []), ""),
        ("collected alone, with the mean shift", labels.get("corrections", []), ", shifted"),
        ("collected behind their page", labels.get("contexts", []), ", document"),
    )
    for axes, (title, named, suffix) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        found = _lines(axes, rows, named, suffix)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("budget: share of the work", fontsize=9)
        axes.axhline(1, color="#333333", linestyle="--", linewidth=1)
        axes.axhline(0, color="#d55e00", linestyle=":", linewidth=1)
        axes.grid(alpha=0.25)
        axes.set_xlim(left=0)
        axes.set_ylim(-0.05, 1.08)
        label_lines(axes, found)
        if not suffix:
            axes.set_ylabel("NormF1 (0: plain reuse, 1: full prefill)")
    figure.suptitle(f"{result['model']}, {result['questions']} questions", fontsize=10)
    figure.savefig(path, metadata={"Date": None})


def _lines(
    axes: Any, rows: dict[str, dict[str, Any]], labels: Iterable[str], suffix: str
) -> list[tuple[str, str, float]]:
    """Draw the settings whose names end so, each a line over its ratios; their names, colours and last values."""
    families: dict[str, list[dict[str, Any]]] = {}
    for label in labels:
        name = label.rpartition(" ")[0] if label[-1].isdigit() else label
        if name.endswith(suffix) and "," not in name.removesuffix(suffix) and rows[label]["norm_f1"]:
            families.setdefault(name.removesuffix(suffix), []).append(rows[label])
    found = []
    for name, points in families.items():
        place = ORDER.index(name) if name in ORDER else len(ORDER)
        colour, marker = COLOURS[place], MARKERS[place]
        points = sorted(points, key=lambda p: p["budget"])
        values = [p["norm_f1"]["value"] for p in points]
        spread = [[max(0.0, v - p["norm_f1"]["low"]) for v, p in zip(values, points, strict=True)],
                  [max(0.0, p["norm_f1"]["high"] - v) for v, p in zip(values, points, strict=True)]]  # fmt: skip
        axes.errorbar([p["budget"] for p in points], values, yerr=spread, marker=marker, markersize=4, color=colour,
                      capsize=2, linewidth=1.3)  # fmt: skip
        found.append((name, colour, values[-1]))
    return found
