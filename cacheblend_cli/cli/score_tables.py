"""Tables of `eval` and `bench`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cacheblend_cli.cli.output import Output

if TYPE_CHECKING:
    from cacheblend_cli.blend.cost import AutoReport
    from cacheblend_cli.evaluation.bootstrap import Interval
    from cacheblend_cli.evaluation.summary import Summary


def show_scores(summaries: Sequence[Summary], output: Output, *, json: bool) -> None:
    """Show a row for each setting, or a JSON object with all intervals and layers."""
    if json:
        for s in summaries:
            output.json(s.to_dict())
        return
    referenced = any(s.f1 for s in summaries)
    columns = ["setting"]
    columns += ["exact", "F1", "NormF1", "95 %", "ROUGE-L"] if referenced else ["F1 to full", "ROUGE-L to full"]
    columns += ["same answer", "top-1", "KL", "recomputed", "work", "first token"]
    rows = [_row(s, referenced) for s in summaries]
    show_table(columns, rows, output)
    output.note(f"{summaries[0].samples} questions; top-1 and KL (nats a token) over full prefill's own answers")


def show_layers(summaries: Sequence[Summary], output: Output) -> None:
    """Show the relative RMSE against full prefill, one column per layer."""
    compared = [s for s in summaries if s.k_error]
    if not compared:
        return
    rows = [
        (s.label, name, *(f"{e:.2g}" for e in errors))
        for s in compared
        for name, errors in (("K", s.k_error), ("V", s.v_error), ("attention", s.attention_error))
    ]
    output.text("\nrelative RMSE against full prefill, by layer:")
    show_table(["setting", "of", *(str(i) for i in range(len(compared[0].k_error)))], rows, output, left=2)


def auto_line(reports: Sequence[AutoReport]) -> str:
    """Summarise the choices of --ratio auto, and predicted and measured prefill times."""
    from statistics import median

    ratios = sorted(r.decision.ratio for r in reports if r.decision.mode == "blend")
    full = len(reports) - len(ratios)
    chosen = [f"ratio {ratios[0]:.2g} to {ratios[-1]:.2g}, median {median(ratios):.2g}"] if ratios else []
    chosen += [f"full prefill for {full} of {len(reports)} questions"] if full else []
    predicted, actual = (
        median(t) for t in zip(*((r.decision.chosen.prefill_s, r.ttft_s or 0) for r in reports), strict=True)
    )
    return f"auto: {', '.join(chosen)}; prefill {predicted * 1000:.1f} ms predicted, {actual * 1000:.1f} ms measured"


def _row(s: Summary, referenced: bool) -> list[str]:
    from cacheblend_cli.evaluation.evaluate import NOISE_FLOOR

    cells = [s.label]
    if referenced:
        interval = f"{s.norm_f1.low:.2f} to {s.norm_f1.high:.2f}" if s.norm_f1 else ""
        cells += [_share(s.exact_match), _number(s.f1), _number(s.norm_f1), interval, _number(s.rouge_l)]
    else:
        cells += [_number(s.f1_full), _number(s.rouge_full)]
    cells += [_share(s.same_answer), _share(s.top1), f"{s.kl.value:.2g}" if s.kl else ""]
    if s.label == NOISE_FLOOR.label:  # not a way to answer
        return [*cells, "", "", ""]
    recomputed = f"{s.recomputed:.0%}" if s.setting["mode"] != "full" else "100%"
    return [*cells, recomputed, f"{s.budget:.0%}", f"{s.ttft_s * 1000:.1f} ms"]


def _share(interval: Interval | None) -> str:
    return f"{interval.value:.1%}" if interval else ""


def _number(interval: Interval | None) -> str:
    return f"{interval.value:.3f}" if interval else ""


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], output: Output, left: int = 1) -> None:
    """Show a table; columns too wide for the terminal go into a second table that repeats the left columns."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    limit = shutil.get_terminal_size().columns if output.out_tty else sum(widths) + 2 * len(widths)
    head = list(range(left))
    parts: list[list[int]] = [[]]
    for i in range(left, len(columns)):
        if parts[-1] and sum(widths[j] + 2 for j in (*head, *parts[-1], i)) - 2 > limit:
            parts.append([])
        parts[-1].append(i)
    for number, part in enumerate(parts):
        if number:
            output.text("")
        shown = [*head, *part]
        cells = [[row[i] for i in shown] for row in rows]
        output.table([columns[i] for i in shown], cells, right=range(left, len(shown)))
