"""`ask --batch`: show many answers in the order of the questions, and keep them in a file to resume from."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cacheblend_cli.cli.answer_output import AnswerResult
from cacheblend_cli.cli.ask_session import BatchResult
from cacheblend_cli.cli.exits import report
from cacheblend_cli.cli.inputs import QuestionInput
from cacheblend_cli.cli.output import Output
from cacheblend_cli.errors import ExitCode
from cacheblend_cli.json_lines import JsonLines

_Key = tuple[str, tuple[str, ...] | None]
"""A question and its named chunks."""


class AnswerFile:
    """The file of --resume: answers in the order of the questions. An incomplete last line is ignored."""

    def __init__(self, path: Path) -> None:
        self.file = JsonLines(path, _question_of, '{"question": "', "an answer of a batch")

    def remaining(self, questions: Sequence[QuestionInput]) -> list[QuestionInput]:
        """Return the questions without an answer in the file. Duplicates count separately."""
        answered, found = Counter(self.file.rows), []
        for item in questions:
            key = (item.question, item.chunks)
            if answered[key] > 0:
                answered[key] -= 1
            else:
                found.append(item)
        return found


def question_fields(question_input: QuestionInput) -> dict[str, Any]:
    """Return the fields of an answer's record that identify its question."""
    return {"question": question_input.question} | (
        {} if question_input.chunks is None else {"asked_chunks": list(question_input.chunks)}
    )


def _question_of(record: Any) -> _Key:
    """Return the question and chunks of an answer's record. Raises ValueError."""
    try:
        question, chunks = record["question"], record.get("asked_chunks")
        if isinstance(question, str):
            return question, None if chunks is None else tuple(chunks)
    except (KeyError, TypeError, AttributeError):
        pass
    raise ValueError("no question")


def run_batch(
    batch_results: Iterator[BatchResult],
    show: Callable[[BatchResult], dict[str, Any]],
    output: Output,
    *,
    as_json: bool,
    answer_file: AnswerFile | None,
) -> list[int]:
    """Show answers or plans as they finish. Report questions that fail, continue, and return their exit codes.

    show: show one result and return its record.
    """
    started, failed, count, tokens = time.perf_counter(), [], 0, 0
    for item in batch_results:
        if not as_json:
            output.note(f"> {item.question_input.question}")
        if item.error is None:
            record = show(item)
            if isinstance(item.result, AnswerResult):
                count, tokens = count + 1, tokens + record["generated_tokens"]
                if answer_file is not None:
                    answer_file.file.add(record)
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
