"""Plot of quality and time to the first token over the recompute ratio."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.evaluation.bootstrap import Interval
from cacheblend_cli.extras import install_hint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cacheblend_cli.evaluation.summary import Summary

FORMATS = (".png", ".svg")
_FULL, _REUSE = "#333333", "#d55e00"
COLOURS = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
"""Colours of the series: Okabe and Ito's colour-blind safe palette, and a brown. At most this many series are drawn."""
MARKERS = "os^Dvp"
_APART = 0.055  # distance between the labels of two series, as a share of the axis


def check_plot(path: Path) -> None:
    """Raise UsageError if the plot cannot be drawn to this path, before anything is measured."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot {path} has an unknown format", f"name a file that ends in {' or '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no directory {path.parent}", "create it first")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("--plot needs matplotlib, which is not installed", install_hint("plot")) from error


def plot(summaries: Sequence[Summary], path: Path, title: str) -> None:
    """Write the plot. Quality is F1 against the references, or without references against full prefill's answers; bands
    are 95 % intervals; full prefill and plain reuse are horizontal lines. Raises UsageError if the file cannot be
    written."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    score = "f1" if any(s.f1 for s in summaries) else "f1_full"
    figure = Figure(figsize=(11, 4.8), layout=ConstrainedLayoutEngine(w_pad=0.15))
    quality, time = figure.subplots(1, 2)
    labels = _levels(summaries, score, quality, time)
    every = _series(summaries)
    for (name, series), colour, marker in zip(every.items(), COLOURS, MARKERS, strict=False):
        ratios = [s.ratio for s in series]
        values: list[Interval] = [getattr(s, score) for s in series]
        quality.plot(ratios, [v.value for v in values], marker=marker, color=colour, markersize=5)
        low, high = [v.low for v in values], [v.high for v in values]
        quality.fill_between(ratios, low, high, color=colour, alpha=0.12, linewidth=0)
        times = [1000 * s.ttft_s for s in series]
        below = [max(0.0, t - 1000 * s.ttft_quartiles_s[0]) for t, s in zip(times, series, strict=True)]
        above = [max(0.0, 1000 * s.ttft_quartiles_s[1] - t) for t, s in zip(times, series, strict=True)]
        time.errorbar(ratios, times, yerr=[below, above], marker=marker, color=colour, markersize=5, capsize=2, lw=1.5)
        labels.append((name, colour, values[-1].value, times[-1]))
    quality.set_ylabel("F1" if score == "f1" else "F1 against full prefill's answers")
    time.set_ylabel("time to the first token, ms (median and quartiles)")
    quality.set_ylim(0, 1.03)
    time.set_ylim(bottom=0)
    for axes, which in ((quality, 2), (time, 3)):
        axes.set_xlabel("recompute ratio")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        label_lines(axes, [(label[0], label[1], float(label[which])) for label in labels])
    if (more := len(every) - len(COLOURS)) > 0:
        title += f"; {more} more series are in the table only"
    figure.suptitle(title, fontsize=10)
    metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {}
    try:
        figure.savefig(path, dpi=150, metadata=metadata)
    except OSError as error:
        raise UsageError(
            f"cannot draw {path}: {error.strerror or error}",
            "check the path, its permissions and the space on its disk",
        ) from error


def _levels(summaries: Sequence[Summary], score: str, quality: Axes, time: Axes) -> list[tuple[str, str, float, float]]:
    """Draw full prefill and each reuse as horizontal lines; return label, colour, quality and time of each."""
    from cacheblend_cli.evaluation.evaluate import NOISE_FLOOR

    labels = []
    for s in summaries:
        mode = s.setting["mode"]
        if s.label == NOISE_FLOOR.label or mode == "blend":
            continue
        colour, style = (_FULL, "--") if mode == "full" else (_REUSE, ":" if s.setting["context"] == "sink" else "-.")
        value = getattr(s, score)
        if value is not None:
            quality.axhline(value.value, color=colour, linestyle=style)
        time.axhline(1000 * s.ttft_s, color=colour, linestyle=style)
        labels.append((s.label, colour, value.value if value is not None else 1.0, 1000 * s.ttft_s))
    return labels


def label_lines(axes: Axes, labels: Sequence[tuple[str, str, float]]) -> None:
    """Write names at the right edge, each as near to its line as keeps them apart and within the axes."""
    bottom, top = axes.get_ylim()
    ordered = sorted(labels, key=lambda label: label[2])
    heights: list[float] = []
    for _, _, value in ordered:
        heights.append(max((value - bottom) / (top - bottom), heights[-1] + _APART if heights else 0.0))
    most = 1.0
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], most)
        most = heights[i] - _APART
    for (name, colour, _), height in zip(ordered, heights, strict=True):
        axes.text(1.02, height, name, color=colour, transform=axes.transAxes, va="center", fontsize=8)


def _series(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """Group blended settings that differ only in the ratio, by increasing ratio."""
    found: dict[str, list[Summary]] = {}
    several = len({s.setting["context"] for s in summaries if s.setting["mode"] == "blend"}) > 1
    for s in summaries:
        if s.setting["mode"] == "blend":
            auto = " auto" if s.setting.get("auto") else ""  # one point, at its mean ratio
            name = s.setting["selector"] + auto + (f", {s.setting['context']}" if several else "")
            found.setdefault(name, []).append(s)
    return {name: sorted(series, key=lambda s: s.ratio) for name, series in found.items()}
