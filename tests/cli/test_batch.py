"""Many questions of one file: answered side by side, told in order, and only those that are left."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
ASK = ("ask", "--batch", "q.jsonl", "--max-tokens", "3", "--json", "--ids")


@pytest.fixture
def questions(stored: list[str], tmp_path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"question": f"question {i}?", "chunks": [stored[i % len(stored)], stored[(i + 1) % len(stored)]]}
        for i in range(7)
    ]
    rows[3]["question"] = rows[1]["question"]
    write(tmp_path, rows)
    return rows


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def told(records: list[dict[str, Any]]) -> list[tuple[str, list[int]]]:
    return [(r["question"], r["generated_ids"]) for r in records]


def test_answers_come_in_order_and_are_those_of_each_alone(cli: Cli, questions: list[dict[str, Any]]) -> None:
    together = cli(*ASK, "--concurrency", "3")
    assert together.code == 0, together.err
    assert "7 answers" in together.err
    assert "tokens/s" in together.err.splitlines()[-1]
    alone = [
        cli("ask", q["question"], "--chunks", ",".join(q["chunks"]), "--local", *ASK[3:]).records[0] for q in questions
    ]
    expected = [(q["question"], a["generated_ids"]) for q, a in zip(questions, alone, strict=True)]
    assert told(together.records) == expected == told(cli(*ASK, "--concurrency", "1").records)
    assert [[c["status"] for c in r["chunks"]] for r in together.records] == [
        [c["status"] for c in a["chunks"]] for a in alone
    ]


def test_a_batch_goes_on_where_it_was_interrupted(cli: Cli, questions: list[dict[str, Any]], tmp_path: Path) -> None:
    whole = cli(*ASK, "--resume", "out/whole.jsonl")
    kept = (tmp_path / "out/whole.jsonl").read_bytes()
    assert told([json.loads(line) for line in kept.splitlines()]) == told(whole.records)
    lines = kept.splitlines(keepends=True)
    (tmp_path / "cut.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:50])
    rest = cli(*ASK, "--resume", "cut.jsonl")
    assert told(rest.records) == told(whole.records)[4:]
    found = [json.loads(line) for line in (tmp_path / "cut.jsonl").read_text().splitlines()]
    assert told(found) == told(whole.records)
    done = cli(*ASK, "--resume", "cut.jsonl")
    assert done.records == []
    assert "cut.jsonl already has all answers" in done.err


def test_failed_questions_are_asked_again(cli: Cli, questions: list[dict[str, Any]], tmp_path: Path) -> None:
    bad = [questions[0], {"question": "unknown?", "chunks": ["ffffffffffff"]}, questions[2]]
    write(tmp_path, bad)
    result = cli(*ASK, "--resume", "out.jsonl")
    assert result.code == 3
    assert [r.get("error") is None for r in result.records] == [True, False, True]
    write(tmp_path, [bad[0], {**questions[1], "question": "unknown?"}, bad[2]])
    again = cli(*ASK, "--resume", "out.jsonl")
    assert [r["question"] for r in again.records] == ["unknown?"]


def test_a_batch_is_json_lines_except_on_a_terminal(
    cli: Cli, questions: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = cli(*ASK).records
    piped = cli(*ASK[:5])
    assert told(records) == [(r["question"], g["generated_ids"]) for r, g in zip(piped.records, records, strict=True)]
    assert "> " not in piped.err
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = cli(*ASK[:5])
    assert shown.out == "".join(r["answer"] + "\n" for r in records)
    assert [line for line in shown.err.splitlines() if line.startswith("> ")] == [
        f"> {q['question']}" for q in questions
    ]


def test_quiet_answers_are_separated_by_an_empty_line(
    cli: Cli, questions: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, questions[:3])
    texts = [r["answer"] for r in cli(*ASK).records]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli(*ASK[:5], "-q").out == "\n".join(f"{text}\n" for text in texts)


def test_resume_refuses_other_files_and_single_questions(
    cli: Cli, questions: list[dict[str, Any]], tmp_path: Path
) -> None:
    for notes in ("my notes\n", "my notes"):
        (tmp_path / "notes.txt").write_text(notes)
        assert cli(*ASK, "--resume", "notes.txt").code == 2
        assert (tmp_path / "notes.txt").read_text() == notes
    assert cli("ask", "one?", "--resume", "x.jsonl").code == 2


def test_the_same_question_over_other_chunks_is_another_one(
    cli: Cli, questions: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The second of three questions fails; the next run answers that one, not the third again."""
    rows = [{"question": "what is this?", "chunks": q["chunks"]} for q in questions[:3]]
    write(tmp_path, [rows[0], {**rows[1], "chunks": ["ffffffffffff"]}, rows[2]])
    assert cli(*ASK, "--resume", "out.jsonl").code == 3
    write(tmp_path, rows)
    again = cli(*ASK, "--resume", "out.jsonl")
    assert [r["asked_chunks"] for r in again.records] == [rows[1]["chunks"]]
    assert cli(*ASK, "--resume", "out.jsonl").records == []
