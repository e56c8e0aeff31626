"""cacheblend demo: full prefill, plain reuse and blending on bundled documents."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_cli.cli import options
from cacheblend_cli.cli.answers import counted
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.scores import show_table
from cacheblend_cli.cli.sizes import format_size
from cacheblend_cli.settings import Settings

if TYPE_CHECKING:
    from cacheblend_cli.evaluation.demo_run import Compared, DemoRow

_SHOWN = 3
_COMMANDS = ("precompute docs/", 'ask "What is this about?"', 'ask "What is this about?" --verify')


@options.with_settings("threads")
def demo(
    settings: Settings,
    questions: Annotated[int, typer.Option(min=1, max=18, help="Number of questions.")] = 12,
    json: options.Json = False,
) -> None:
    """Compare full prefill, plain reuse and blending on bundled documents.

    Answers are by SmolLM2-135M if it is installed, else by a bundled model of 1.1 M parameters.
    """
    from cacheblend_store import ChunkStore

    output = Output()
    options.import_engine()
    from cacheblend_cli.evaluation.demo_run import FULL, compare, demo_case, precompute_alone, summarise
    from cacheblend_cli.model.named import HANDBOOK, INSTALL

    case = demo_case()
    engine = options.load_engine(replace(settings, model=case.model, lora=""), output)
    with (
        tempfile.TemporaryDirectory(prefix="cacheblend-demo-") as folder,
        ChunkStore.open(Path(folder) / "store", mode="write") as store,
    ):
        report = precompute_alone(engine, store, case)
        output.note(
            f"precomputed {report.documents} documents, each chunk alone: {report.tokens:,} tokens, "
            f"{format_size(report.bytes)} of KV in {report.seconds:.1f} s"
        )
        results: list[Compared] = []
        with output.progress("questions") as update:
            for result in compare(engine, store, case, questions, verify=json):
                results.append(result)
                update(len(results), questions, f"{len(results)}/{questions}")
    rows = summarise(results)
    if json:
        for result in results:
            for setting, answer in result.answers.items():
                facts = {"question": result.question.question, "expected": result.question.answer, "setting": setting}
                output.json({**facts, "right": result.is_right(setting), **answer.to_dict()})
        for row in rows:
            output.json(vars(row))
        return
    prompt_tokens = results[0].answers[FULL].prompt_tokens
    output.text(
        f"{counted(len(results), 'question')} to {engine.model.name}, about {prompt_tokens:,} prompt tokens each, "
        "documents in a new order each time:"
    )
    _show_rows(rows, output)
    _show_repaired([r for r in results if r.is_repaired][:_SHOWN], output)
    if case.model == HANDBOOK:
        output.note(f"this model is too small for blending to save time; for a real one: {INSTALL}")
    output.text("\nNow with your own documents:\n")
    program = "cacheblend" if shutil.which("cacheblend") else os.path.relpath(sys.argv[0])
    for arguments in _COMMANDS:
        output.text(f"  {program} {arguments}")


def _show_rows(rows: Sequence[DemoRow], output: Output) -> None:
    full = rows[0].ttft_s
    cells = [
        (
            row.setting,
            f"{row.correct}/{row.questions}",
            f"{row.ttft_s * 1000:,.0f} ms",
            f"{full / row.ttft_s:.1f} x",
            f"{row.recompute_fraction:.0%}",
        )
        for row in rows
    ]
    show_table(("setting", "correct", "first token", "sooner", "recomputed"), cells, output)


def _show_repaired(results: Sequence[Compared], output: Output) -> None:
    """Show questions that plain reuse answers wrongly and blending rightly."""
    if not results:
        return
    output.text("\nWrong by plain reuse, right when blended:")
    for result in results:
        output.text(f"\n> {result.question.question}")
        for setting, answer in result.answers.items():
            mark = "right" if result.is_right(setting) else "WRONG"
            output.text(f"  {setting:<13} {mark}  {' '.join(answer.text.split())}")
        first = result.first_difference
        if first is None:
            output.text("  Blended and full prefill give the same answer.")
        else:
            output.text(f"  Blended and full prefill agree for {counted(first, 'token')}, then differ.")
