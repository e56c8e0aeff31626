"""Where questions and chunk ids come from: arguments, files, stdin, and the pipes between the commands."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
from pathlib import Path

import pytest

from cacheblend_cli.cli.inputs import QuestionInput, read_ids, read_questions
from cacheblend_cli.errors import NotFoundError, UsageError

IDS = tuple(f"{i:040x}" for i in range(9))


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def feed(data: str | bytes) -> None:
        data = data.encode() if isinstance(data, str) else data
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return feed


def test_many_ids_in_the_argument_are_no_file_name() -> None:
    assert read_ids(",".join(IDS)) == IDS  # longer than any file's name may be
    assert read_ids("abc, def") == ("abc", "def")
    assert read_ids("") == ()


def test_ids_in_a_file_are_lines_or_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    path.write_text(f"{IDS[0]}\n\n  {IDS[1]},{IDS[2]}\n" + f'{{"id": "{IDS[3]}", "source": "x"}}\n')
    assert read_ids(str(path)) == IDS[:4]


def test_ids_on_stdin(stdin) -> None:  # type: ignore[no-untyped-def]
    stdin("\n".join(IDS))
    assert read_ids("-") == IDS
    stdin("")
    with pytest.raises(UsageError, match="stdin"):
        read_ids("-")


@pytest.mark.parametrize("text", ['{"source": "x"}', "{not json", '{"id"'])
def test_json_without_an_id_is_named_with_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ids"
    path.write_text(f"abc\n{text}\n")
    with pytest.raises(UsageError, match="ids:2"):
        read_ids(str(path))


def test_text_that_is_neither_an_id_nor_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"ids\.txt"):
        read_ids("ids.txt")
    path = tmp_path / "ids"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="UTF-8"):
        read_ids(str(path))


def test_a_question_on_stdin_loses_its_line_end(stdin) -> None:  # type: ignore[no-untyped-def]
    stdin("Who leads billing?\n")
    assert read_questions("-", None, None) == [QuestionInput("Who leads billing?", None)]
    stdin("\n")
    with pytest.raises(UsageError, match="empty"):
        read_questions("-", "abc", None)
    stdin(b"caf\xe9")
    with pytest.raises(UsageError, match="UTF-8"):
        read_questions("-", None, None)


@pytest.mark.parametrize(("question", "chunks", "batch"), [("-", "-", None), (None, "-", Path("-"))])
def test_stdin_is_read_once(question: str | None, chunks: str | None, batch: Path | None) -> None:
    with pytest.raises(UsageError, match="stdin"):
        read_questions(question, chunks, batch)


def test_a_batch_takes_its_own_chunks_or_those_of_the_flag(tmp_path: Path, stdin) -> None:  # type: ignore[no-untyped-def]
    lines = (
        '{"question": "one?", "chunks": ["aa", "bb"]}\n\n{"question": "two?"}\n{"question": "three?", "chunks": []}\n'
    )
    (tmp_path / "q").write_text(lines)
    asked = [QuestionInput("one?", ("aa", "bb")), QuestionInput("two?", ("cc",)), QuestionInput("three?", ())]
    assert read_questions(None, "cc", tmp_path / "q") == asked
    stdin(lines)
    assert read_questions(None, None, Path("-"))[1] == QuestionInput("two?", None)


@pytest.mark.parametrize("separator", ["\u2028", "\u0085"])
def test_only_a_newline_ends_a_line(tmp_path: Path, stdin, separator: str) -> None:  # type: ignore[no-untyped-def]
    question = f"one{separator}two?"
    line = f'{{"question": {json.dumps(question, ensure_ascii=False)}}}\r\n'
    (tmp_path / "q").write_text(line * 2, encoding="utf-8", newline="")
    assert read_questions(None, None, tmp_path / "q") == [QuestionInput(question, None)] * 2
    record = {"id": IDS[0], "source": f"a{separator}b.md"}
    stdin(json.dumps(record, ensure_ascii=False) + "\r\n")
    assert read_ids("-") == IDS[:1]


def test_ids_come_through_a_named_pipe(tmp_path: Path) -> None:
    """As `--chunks <(cacheblend search ... -q)` hands them over."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_text("\n".join(IDS)))
    writer.start()
    try:
        assert read_ids(str(path)) == IDS
    finally:
        with contextlib.suppress(OSError):  # had nobody read it, the writer would wait for ever
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        writer.join()
    with pytest.raises(NotFoundError):
        read_ids(str(tmp_path))


@pytest.mark.parametrize(
    "line", ["{", "5", "[]", "{}", '{"question": 5}', '{"question": " "}', '{"question": "q", "chunks": "aa"}']
)
def test_a_bad_line_of_a_batch_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "q").write_text('{"question": "fine?"}\n' + line)
    with pytest.raises(UsageError, match="q:2"):
        read_questions(None, None, tmp_path / "q")


def test_a_batch_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="none"):
        read_questions(None, None, tmp_path / "none")
    with pytest.raises(UsageError):
        read_questions("q", None, tmp_path / "none")


def test_a_batch_without_a_question_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text("\n")
    with pytest.raises(UsageError):
        read_questions(None, None, tmp_path / "q.jsonl")
