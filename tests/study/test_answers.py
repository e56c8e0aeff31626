"""The set of whole answers and its scores."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from study_modules import STUDY, study_modules

from cacheblend_cli.evaluation.evaluate import FULL, Results
from cacheblend_cli.evaluation.records import Record
from cacheblend_cli.evaluation.samples import Context, Sample
from cacheblend_cli.evaluation.settings import Setting
from cacheblend_cli.types import BlendParams

REUSE = Setting("reuse", BlendParams(mode="reuse"))


@pytest.fixture(scope="module")
def study() -> Iterator[dict[str, ModuleType]]:
    with study_modules(register=True) as load:
        yield {name: load(name) for name in ("sets", "results", "answer_set", "answer_scores")}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Passages of which the third has the answer of item 4 at its end."""
    text = " ".join(f"word {i}, of nothing in particular, is written in this place." for i in range(60))
    contexts = [{"title": "", "text": f"passage {i}. {text}"} for i in range(10)]
    contexts[2]["text"] += " Go Down Records is based in Savignano sul Rubicone."
    items = [{"question": f"question {i}?", "answers": ["no"], "ctxs": contexts} for i in range(5)]
    (tmp_path / "musique_dev.json").write_text(json.dumps(items))
    return tmp_path


def test_each_answer_is_in_a_chunk_of_its_question(study: dict[str, ModuleType], data: Path) -> None:
    samples = study["answer_set"].answer_samples(data)
    assert samples == study["answer_set"].answer_samples(data)
    assert Counter(s.tags["part"] for s in samples) == {"hops": 1, "office": 36, "needles": 44, "records": 40}
    assert len({(s.question, s.contexts) for s in samples}) == len(samples)
    assert Counter(s.tags["part"] for s in samples[:30]) == {"office": 9, "needles": 11, "records": 10}
    for sample in samples:
        assert any(sample.answers[0].lower() in context.text.lower() for context in sample.contexts), sample.question
        assert sample.question.count(" only.") == 1


def test_a_passage_is_cut_around_its_answer(study: dict[str, ModuleType], data: Path) -> None:
    [sample] = study["answer_set"].hops(data)
    assert [len(context.text.split()) for context in sample.contexts] == [150] * 4
    assert sample.contexts[0].text.startswith("passage 0. ")
    assert sample.contexts[2].text.endswith("Savignano sul Rubicone.\n\n")


def test_hops_ask_for_a_passage_behind_the_first(study: dict[str, ModuleType]) -> None:
    rows = [json.loads(line) for line in (STUDY / "single_hops.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len({row["question"] for row in rows}) == 80
    assert {row["passage"] for row in rows} == {1, 2, 3}  # the first chunk of a prompt is exact
    assert max(Counter((row["item"], row["passage"]) for row in rows).values()) == 1


def test_records_are_chunks_of_a_page_each(study: dict[str, ModuleType]) -> None:
    for sample in study["answer_set"].records():
        assert all(context.text.startswith("# ") and context.text.count("# ") == 1 for context in sample.contexts)


def record(answer: str) -> Record:
    return Record("", "", "", answer, 0, 0, 0, 0, 0.0, 0.0, 0.0, same_answer=False, kl=(0.1,), top1=(True,))


def test_answers_end_at_their_first_line(study: dict[str, ModuleType]) -> None:
    sample = Sample("who?", ("Mara Lind",), (Context("Mara Lind leads."),), {"part": "office"})
    other = replace(sample, answers=("9 euros",), tags={"part": "hops"})
    full = [replace(record("Mara Lind\nWhat else?"), same_answer=None), replace(record("9 euros"), same_answer=None)]
    reused = [record(" Mara Lind\nAnd now?"), replace(record("Mara"), same_answer=True)]
    results = Results([FULL, REUSE], {FULL.label: full, "reuse": reused})
    scored = study["answer_scores"].first_lines(results, [sample, other])
    first, second = scored.by_label["reuse"]
    assert (first.answer, first.exact_match, first.f1, first.same_answer) == ("Mara Lind", True, 1.0, False)
    assert (second.exact_match, second.f1, second.same_answer) == (False, 0.0, True)
    parts = study["answer_scores"].parts_of(scored, [sample, other])
    assert [(p["part"], p["questions"], p["f1"]["reuse"]) for p in parts] == [("office", 1, 1.0), ("hops", 1, 0.0)]


def test_what_no_text_has_is_counted(study: dict[str, ModuleType]) -> None:
    sample = Sample("how much?", ("9 euros",), (Context("It costs 9 euros for guests."),))
    answers = {"9 euros": False, "It costs 19 euros": True, "nothing": False}
    found = {text: study["answer_scores"].has_unsupported(sample, record(text)) for text in answers}
    assert found == answers
    records = [record("19 euros"), record("9 euros")]
    results = Results([FULL, REUSE], {FULL.label: [record("9 euros")] * 2, "reuse": records})
    rows = study["results"].rows_of(results, [sample] * 2, ("unsupported", "found"))
    assert rows[1]["unsupported"] == 0.5
    assert rows[1]["found"] == 1.0  # "9 euros" is a part of "19 euros"
