"""Questions and chunk ids from arguments, files and stdin, checked before a model is loaded."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cacheblend_cli.cli.output import Output
from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.text_files import check_text, decode_text, read_text

_EXAMPLE = 'write it as an argument: cacheblend ask "Who leads billing?"'
_LINE = 'each line is {"question": "...", "chunks": ["ID", ...]}, chunks being optional'


@dataclass(frozen=True)
class QuestionInput:
    """A question and its chunk ids (or unique prefixes of ids), None to search."""

    question: str
    chunks: tuple[str, ...] | None = None


def read_questions(question: str | None, chunks: str | None, batch: Path | None) -> list[QuestionInput]:
    """Return the questions of the command line. Only one of question, --chunks and --batch can be "-" (stdin). Without
    a question, it is read from a pipe. Raises UsageError, NotFoundError."""
    if [question, chunks, str(batch)].count("-") > 1:
        raise UsageError(
            "- was given twice, and stdin can be read only once", "give the question as an argument, or ids in a file"
        )
    if batch is not None and question is not None:
        raise UsageError("a question and --batch were given together", "give one of them")
    text = _question(question, chunks) if batch is None else ""
    named = None if chunks is None else read_ids(chunks)
    if batch is None:
        return [QuestionInput(text, named)]
    questions = list(_batch(batch, named))
    if not questions:
        raise UsageError(f"{batch} contains no question", "did the command that wrote it find anything?")
    return questions


def _question(question: str | None, chunks: str | None) -> str:
    """Return the question, read from stdin if it is "-", or if it is missing and stdin is a pipe without another
    use."""
    is_piped = sys.stdin is not None and not sys.stdin.isatty()
    if question == "-" or (question is None and is_piped and chunks != "-"):
        text = read_stdin("the question").strip()
    else:
        text = question or ""
    if not text.strip():
        raise UsageError("there is no question" if question is None else "the question is empty", _EXAMPLE)
    check_text(text, "the question")
    return text


def read_ids(text: str) -> tuple[str, ...]:
    """Return the ids of --chunks: ID,ID, or a file of ids or JSON lines with "id", or "-" for stdin. "" means no
    chunks. A file or stdin without ids is a UsageError, since the command that wrote it probably failed."""
    if text == "-":
        name, lines = "stdin", read_stdin("chunk ids")
    elif os.path.exists(text) and not os.path.isdir(text):  # a pipe too: --chunks <(cacheblend search ... -q)
        name, lines = text, read_text(Path(text))
    else:
        ids = tuple(part for part in text.replace(",", " ").split() if part)
        for part in ids:
            if any(c not in "0123456789abcdefABCDEF" for c in part):
                raise NotFoundError(
                    f"{part!r} is neither a chunk id nor a file", "ids are hexadecimal; list them: cacheblend chunks ls"
                )
        return ids
    ids = tuple(found for n, line in enumerate(lines.split("\n"), 1) for found in _ids_of(line, f"{name}:{n}"))
    if not ids:
        raise UsageError(f"{name} contains no chunk id", "did the command that wrote it find anything?")
    return ids


def _ids_of(line: str, place: str) -> list[str]:
    line = line.strip()
    if not line.startswith("{"):
        return line.replace(",", " ").split()
    try:
        found = json.loads(line)["id"]
    except (ValueError, KeyError) as error:
        raise UsageError(f'{place} is JSON without an "id"', 'each line is an id, or JSON with an "id"') from error
    return [str(found)]


def _batch(path: Path, chunks: tuple[str, ...] | None) -> Iterator[QuestionInput]:
    text = read_stdin("questions") if str(path) == "-" else read_text(path)
    for number, line in enumerate(text.split("\n"), 1):  # str.splitlines also splits at U+2028, which JSON may contain
        if line.strip():
            place = f"{path}:{number}"
            try:
                row = msgspec.json.decode(line, type=QuestionInput)  # other fields are ignored
            except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
                raise UsageError(f"{place} is not a question: {error}", _LINE) from error
            if not row.question.strip():
                raise UsageError(f"{place} has no question", _LINE)
            check_text(row.question, f"the question of {place}")
            yield QuestionInput(row.question, chunks) if row.chunks is None else row


def yes_or_no(question: str, output: Output, unasked: UsageError | None) -> bool:
    """Ask on the terminal. If there is none to ask on, raise `unasked`, or return False if it is None."""
    if not can_ask(output):
        if unasked is None:
            return False
        raise unasked
    return _typed(f"{question} [y/N] ", output).lower() in ("y", "yes")


def can_ask(output: Output) -> bool:
    """Return whether there is a terminal to ask on."""
    return sys.stdin.isatty() and output.err_tty


def choice(question: str, num_choices: int, default: int, output: Output) -> int | None:
    """Ask on the terminal for a number from 1, Enter for the default. Return None for q and Ctrl-D."""
    while (answer := _typed(f"{question} [{default}] ", output, end="q")) not in ("q", "quit", "n", "no"):
        if not answer:
            return default
        if answer.isdecimal() and 1 <= int(answer) <= num_choices:
            return int(answer)
        output.plain(f"type a number from 1 to {num_choices}, or q for none")
    return None


def _typed(prompt: str, output: Output, end: str = "") -> str:
    """Show a prompt and return the typed line. end: value for Ctrl-D."""
    output.end_status()
    output.err.write(prompt)
    output.err.flush()
    line = ""
    try:
        line = sys.stdin.readline()
    finally:
        if not line:  # Ctrl-D, Ctrl-C
            output.err.write("\n")
    return line.strip() if line else end


def read_stdin(what: str) -> str:
    """Read all of stdin as text, with a message if it is a terminal. Raises UsageError if it is not UTF-8."""
    if sys.stdin.isatty():
        sys.stderr.write(f"reading {what} from the terminal; end with Ctrl-D\n")
    return decode_text(sys.stdin.buffer.read(), "stdin")
