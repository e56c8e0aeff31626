"""Ten questions about this project's documentation, asked of published models in full and blended."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from real_packages import EACH_MODEL, gguf

from cacheblend_cli.cli.main import run

pytestmark = pytest.mark.real
DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / f"{name}.md" for name in "gate glossary search selectors store tutorial your-data".split()]
QUESTIONS = {
    "Which database does the store use?": "lmdb",
    "Which hash function computes the key of a chunk?": "blake2b",
    "How many tokens does a chunk have at most?": "512",
    "Which file of the store holds the search index?": "search.sqlite3",
    "How large is the file reserve.tmp?": "2 mib",
    "Which selector chooses the tokens whose KV changed most?": "hkvd",
    "Which command makes the bytes of deleted chunks free in the file?": "compact",
    "Which command compares full prefill, plain reuse and blending on pages about invented products?": "demo",
    "Which variable moves the folder of the store?": "cacheblend_store",
    "Which option of ask writes a web page?": "--html",
}
"""Question: text that a right answer contains, in lower case."""
LEAST_RIGHT = {"qwen2.5-coder-0.5b-instruct-q4_k_m": 4, "qwen2.5-coder-1.5b-instruct-q4_k_m": 7}
"""Model: questions that it answers right in full, and blended. The others are too small, or no instruct model, to be
held to a number."""


@pytest.mark.parametrize("name", EACH_MODEL)
def test_ten_questions_over_the_documentation(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--model", str(gguf(name)), "--store", str(tmp_path / "store"), "--json"]
    stored = lines(capsys, run(["precompute", *map(str, PAGES), *common]))
    assert {Path(line["source"]).name for line in stored} == {page.name for page in PAGES}
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps({"question": q}) + "\n" for q in QUESTIONS))
    ask = ["ask", "--batch", str(tmp_path / "questions.jsonl"), "--top-k", "3", "--max-tokens", "32", *common]
    right: dict[str, int] = {}
    for mode in ("full", "blend"):
        answers = lines(capsys, run([*ask, "--mode", mode]))
        assert [a["mode"] for a in answers] == [mode] * len(QUESTIONS)
        assert all(a["answer"].strip() for a in answers)
        right[mode] = sum(
            expected in a["answer"].lower() for a, expected in zip(answers, QUESTIONS.values(), strict=True)
        )
        report(name, mode, answers)
        if mode == "blend":
            assert all(chunk["status"] in ("exact", "blended") for a in answers for chunk in a["chunks"])
            assert all(a["recompute_fraction"] < 0.5 for a in answers)
    assert min(right.values()) >= LEAST_RIGHT.get(name, 0), right


def lines(capsys: pytest.CaptureFixture[str], code: int) -> list[dict[str, Any]]:
    out, err = capsys.readouterr()
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def report(name: str, mode: str, answers: list[dict[str, Any]]) -> None:
    """Write questions and answers where REAL_ANSWERS names a folder, for reading."""
    if folder := os.environ.get("REAL_ANSWERS"):
        text = "\n".join(f"{q}\n    {a['answer'].strip()!r}" for q, a in zip(QUESTIONS, answers, strict=True))
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}-{mode}.txt").write_text(text + "\n")
