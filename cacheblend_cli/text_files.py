"""Read and write UTF-8 text and JSON Lines for users, with errors that name the file and position."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from cacheblend_cli.errors import NotFoundError, UsageError


def read_text(path: Path) -> str:
    """Return the text of a file without byte order mark. Line ends are not converted.

    Raises NotFoundError if it does not exist, UsageError if it cannot be read or is not UTF-8.
    """
    with reading(path):
        data = path.read_bytes()
    return decode_text(data, str(path))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert errors of reading a file to NotFoundError and UsageError."""
    try:
        yield
    except FileNotFoundError:
        raise NotFoundError(f"no such file: {path}", "check the path") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "check the path and its permissions") from error


def decode_text(data: bytes, name: str) -> str:
    """Decode bytes like `read_text`. name: used in the error."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} has invalid UTF-8 at byte {error.start}", "convert it to UTF-8") from error


def write_text(path: Path, text: str, hint: str, *, new: bool = False) -> None:
    """Write a file. new: fail if it exists. Raises UsageError with the hint if it cannot be written."""
    try:
        with path.open("x" if new else "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", hint) from error


def check_text(text: str, name: str) -> None:
    """Raise UsageError for text that tokenizers reject: lone surrogates, from arguments that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} is not UTF-8 at character {error.start + 1}", "convert it: iconv -t utf-8") from None


T = TypeVar("T")


class JsonLines(Generic[T]):
    """A JSON Lines file, created if missing. rows: the rows it had.

    An incomplete last row of an interrupted run is removed.
    """

    def __init__(self, path: Path, parse: Callable[[Any], T], begin: str, what: str) -> None:
        """Open the file and read its rows. Raises UsageError if it has other content or cannot be written.

        parse: converts the value of a line to a row; raises ValueError.
        begin: start of every line, so that a different file is not truncated.
        what: name of the rows for messages.
        """
        self.rows, number = list[T](), 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes() if path.exists() else b""
            *lines, torn = data.split(b"\n")
            for number, line in enumerate((*lines, torn), 1):
                if number <= len(lines):
                    self.rows += [parse(json.loads(line))] if line.strip() else []
                elif not begin.encode().startswith(torn[: len(begin)]):
                    raise ValueError(f"the last line does not begin with {begin}")
            self._stream = path.open("ab")
            self._stream.truncate(len(data) - len(torn))
        except ValueError as error:
            message = f"{path}:{number} is not {what}: {error}"
            raise UsageError(message, "name another file") from error
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}", "name another file") from error

    def add(self, record: dict[str, Any]) -> None:
        self._stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()
