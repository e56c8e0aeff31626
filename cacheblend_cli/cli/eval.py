"""cacheblend eval: compare settings with full prefill on questions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Argument, Option

from cacheblend_cli.cli import options
from cacheblend_cli.cli.exits import on_interrupt
from cacheblend_cli.cli.output import Output, show_table
from cacheblend_cli.cli.stores import open_store
from cacheblend_cli.errors import UsageError
from cacheblend_cli.evaluation.plot import check_plot
from cacheblend_cli.evaluation.plot import plot as draw
from cacheblend_cli.settings import Settings, grouped, resolve
from cacheblend_cli.types import AutoReport, BlendParams, SearchParams

if TYPE_CHECKING:
    from cacheblend_cli.engine.engine import Engine
    from cacheblend_cli.evaluation.bootstrap import Interval
    from cacheblend_cli.evaluation.evaluate import Results
    from cacheblend_cli.evaluation.samples import Sample
    from cacheblend_cli.evaluation.settings import Setting
    from cacheblend_cli.evaluation.summary import Summary

_MAX_TOKENS = 32


@options.with_settings(
    "window",
    "neighbours",
    *grouped("research"),
    *grouped("prompt", "model", "machine", but=["tensor_parallel"]),
    "kv_dtype",
    "lock_timeout",
    "top_k",
    "search",
    seed="Random seed of the selector random.",
    top_k="Number of chunks to search for a question without contexts.",
)
def evaluate(
    settings: Settings,
    data: list[Path] = Argument(help="JSON or JSON lines of questions; - is stdin."),
    mode: list[str] | None = Option(
        None, help="Mode to measure: blend, full or reuse (repeatable).", show_default="blend, full and reuse"
    ),
    selector: list[str] | None = Option(None, help="Selector (repeatable).", show_default="as ask"),
    ratio: list[str] | None = Option(
        None,
        help="Recompute ratio to measure, or model or auto as in ask (repeatable).",
        metavar="X|WORD",
        show_default="as ask",
    ),
    context: list[str] | None = Option(
        None, help="Left context of chunks: sink, document or neighbours (repeatable).", show_default="document"
    ),
    limit: int | None = Option(None, min=1, help="Only the first N questions."),
    max_tokens: int = Option(_MAX_TOKENS, min=1, help="Maximum tokens of an answer."),
    out: Path | None = Option(None, help="Write a record for each question and setting."),
    resume: Path | None = Option(None, help="Like --out, continuing from the records in the file."),
    plot: Path | None = Option(None, help="Plot quality and time against the ratio: FILE.png or .svg."),
    layers: bool = Option(False, "--layers", help="Show the error of K, V and attention for each layer."),
    noise_floor: bool = Option(
        True,
        "--noise-floor/--no-noise-floor",
        help="Also measure a full prefill with another tiling, as a noise floor.",
    ),
    store: str | None = Option(
        None, help="Keep the chunks in this store, and search it.", show_default="a temporary one"
    ),
    json: options.Json = False,
    quiet: options.NoMessages = False,
) -> None:
    """Compare settings with a full prefill of the same prompts, on your questions.

    A sample is {"question", "answers"?, "ctxs"?: [{"title"?, "text"}]} or {"0", "1", ..., "chunk_num", "query"}.
    Without ctxs, chunks are searched in the store as by ask. Consecutive contexts with the same title are one page.
    Without answers, only the distance from full prefill is reported.
    """
    output, path = Output(json=json, quiet=quiet), _record_path(out, resume)
    settings = replace(settings, store=store or settings.store)
    from cacheblend_cli.collect.settings import CollectSettings
    from cacheblend_cli.evaluation.records import RecordFile
    from cacheblend_cli.evaluation.scores import check_rouge
    from cacheblend_cli.evaluation.settings import grid

    check_rouge()
    if plot is not None:
        check_plot(plot)
    blend = BlendParams.of(settings)
    ratios = [resolve({"ratio": r}).settings.ratio for r in ratio or ()] or [settings.ratio]

    def grid_with(own: BlendParams) -> list[Setting]:
        return grid(
            replace(own, mode="blend", ratio=BlendParams.ratio),
            modes=mode or ("blend", "full", "reuse"),
            selectors=selector or (settings.selector,),
            ratios=[own.ratio if ratio == "model" else ratio for ratio in ratios],
            contexts=context or (settings.context,),
        )

    asked = grid_with(blend)  # raise errors before torch is imported
    collecting = CollectSettings(window=settings.window, neighbours=settings.neighbours)
    samples = _read(data, limit)
    with RecordFile(path) as records:
        engine = options.load_engine(settings, output)
        from cacheblend_cli.evaluation.evaluate import NOISE_FLOOR, EvaluateOptions
        from cacheblend_cli.evaluation.evaluate import evaluate as run
        from cacheblend_cli.evaluation.temporary import temporary_store

        if "model" in ratios:
            asked = grid_with(engine.own_blend(blend)[0])
        samples = _with_found_contexts(samples, engine, settings, max_tokens, output)
        hint = f"finished measurements are in {path}; continue with --resume {path}"
        interruptible = on_interrupt(hint) if path else nullcontext()
        opened = temporary_store("eval") if store is None else open_store(settings, write=True)
        with interruptible, opened as kv_store, output.progress("questions") as bar:
            results = run(
                engine, kv_store, samples, [*asked, *[NOISE_FLOOR] * noise_floor],
                EvaluateOptions(max_tokens, records, store is not None, collecting),
                on_progress=lambda done, total, text: bar(done, total, f"{done}/{total}"),
            )  # fmt: skip
    summaries = _show_results(results, output, layers=layers)
    if path is not None:
        output.note(f"{results.measured} records written to {path}, {results.resumed} already there")
    if plot is not None:
        draw(summaries, plot, f"{engine.model.name}, {summaries[0].samples} questions")
        output.note(f"drew {plot}")


def _show_results(results: Results, output: Output, *, layers: bool) -> list[Summary]:
    """Show notes and scores. Raises UsageError if nothing was measured."""
    from cacheblend_cli.evaluation.summary import summarise

    for number, reason in results.skipped:
        output.warn(f"question {number} skipped: {reason}")
    for note in dict.fromkeys(results.notes):
        output.warn(note)
    if not results.full:
        raise UsageError("no question was measured", "use a model with a longer context, or shorter contexts")
    summaries = summarise(results)
    show_scores(summaries, output)
    if results.auto:
        output.note(auto_line(results.auto))
    if layers and not output.is_json:
        show_layers(summaries, output)
    return summaries


def _record_path(out: Path | None, resume: Path | None) -> Path | None:
    if out is not None and resume is not None and out != resume:
        raise UsageError("--out and --resume name different files", "give only --resume FILE, which is also written to")
    if out is not None and resume is None and out.exists() and out.stat().st_size:
        raise UsageError(f"--out {out} already contains records", f"continue with --resume {out}")
    return resume or out


def _read(data: Sequence[Path], limit: int | None) -> list[Sample]:
    from cacheblend_cli.cli.inputs import read_stdin
    from cacheblend_cli.evaluation.samples import parse_samples, read_samples

    samples: list[Sample] = []
    for path in data:
        left = None if limit is None else limit - len(samples)
        if left == 0:
            break
        samples += parse_samples(read_stdin("data"), "stdin", left) if str(path) == "-" else read_samples(path, left)
    return samples


def _with_found_contexts(
    samples: list[Sample], engine: Engine, settings: Settings, max_tokens: int, output: Output
) -> list[Sample]:
    """Return the samples; those without contexts with those found in the store."""
    if all(sample.contexts for sample in samples):
        return samples
    from cacheblend_cli.evaluation.chunks import with_found_contexts

    with open_store(settings, write=False) as source:
        scope = options.scope_of(source, None, False, output.note)
        search = SearchParams.of(replace(settings, on_weak_match="answer"), scope)
        return with_found_contexts(engine, source, samples, search, max_tokens)


def show_scores(summaries: Sequence[Summary], output: Output) -> None:
    """Show a row for each setting, or a JSON object with all intervals and layers."""
    if output.is_json:
        for s in summaries:
            output.json(asdict(s))
        return
    referenced = any(s.f1 for s in summaries)
    columns = ["setting"]
    columns += ["has answer", "F1", "NormF1", "95 %", "ROUGE-L"] if referenced else ["F1 to full", "ROUGE-L to full"]
    columns += ["same answer", "top-1", "KL", "recomputed", "work", "first token"]
    rows = [_row(s, referenced) for s in summaries]
    show_table(columns, rows, output)
    output.note(f"{summaries[0].samples} questions; top-1 and KL (nats a token) over full prefill's own answers")


def show_layers(summaries: Sequence[Summary], output: Output) -> None:
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
    predicted, actual = median(r.decision.chosen.prefill_s for r in reports), median(r.ttft_s or 0 for r in reports)
    return f"auto: {', '.join(chosen)}; prefill {predicted * 1000:.1f} ms predicted, {actual * 1000:.1f} ms measured"


def _row(s: Summary, referenced: bool) -> list[str]:
    from cacheblend_cli.evaluation.evaluate import NOISE_FLOOR

    cells = [s.label]
    if referenced:
        interval = f"{s.norm_f1.low:.2f} to {s.norm_f1.high:.2f}" if s.norm_f1 else ""
        cells += [_share(s.has_answer), _number(s.f1), _number(s.norm_f1), interval, _number(s.rouge_l)]
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
