"""Quality and time to the first token over the recompute ratio, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.evaluation.bootstrap import Interval
from cacheblend_cli.evaluation.evaluate import NOISE_FLOOR
from cacheblend_cli.evaluation.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")
_FULL, _REUSE = "#333333", "#b03a2e"


def check_plot(path: Path) -> None:
    """Raises UsageError when the picture could not be drawn there: said before anything is measured."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot {path} is of no known format", f"name a file that ends in {' or '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no directory {path.parent}", "make it first")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "--plot needs matplotlib, and it is not installed", "pip install 'cacheblend[plot]'"
        ) from error


def plot(summaries: Sequence[Summary], path: Path, title: str = "") -> None:
    """Write the picture. Quality is F1 against the references, or without any against full prefill's answers; bands are
    95 % intervals; full prefill and plain reuse are level lines. Raises UsageError for a file that cannot be written."""
    check_plot(path)
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    score = "f1" if any(s.f1 for s in summaries) else "f1_full"
    figure = Figure(figsize=(11, 4.8), layout=ConstrainedLayoutEngine(w_pad=0.15))
    quality, time = figure.subplots(1, 2)
    _levels(summaries, score, quality, time)
    for name, series in _series(summaries).items():
        ratios = [s.ratio for s in series]
        values: list[Interval | None] = [getattr(s, score) for s in series]
        [line] = quality.plot(ratios, [v.value if v else None for v in values], marker="o", label=name)
        low, high = ([v.low if v else 0.0 for v in values], [v.high if v else 0.0 for v in values])
        quality.fill_between(ratios, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        time.plot(ratios, [1000 * s.ttft_s for s in series], marker="o", label=name)
    quality.set_ylabel("F1" if score == "f1" else "F1 against full prefill's answers")
    time.set_ylabel("time to the first token, ms (median)")
    time.set_ylim(bottom=0)
    for axes in (quality, time):
        axes.set_xlabel("recompute ratio")
        axes.grid(alpha=0.25)
    handles, names = quality.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(names)), fontsize=8, frameon=False)
    if title:
        figure.suptitle(title, fontsize=10)
    metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {}
    try:
        figure.savefig(path, dpi=150, metadata=metadata)
    except OSError as error:
        raise UsageError(
            f"cannot draw {path}: {error.strerror or error}",
            "check the path, its permissions and the space on its disk",
        ) from error


def _levels(summaries: Sequence[Summary], score: str, quality: Axes, time: Axes) -> None:
    """Full prefill and each reuse as lines across."""
    for s in summaries:
        mode = s.setting["mode"]
        if s.label == NOISE_FLOOR.label or mode == "blend":
            continue
        color, style = (_FULL, "--") if mode == "full" else (_REUSE, ":" if s.setting["context"] == "sink" else "-.")
        value = getattr(s, score)
        if value is not None:
            quality.axhline(value.value, color=color, linestyle=style, label=s.label)
        time.axhline(1000 * s.ttft_s, color=color, linestyle=style, label=s.label)


def _series(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """Blended settings that differ in the ratio alone, by rising ratio."""
    found: dict[str, list[Summary]] = {}
    several = len({s.setting["context"] for s in summaries if s.setting["mode"] == "blend"}) > 1
    for s in summaries:
        if s.setting["mode"] == "blend":
            auto = " auto" if s.setting.get("auto") else ""  # one point, at its mean ratio
            name = s.setting["selector"] + auto + (f", {s.setting['context']}" if several else "")
            found.setdefault(name, []).append(s)
    return {name: sorted(series, key=lambda s: s.ratio) for name, series in found.items()}
