"""The tables and the plot of docs/fidelity.md. The prose is the page's own: only what stands between markers is replaced."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from contexts import cell
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from cacheblend_cli.evaluation.plot import COLOURS, MARKERS, label_lines

SHOWN = ("hkvd", "query", "query, shifted", "random:2+draft, shifted", "query, regression")
"""Of the plot, each with a colour; one more may be the best of a panel."""
TITLES = {"musique": "chunks of different documents", "pages": "chunks of one page, in order"}
MAIN_RATIO = 0.15
Row = dict[str, Any]


def write_report(result: dict[str, Any], page: Path) -> None:
    """Fill the page's `<!-- NAME -->` ... `<!-- end -->` blocks and draw its plot beside it. A page that is not there is
    made of the blocks alone."""
    blocks = {"setup": _setup(result)}
    for name, found in result["sets"].items():
        blocks[name] = _about(found) + "\n\n" + _table(found["settings"])
        if len(_ratios(found["settings"])) > 2:
            blocks[f"{name} by ratio"] = _by_ratio(found["settings"])
    empty = "\n\n".join(f"<!-- {name} -->\n<!-- end -->" for name in blocks) + "\n"
    text = page.read_text(encoding="utf-8") if page.exists() else empty
    for name, block in blocks.items():
        pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda m, block=block: f"{m[1]}\n{block}\n\n{m[2]}", text, flags=re.DOTALL)
    page.write_text(text, encoding="utf-8")
    _plot(result, page.with_suffix(".svg"))


def _setup(result: dict[str, Any]) -> str:
    h = result["hardware"]
    return (
        f"Model `{result['model']}`, {result['dtype']}, greedy; {h['cpu']}, {h['cores']} cores ({h['threads']} thread(s) "
        f"used), torch {h['torch']}; the {result['half']} half of each set."
    )


def _about(found: Row) -> str:
    full = found["settings"][0]
    said = [f"{found['questions']} questions."]
    if full["found"]:
        said.append(f"Full prefill's own answers hold the reference in {full['found']['value']:.0%}")
        said[-1] += f"; likelihood of the reference {full['likelihood']['value']:.2f} nats a token."
    if timed := found.get("timed"):
        said.append(
            f"First token of a full prefill, one question: {timed['full_s']:.2f} s, {timed['hardware']['threads']} thread(s)."
        )
    return " ".join(said)


def _first_token(row: Row) -> str:
    """Time to the first token over a full prefill's."""
    share = row.get("first_token")
    return "." if share is None else f"{share:.0%}"


def _median(row: Row) -> str:
    """KL of the question in the middle."""
    return f"{row['kl_median']:.3f}"


def method(row: Row) -> str:
    """The label without its ratio."""
    name, _, last = row["label"].rpartition(" ")
    return name if name and last[0].isdigit() else row["label"]


def _ratios(rows: list[Row]) -> list[float]:
    return sorted({row["ratio"] for row in rows if row["kl"] and row["ratio"]})


def _table(rows: list[Row]) -> str:
    """Every method at .15, or where a set has none of it at each ratio it has; all measures."""
    ratios = [MAIN_RATIO] if MAIN_RATIO in _ratios(rows) and len(_ratios(rows)) > 2 else _ratios(rows)
    lines = [
        "| method | ratio | work | first token | KL (95 %) | median | top-1 | same answer | reference in it | its likelihood |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    full = rows[0]["likelihood"]["value"] if rows[0]["likelihood"] else 0.0
    for row in rows[1:]:
        if not row["kl"] or (row["ratio"] and row["ratio"] not in ratios):
            continue
        likelihood = f"{row['likelihood']['value'] - full:+.3f}" if row["likelihood"] else ""
        cells = [
            method(row), f"{row['ratio']:g}", f"{row['budget']:.1%}", _first_token(row),
            cell(row["kl"], "{value:.3f} ({low:.3f} to {high:.3f})"), _median(row),
            cell(row["top1"], "{value:.1%}"), cell(row["same_answer"], "{value:.0%}"), cell(row["found"], "{value:.0%}"),
            likelihood,
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _by_ratio(rows: list[Row]) -> str:
    """KL's mean and median, top-1, same answer and first token of every method over the ratios."""
    ratios = _ratios(rows)
    lines = ["| method | " + " | ".join(f"{r:g}" for r in ratios) + " |", "|---|" + "---|" * len(ratios)]
    for name in dict.fromkeys(method(row) for row in rows[1:] if row["kl"] and row["ratio"]):
        at = {row["ratio"]: row for row in rows[1:] if method(row) == name}
        cells = [
            f"{r['kl']['value']:.3f} / {_median(r)} · {r['top1']['value']:.1%} · {r['same_answer']['value']:.0%} · {_first_token(r)}"
            if r
            else ""
            for r in (at.get(ratio) for ratio in ratios)
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _plot(result: dict[str, Any], path: Path) -> None:
    """KL over the work, a line a method, a panel for each way chunks belong together."""
    named = [name for name in TITLES if name in result["sets"]]
    if not named:
        return
    figure = Figure(figsize=(6.2 * len(named), 4.6), layout=ConstrainedLayoutEngine(w_pad=0.15))
    for axes, name in zip(figure.subplots(1, len(named), squeeze=False)[0], named, strict=True):
        rows = [row for row in result["sets"][name]["settings"] if row["kl"]]
        labels = []
        for shown in _shown(rows):
            place = SHOWN.index(shown) if shown in SHOWN else len(SHOWN)
            points = sorted((r for r in rows if method(r) == shown and r["ratio"]), key=lambda r: r["budget"])
            values = [max(r["kl"]["value"], 1e-4) for r in points]
            spread = [[max(0.0, r["kl"]["value"] - r["kl"]["low"]) for r in points],
                      [max(0.0, r["kl"]["high"] - r["kl"]["value"]) for r in points]]  # fmt: skip
            axes.errorbar([r["budget"] for r in points], values, yerr=spread, marker=MARKERS[place], markersize=4,
                          color=COLOURS[place], capsize=2, linewidth=1.3)  # fmt: skip
            labels.append((shown, COLOURS[place], values[-1]))
        reuse = next(r for r in rows if r["label"] == "reuse")
        axes.axhline(reuse["kl"]["value"], color="#d55e00", linestyle=":", linewidth=1)
        axes.text(0, reuse["kl"]["value"], " plain reuse", color="#d55e00", fontsize=8, va="bottom")
        axes.set_title(f"{TITLES[name]} ({result['sets'][name]['questions']} questions)", fontsize=10)
        axes.set_xlabel("work: share of a full prefill of the chunks", fontsize=9)
        axes.set_ylabel("KL from full prefill, nats a token", fontsize=9)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        label_lines(axes, labels)
    figure.suptitle(f"{result['model']}, {result['dtype']}", fontsize=10)
    figure.savefig(path, metadata={"Date": None})


def _shown(rows: list[Row]) -> list[str]:
    """The plot's methods that were measured at several ratios, and the one that is best at .15 if it is none of them."""
    counts: dict[str, int] = {}
    for row in rows:
        if row["ratio"]:
            counts[method(row)] = counts.get(method(row), 0) + 1
    named = [name for name in SHOWN if counts.get(name, 0) > 1]
    at = [row for row in rows if row["ratio"] == MAIN_RATIO and counts[method(row)] > 1]
    best = min(at, key=lambda row: row["kl"]["value"], default=None)
    return named if best is None or method(best) in named else [*named, method(best)]
