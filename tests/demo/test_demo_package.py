"""The bundled demo: it is all there, small, and the model answers from its context."""

from __future__ import annotations

import re
from pathlib import Path

from cacheblend_store import ChunkStore

from cacheblend_cli.demo import handbook_dir, model_dir, questions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.evaluation.evaluate import FULL, EvaluateOptions, evaluate
from cacheblend_cli.evaluation.samples import read_samples
from cacheblend_cli.evaluation.settings import Setting
from cacheblend_cli.evaluation.summary import summarise
from cacheblend_cli.types import BlendParams

HELDOUT = Path(__file__).with_name("heldout.jsonl")


def test_sizes_and_counts() -> None:
    assert sum(f.stat().st_size for f in model_dir().iterdir()) <= 16 << 20
    pages = sorted(handbook_dir().glob("*.md"))
    assert len(pages) >= 30
    assert all(len(p.read_text().split("\n\n")) >= 4 for p in pages)  # a heading and three paragraphs


def test_every_question_is_answered_by_its_page() -> None:
    for item in questions():
        page = (handbook_dir().parent / item.source).read_text()
        value = re.findall(r" is (?:a )?(.+)\.$", item.answer)[0]
        assert value in page
        name = page.splitlines()[0].removeprefix("# ")
        assert name in item.question


def test_a_later_paragraph_does_not_name_its_subject() -> None:
    for page in handbook_dir().glob("*.md"):
        heading, _, *later = page.read_text().split("\n\n")
        name = heading.removeprefix("# ")
        assert not any(part in paragraph for part in name.split() for paragraph in later)


def test_full_prefill_answers_and_reuse_does_worse(tmp_path: Path) -> None:
    engine = Engine.load(EngineConfig(model="handbook"))
    samples = [s for s in read_samples(HELDOUT) if s.tags["names"] == "known" and s.tags["across"]][::24]
    settings = [FULL, Setting("reuse", BlendParams(mode="reuse")), Setting("all", BlendParams(ratio=1.0))]
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        summaries = summarise(evaluate(engine, store, samples, settings, EvaluateOptions(24)))
    full, reuse, everything = (s.exact_match.value if s.exact_match else 0.0 for s in summaries)
    assert full >= 0.85
    assert reuse <= full - 0.2
    assert everything == full
