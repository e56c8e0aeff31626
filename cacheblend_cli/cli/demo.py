"""cacheblend demo: the main job on the bundled model and handbook."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.scores import show_table
from cacheblend_cli.cli.sizes import format_size
from cacheblend_cli.settings import Resolved

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.api import Engine


@options.with_settings("store", "threads")
def demo(
    resolved: Resolved,
    questions: Annotated[int, typer.Option(min=5, help="Held-out questions for the table.")] = 40,
    json: options.Json = False,
) -> None:
    """Precompute the bundled handbook, ask three questions, and compare full prefill, reuse and blending."""
    from cacheblend_store import ChunkStore

    output = Output()
    settings = replace(resolved.settings, model="handbook")
    engine = options.load_engine(settings, Output(quiet=True))
    with tempfile.TemporaryDirectory(prefix="cacheblend-demo-") as folder:
        path = settings.store_path if resolved.origin["store"] == "flag" else Path(folder) / "store"
        with ChunkStore.open(path, mode="write") as kv_store:
            _precompute(engine, kv_store, output)
            _ask_three(engine, kv_store, output, json)
            _table(engine, kv_store, questions, output, json)


def _precompute(engine: Engine, store: ChunkStore, output: Output) -> None:
    from cacheblend_cli.api import PrecomputeOptions
    from cacheblend_cli.demo import CHUNK_TOKENS, handbook_dir

    done = 0
    with output.progress("precompute the handbook") as bar:
        total = 0

        def on_event(event: object) -> None:
            nonlocal done, total
            total = getattr(event, "tokens_total", 0) or total
            if (chunk := getattr(event, "chunk", None)) is not None:
                done += chunk.tokens
                bar(done, total, "")

        report = engine.precompute(store, [str(handbook_dir())], PrecomputeOptions(chunk_tokens=CHUNK_TOKENS), on_event)
    output.note(
        f"precomputed {report.documents} pages: {report.new + report.unchanged + report.replaced} chunks, {report.tokens:,} tokens, "
        f"{format_size(report.bytes)} of KV in {report.seconds:.1f} s"
    )


def _ask_three(engine: Engine, store: ChunkStore, output: Output, json: bool) -> None:
    from cacheblend_cli.api import BlendConfig, Question, SamplingParams
    from cacheblend_cli.cli.answers import summary_line
    from cacheblend_cli.demo import questions

    across = [q for q in questions() if q.across]
    for item in across[:3]:
        question = Question(item.question, (), BlendConfig(), SamplingParams(max_tokens=32))
        answer = engine.ask(store, engine.search(store, question))
        if json:
            output.json({"question": item.question, "expected": item.answer, **answer.to_dict()})
            continue
        output.text(f"\n> {item.question}\n{answer.text}")
        output.note(summary_line(answer))


def _table(engine: Engine, store: ChunkStore, count: int, output: Output, json: bool) -> None:
    from cacheblend_cli.evaluation.demo_table import accuracy, demo_samples, demo_table, gap_closed

    samples = demo_samples(count)
    with output.progress("held-out questions") as bar:
        summaries = demo_table(engine, store, samples, lambda done, total, text: bar(done, total, ""))
    if json:
        for s in summaries:
            output.json(
                {
                    "setting": s.label,
                    "questions": s.samples,
                    "correct": round(accuracy(s) * s.samples),
                    "f1": s.f1.value if s.f1 else None,
                    "ttft_s": s.ttft_s,
                    "recompute_fraction": s.budget,
                }
            )
        return
    rows = []
    for i, s in enumerate(summaries):
        closed = gap_closed(summaries, i) if i > 1 else None
        rows.append(
            (
                s.label,
                f"{round(accuracy(s) * s.samples)}/{s.samples}",
                f"{accuracy(s):.0%}",
                f"{s.ttft_s * 1000:.1f} ms",
                f"{s.budget:.0%}",
                "" if closed is None else f"{closed:.0%}",
            )
        )
    output.text(f"\n{len(samples)} held-out questions, contexts of 3 or 4 pages, their paragraphs as chunks:")
    show_table(("setting", "correct", "share", "first token", "work recomputed", "gap closed"), rows, output)
