"""cacheblend demo: the main job on bundled data, with the handbook's model and with a real one."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Sequence
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
    from cacheblend_cli.evaluation.summary import Summary


@options.with_settings("threads")
def demo(
    settings: Settings,
    questions: Annotated[int, typer.Option(min=5, help="Held-out questions for the table.")] = 40,
    json: options.Json = False,
) -> None:
    """Three questions about a handbook, answered and measured; then a real model over real text, in full and blended.

    The first part is of the handbook's model, the second of SmolLM2 where it is installed.
    """
    show = _Show(Output(), json)
    with tempfile.TemporaryDirectory(prefix="cacheblend-demo-") as folder:
        _handbook(settings, Path(folder), questions, show)
        _real(settings, Path(folder), show)
    show.text("\nNow with a folder of your own:\n")
    name = (
        "cacheblend" if shutil.which("cacheblend") else os.path.relpath(sys.argv[0])
    )  # `make demo` has none on the path
    for arguments in ("precompute docs/", 'ask "What is this about?"', 'ask "What is this about?" --verify'):
        show.text(f"  {name} {arguments}")


class _Show:
    """Text for people, or JSON in its place. output: for what both see."""

    def __init__(self, output: Output, json: bool) -> None:
        self.output, self._json = output, json

    def text(self, line: str) -> None:
        if not self._json:
            self.output.text(line)

    def record(self, record: dict[str, object]) -> None:
        if self._json:
            self.output.json(record)

    def table(self, summaries: Sequence[Summary]) -> None:
        from cacheblend_cli.evaluation.demo_table import accuracy, gap_closed

        rows = []
        for i, s in enumerate(summaries):
            right, closed = round(accuracy(s) * s.samples), gap_closed(summaries, i) if i > 1 else None
            f1 = s.f1.value if s.f1 else None
            told = {"setting": s.label, "questions": s.samples, "correct": right, "f1": f1}
            self.record({**told, "ttft_s": s.ttft_s, "recompute_fraction": s.budget})
            row = (s.label, f"{right}/{s.samples}", f"{s.ttft_s * 1000:.1f} ms", f"{s.budget:.0%}")
            rows.append((*row, "" if closed is None else f"{closed:.0%}"))
        if not self._json:
            show_table(("setting", "correct", "first token", "work recomputed", "gap closed"), rows, self.output)


def _handbook(settings: Settings, folder: Path, count: int, show: _Show) -> None:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.api import PrecomputeOptions
    from cacheblend_cli.demo import CHUNK_TOKENS, handbook_dir
    from cacheblend_cli.evaluation.demo_table import demo_samples, demo_table

    engine = options.load_engine(replace(settings, model="handbook", lora=""), Output(quiet=True))
    show.text("1. A handbook, and a model of 1.1 M parameters made for its kind of text\n")
    in_page, alone = (ChunkStore.open(folder / name, mode="write") for name in ("in-page", "alone"))
    with in_page, alone:
        behind, by_itself = (in_page, "document", "each behind its page's text"), (alone, "sink", "each alone")
        for store, context, how in (behind, by_itself):
            wanted = PrecomputeOptions(chunk_tokens=CHUNK_TOKENS, context=context)
            report = engine.precompute(store, [str(handbook_dir())], wanted, lambda event: None)
            show.output.note(
                f"precomputed {report.documents} pages: {report.new} chunks, {how}, {report.tokens:,} tokens, "
                f"{format_size(report.bytes)} of KV in {report.seconds:.1f} s"
            )
        _ask_three(engine, in_page, alone, show)
        samples = demo_samples(count)
        with show.output.progress("held-out questions") as bar:
            summaries = demo_table(engine, in_page, samples, lambda done, total, text: bar(done, total, ""))
    show.text(f"\n{len(samples)} held-out questions over 3 or 4 pages each, their paragraphs as chunks:")
    show.table(summaries)


def _ask_three(engine: Engine, in_page: ChunkStore, alone: ChunkStore, show: _Show) -> None:
    """Blended as `ask` does; and as chunks are that were computed alone, put one behind the other without repair."""
    from cacheblend_cli.api import BlendConfig, Question, SamplingParams
    from cacheblend_cli.demo import questions

    ways = (("blended", in_page, BlendConfig()), ("plain reuse", alone, BlendConfig(mode="reuse")))
    shown = 0
    show.text("\nThree questions that the two answer differently:")
    for item in (q for q in questions() if q.across):
        answers = []
        for _, store, blend in ways:
            question = Question(item.question, (), blend, SamplingParams(max_tokens=32))
            answers.append(engine.ask(store, engine.search(store, question)))
        if answers[0].text == answers[1].text:
            continue
        show.text(f"\n> {item.question}")
        for (name, _, _), answer in zip(ways, answers, strict=True):
            right = answer.text.strip() == item.answer
            show.record({"question": item.question, "expected": item.answer, "right": right, **answer.to_dict()})
            show.text(f"  {name:<12}{'right' if right else 'WRONG'}  {answer.text.strip()}")
        shown += 1
        if shown == 3:
            return


def _real(settings: Settings, folder: Path, show: _Show) -> None:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.api import PrecomputeOptions
    from cacheblend_cli.evaluation.demo_real import MODULES, QUESTION, ask_both, write_documents
    from cacheblend_cli.model.named import INSTALL, SMOLLM2, smollm2_file

    if smollm2_file() is None:
        show.output.note(f"the second part needs a real model: {INSTALL}")
        return
    show.text("\n2. Python's own documentation, and SmolLM2-135M-Instruct\n")
    engine = options.load_engine(replace(settings, model=SMOLLM2, lora=""), show.output)
    pages = folder / "pages"
    pages.mkdir()
    files = [str(file) for file in write_documents(pages)]
    with ChunkStore.open(folder / "real", mode="write") as store:
        report = engine.precompute(store, files, PrecomputeOptions(), lambda event: None)
        show.output.note(
            f"precomputed {len(files)} pages ({', '.join(MODULES)}): {report.tokens:,} tokens, {format_size(report.bytes)} of KV "
            f"in {report.seconds:.1f} s"
        )
        pair = ask_both(engine, store)
    show.text(f"\n> {QUESTION}")
    for name, answer in (("full prefill", pair.full), ("blended", pair.blended)):
        show.record({"question": QUESTION, **answer.to_dict()})
        show.text(f"\n  {name}: first token after {answer.timing.ttft_s:.2f} s")
        show.text(textwrap.fill(answer.text, 76, initial_indent="    ", subsequent_indent="    "))
    verify = pair.blended.verify
    assert verify is not None
    show.text(
        f"\n{pair.full.prompt_tokens:,} tokens of prompt; of {pair.blended.cached_tokens:,} stored ones {pair.blended.recomputed_tokens} are computed again."
    )
    show.text(f"The first token comes {pair.times_sooner:.1f} times sooner.")
    show.text(f"{pair.agreeing} of the {verify.answer_tokens} tokens of full prefill's answer are blending's, too.")
