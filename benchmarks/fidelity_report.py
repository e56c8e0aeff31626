"""The tables and plots of docs/fidelity.md. The prose is the page's own: only what stands between markers is replaced."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from contexts import cell
from matplotlib.figure import Figure

HEAD = (
    "| setting | ratio | budget | exact | F1 | NormF1 (95 %) | top-1 | KL | K error |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
LEVELS = ("full prefill", "noise floor", "reuse")
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
    """NormF1 over the budget, one line a family of settings; left the selectors, right what corrects or avoids the error."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    labels = result["groups"]
    _lines(left, rows, labels.get("selectors", []))
    _lines(right, rows, labels.get("corrections", []), lambda label: "keys" not in label)
    _lines(right, rows, labels.get("contexts", []), lambda label: "document" in label)
    for axes, title in ((left, "selectors"), (right, "mean shift and document context")):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("budget: fresh token-layers over layers x reusable tokens")
        axes.axhline(1, color="#333333", linestyle="--", linewidth=1)
        axes.axhline(0, color="#b03a2e", linestyle=":", linewidth=1)
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, frameon=False, loc="lower right")
    left.set_ylabel("NormF1 (0: plain reuse, 1: full prefill)")
    figure.suptitle(f"{result['model']}, {result['questions']} questions", fontsize=10)
    figure.savefig(path, metadata={"Date": None})


def _lines(axes: Any, rows: dict[str, dict[str, Any]], labels: list[str], keep: Any = lambda label: True) -> None:
    families: dict[str, list[dict[str, Any]]] = {}
    for label in filter(keep, labels):
        families.setdefault(label.rsplit(" ", 1)[0] if label[-1].isdigit() else label, []).append(rows[label])
    for name, points in families.items():
        points = sorted((p for p in points if p["norm_f1"]), key=lambda p: p["budget"])
        values = [p["norm_f1"]["value"] for p in points]
        style = "--" if "document" in name else "-"
        axes.plot([p["budget"] for p in points], values, linestyle=style, marker="o", markersize=4, label=name)
