"""What `ask` is asked: questions and chunk ids from arguments, files and stdin, checked before a model is loaded."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.text_files import check_text, decode_text, read_text

_EXAMPLE = 'write it as an argument: cacheblend ask "Who leads billing?"'
_LINE = 'each line is {"question": "...", "chunks": ["ID", ...]}, chunks being optional'


@dataclass(frozen=True)
class Asked:
    """A question and the ids of its chunks (or unique beginnings of ids), None to search for them."""

    question: str
    chunks: tuple[str, ...] | None


def read_asked(question: str | None, chunks: str | None, batch: Path | None) -> list[Asked]:
    """The questions of the command line. Only one of question, --chunks and --batch can be "-", for stdin; the question is
    read from a pipe without it, too."""
    if [question, chunks, str(batch) if batch else None].count("-") > 1:
        raise UsageError(
            "stdin can be read once, and - was given twice", "write the question as an argument, or ids to a file"
        )
    if batch is not None and question is not None:
        raise UsageError("a question and --batch were both given", "give one of them")
    if batch is None and question is None:
        question = read_stdin("the question").strip() if chunks != "-" and _is_piped() else ""
        if not question:
            raise UsageError("there is no question", _EXAMPLE)
    elif question == "-":
        question = read_stdin("the question").strip()
    if question is not None and not question.strip():
        raise UsageError("the question is empty", _EXAMPLE)
    check_text(question or "", "the question")
    named = None if chunks is None else read_ids(chunks)
    if question is not None:
        return [Asked(question, named)]
    assert batch is not None
    asked = list(_batch(batch, named))
    if not asked:
        raise UsageError(f"there is no question in {batch}", "did the command that writes them find anything?")
    return asked


def read_ids(text: str) -> tuple[str, ...]:
    """The ids of --chunks: ID,ID, or a file of ids, or "-". A file has an id a line, or JSON lines with "id".

    "" is no chunk at all; a file or stdin without an id is an error, since then a command before this one failed.
    """
    if text == "-":
        name, lines = "stdin", read_stdin("chunk ids")
    elif os.path.exists(text) and not os.path.isdir(text):  # a pipe too: --chunks <(cacheblend search ... -q)
        name, lines = text, read_text(Path(text))
    else:
        ids = tuple(part for part in text.replace(",", " ").split() if part)
        for part in ids:
            if any(c not in "0123456789abcdefABCDEF" for c in part):
                raise NotFoundError(
                    f"{part!r} is no chunk id and no file", "ids are hex; list them: cacheblend chunks ls"
                )
        return ids
    ids = tuple(
        found for number, line in enumerate(lines.split("\n"), 1) for found in _ids_of(line, f"{name}:{number}")
    )
    if not ids:
        raise UsageError(f"there is no chunk id in {name}", "did the command that writes them find anything?")
    return ids


def _ids_of(line: str, place: str) -> list[str]:
    line = line.strip()
    if not line.startswith("{"):
        return line.replace(",", " ").split()
    try:
        found = json.loads(line)["id"]
    except (ValueError, KeyError) as error:
        raise UsageError(f"{place} is JSON without an id", 'each line is an id, or JSON with an "id"') from error
    return [str(found)]


def _batch(path: Path, chunks: tuple[str, ...] | None) -> Iterator[Asked]:
    text = read_stdin("questions") if str(path) == "-" else read_text(path)
    for number, line in enumerate(text.split("\n"), 1):  # str.splitlines also splits at U+2028, which JSON may contain
        if line.strip():
            try:
                row: Any = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{path}:{number} is no JSON: {error}", _LINE) from error
            yield _row(row, f"{path}:{number}", chunks)


def _row(row: Any, place: str, chunks: tuple[str, ...] | None) -> Asked:
    question = row.get("question") if isinstance(row, dict) else None
    if not isinstance(question, str) or not question.strip():
        raise UsageError(f"{place} has no question", _LINE)
    check_text(question, f"the question of {place}")
    named = row.get("chunks")
    if named is None:
        return Asked(question, chunks)
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise UsageError(f"{place} has chunks that are no list of ids", _LINE)
    return Asked(question, tuple(named))


def _is_piped() -> bool:
    return sys.stdin is not None and not sys.stdin.isatty()


def read_stdin(what: str) -> str:
    """All of stdin as text; a terminal is told what is waited for. Raises UsageError for what is no UTF-8."""
    if sys.stdin.isatty():
        sys.stderr.write(f"reading {what} from the terminal; end with Ctrl-D\n")
    return decode_text(sys.stdin.buffer.read(), "stdin")
