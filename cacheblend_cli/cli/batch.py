"""`ask --batch`: many answers shown in the order of the file, kept, and asked for where an earlier run left off."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cacheblend_cli.cli.answering import Answered
from cacheblend_cli.cli.answers import Result
from cacheblend_cli.cli.exits import report
from cacheblend_cli.cli.inputs import QuestionInput
from cacheblend_cli.cli.output import Output
from cacheblend_cli.errors import ExitCode, UsageError

_Key = tuple[str, tuple[str, ...] | None]
"""A question and the chunks that were named for it."""


class Results:
    """Answers of a batch that --resume keeps: JSON lines in the order of the questions.

    An incomplete line is dropped, and its question is asked again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answered: Counter[_Key] = Counter()
        whole = 0
        try:
            lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                self._answered[_answered_by(line, path)] += 1
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = path.open("ab")
            self._stream.truncate(whole)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}", "name another file for --resume") from error

    def left(self, questions: Sequence[QuestionInput]) -> list[QuestionInput]:
        """Return the questions without an answer in the file. Duplicates count separately."""
        answered, found = Counter(self._answered), []
        for item in questions:
            key = (item.question, item.chunks)
            if answered[key] > 0:
                answered[key] -= 1
            else:
                found.append(item)
        return found

    def add(self, record: dict[str, Any]) -> None:
        self._stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def question_fields(question_input: QuestionInput) -> dict[str, Any]:
    """Return the fields of an answer's record that identify its question."""
    return {"question": question_input.question} | (
        {} if question_input.chunks is None else {"asked_chunks": list(question_input.chunks)}
    )


def _answered_by(line: bytes, path: Path) -> _Key:
    """Return the question and chunks that a record answers."""
    try:
        record = json.loads(line)
        question, chunks = record["question"], record.get("asked_chunks")
        if isinstance(question, str):
            return question, None if chunks is None else tuple(chunks)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UsageError(f"{path} holds something else than answers of a batch", "name another file for --resume")


def run_batch(
    answered: Iterator[Answered],
    show: Callable[[Answered], dict[str, Any]],
    output: Output,
    *,
    as_json: bool,
    results: Results | None,
) -> list[int]:
    """Show the answers, or the plans, as they come. A question that cannot be answered is reported, and the others go on.
    Returns the exit codes of those. show: shows one and gives its record."""
    started, failed, count, tokens = time.perf_counter(), [], 0, 0
    for item in answered:
        if not as_json:
            output.note(f"> {item.question_input.question}")
        if item.error is None:
            record = show(item)
            if isinstance(item.found, Result):
                count, tokens = count + 1, tokens + record["generated_tokens"]
                if results is not None:
                    results.add(record)
        elif getattr(item.error, "exit_code", None) in (ExitCode.USAGE, ExitCode.NOT_FOUND):
            if as_json:
                output.json({**question_fields(item.question_input), "error": getattr(item.error, "message", "")})
            failed.append(report(item.error, output))
        else:
            raise item.error
    seconds = time.perf_counter() - started
    if count > 1:
        output.note(
            f"{count} answers in {seconds:.1f} s: {count / seconds:.2f} questions/s, {tokens / seconds:.1f} tokens/s"
        )
    return failed
