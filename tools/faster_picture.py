"""Draw docs/faster.svg from benchmarks/results/prefill.json: `python -m tools.faster_picture`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
BARS = {
    "transformers": ("transformers, full prefill", "#999999"),
    "full": ("cacheblend, full prefill", "#999999"),
    "query 0.30": ("blended, 30 % of the tokens repaired", "#0072b2"),
    "query 0.15": ("blended, 15 % repaired, the default", "#0072b2"),
    "query 0.05": ("blended, 5 % repaired", "#0072b2"),
    "reuse": ("reused, nothing repaired", "#d55e00"),
}
"""Names in the results -> label, and a colour of Okabe and Ito's palette."""


def draw(results: dict, path: Path) -> None:
    """Medians from zero on, whiskers from the fastest to the slowest run, the value beside each bar."""
    runs = {name: results["all_seconds"][name] for name in BARS}
    full = statistics.median(runs["full"])
    figure = Figure(figsize=(8, 2.9), layout="constrained")
    axes = figure.subplots()
    for place, (name, (label, colour)) in enumerate(BARS.items()):
        middle = statistics.median(runs[name])
        whiskers = [[middle - min(runs[name])], [max(runs[name]) - middle]]
        axes.barh(place, middle, color=colour, xerr=whiskers, error_kw={"ecolor": "#333333", "capsize": 2, "lw": 1})
        faster = "" if "full prefill" in label else f"  {full / middle:.1f} x sooner"
        axes.text(max(runs[name]) + 0.15, place, f"{middle:.1f} s{faster}", va="center", fontsize=9)
    axes.set_yticks(range(len(BARS)), [label for label, _ in BARS.values()], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(max(times) for times in runs.values()))
    count = {len(times) for times in runs.values()}.pop()
    axes.set_xlabel(f"seconds to the first token (median, fastest and slowest of {count})", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    shape, hardware = results["shape"], results["hardware"]
    figure.suptitle(
        f"Qwen2.5-0.5B's shape, {shape['chunks']} chunks of {shape['chunk_tokens']} tokens; "
        f"{hardware['cpu']}, {hardware['cores']} cores, fp32",
        fontsize=10,
    )
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(json.loads((ROOT / "benchmarks" / "results" / "prefill.json").read_text()), ROOT / "docs" / "faster.svg")
