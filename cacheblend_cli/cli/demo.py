"""cacheblend demo: full prefill, plain reuse and blending on bundled pages; and example documents."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Option

from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output, show_table
from cacheblend_cli.cli.units import counted, format_latency, format_size
from cacheblend_cli.demo import office_dir
from cacheblend_cli.demo.records import SEED
from cacheblend_cli.errors import UsageError
from cacheblend_cli.settings import Settings

if TYPE_CHECKING:
    from cacheblend_cli.evaluation.demo_run import Compared, Demo, DemoRow

QUESTION = "What is the price of a parking permit?"
"""A question about the example documents that SmolLM2 answers correctly."""
_NUM_QUESTIONS = 12
_ABOUT = "about a minute on two cores, and 70 MB in a temporary folder that is removed"
_EXAMPLES = 2


@options.with_settings("threads")
def demo(
    settings: Settings,
    write: Path | None = Option(
        None, "--write", help="Write eight short example documents to DIR, and do nothing else.", metavar="DIR"
    ),
    questions: int = Option(_NUM_QUESTIONS, min=1, max=_NUM_QUESTIONS, help="Number of questions."),
    seed: int = Option(SEED, min=0, help="Random seed of the pages."),
    json: options.Json = False,
) -> None:
    """Compare full prefill, plain reuse and blending on pages about invented products.

    Answers are by SmolLM2-135M if it is installed, else by a bundled model with 1.1 M parameters. --write creates
    example documents instead.
    """
    output = Output(json=json)
    if write is not None:
        _write_examples(write, output)
        return
    options.import_engine()
    from cacheblend_cli.evaluation.demo_run import Demo, demo_case, summarise
    from cacheblend_cli.evaluation.temporary import temporary_store
    from cacheblend_cli.model.named import INSTALL, SMOLLM2

    case = demo_case(seed)
    output.note(f"{counted(questions, 'question')} to {case.model}, each answered in three ways: {_ABOUT}")
    engine = options.load_engine(replace(settings, model=case.model, lora=""), output)
    results: list[Compared] = []
    with temporary_store("demo") as store, engine:
        run = Demo(engine, store, case)
        report = run.precompute_alone()
        output.note(
            f"precomputed {report.documents} documents, each chunk alone: {report.tokens:,} tokens, "
            f"{format_size(report.bytes)} of KV in {report.seconds:.1f} s"
        )
        with output.progress("questions") as update:
            for result in run.compare(questions):
                results.append(result)
                update(len(results), questions, f"{len(results)}/{questions}")
    rows = summarise(results)
    if json:
        for result in results:
            for setting, answer in result.answers.items():
                asked = {"question": result.question.question, "expected": result.question.answer, "setting": setting}
                found = {"right": result.is_right(setting), "same": result.is_same(setting)}
                output.json({**asked, **found, **answer.to_dict()})
        for row in rows:
            output.json(vars(row))
        return
    _show_rows(results, rows, engine.model.name, output)
    output.text(_ratio_line(run))
    _show_repaired([r for r in results if r.is_repaired], output)
    if case.model == SMOLLM2:
        output.text(
            "\nLarger models save more: cacheblend bench. The ratio that yours needs: cacheblend models check MODEL --ratio-only"
        )
    else:
        output.note(f"this model is too small for blending to save time; for a real one: {INSTALL}")
    output.text("\nNow try it on eight example pages, or on your own documents:\n")
    _show_commands(Path("office"), output)


def _write_examples(folder: Path, output: Output) -> None:
    """Copy the example documents into a new or empty folder. Raises UsageError if it is not empty."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(
            f"{folder} already exists and is not empty", "name a new folder: cacheblend demo --write office"
        )
    folder.mkdir(parents=True, exist_ok=True)
    pages = sorted(office_dir().glob("*.md"))
    for page in pages:
        shutil.copyfile(page, folder / page.name)
        output.json({"file": str(folder / page.name)})
    output.text(f"{len(pages)} short documents about an invented office are in {folder}. Try:\n")
    _show_commands(folder, output, with_write=False)


def _show_commands(folder: Path, output: Output, *, with_write: bool = True) -> None:
    program = "cacheblend" if shutil.which("cacheblend") else os.path.relpath(sys.argv[0])
    write = [f"demo --write {folder}"] if with_write else []
    for arguments in (
        *write,
        f"precompute {shlex.quote(str(folder))}",
        f'ask "{QUESTION}" -k 2',
        f'ask "{QUESTION}" -k 2 --verify',
    ):
        output.text(f"  {program} {arguments}")


def _show_rows(results: Sequence[Compared], rows: Sequence[DemoRow], model: str, output: Output) -> None:
    from statistics import median

    from cacheblend_cli.evaluation.demo_run import FULL

    tokens = median(result.answers[FULL].prompt_tokens for result in results)
    chunks = median(len(result.answers[FULL].chunks) for result in results)
    output.text(
        f"{counted(len(results), 'question')} to {model}, each over {chunks:.0f} chunks in an order of its own, some {tokens:,.0f} tokens:"
    )
    columns = ("setting", "first token", "correct", "of full prefill's correct", "same text", "computed again")
    of = rows[0].correct
    cells = [
        (
            row.setting, format_latency(row.ttft_s), f"{row.correct}/{row.questions}", f"{row.kept}/{of}", f"{row.same}/{row.questions}",
            f"{row.recompute_fraction:.0%}",
        )
        for row in rows
    ]  # fmt: skip
    show_table(columns, cells, output)
    apart = ", and nothing of another page" if any(result.question.wrong for result in results) else ""
    output.text(f"first token: median time, model loaded; correct: contains the expected answer{apart}")


def _ratio_line(run: Demo) -> str:
    """Describe the ratio used and its source."""
    from cacheblend_cli.evaluation.demo_run import BLENDED

    blend = run.settings[BLENDED]
    if blend.selector == "all":
        return f"blended: {run.ratio_from}"
    return f"blended: at ratio {blend.ratio:g}, {run.ratio_from or 'the default'}"


def _show_repaired(results: Sequence[Compared], output: Output) -> None:
    """Show questions that only plain reuse answers wrongly."""
    if not results:
        return
    shown = results[:_EXAMPLES]
    of = f", the first {len(shown)} of {len(results)}" if len(results) > len(shown) else ""
    output.text(f"\nWrong by plain reuse, right in full and blended{of}:")
    for result in shown:
        output.text(f"\n> {result.question.question}")
        for setting, answer in result.answers.items():
            mark = "right" if result.is_right(setting) else "WRONG"
            output.text(f"  {setting:<13} {mark}  {' '.join(answer.text.split())}")
