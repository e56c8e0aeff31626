"""Rows of JSON, a line each, that a run appends to and a later one goes on from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from cacheblend_cli.errors import UsageError

T = TypeVar("T")


class JsonLines(Generic[T]):
    """A file of rows, made if it is not there. rows: those that it had; an incomplete last one, of a run that was interrupted, is cut
    off."""

    def __init__(self, path: Path, parse: Callable[[Any], T], begin: str, what: str) -> None:
        """parse: makes a row of a line's value; raises ValueError. begin: of every line, so that nothing of another file is cut off.
        what: the rows, for messages. Raises UsageError for a file that holds something else or cannot be written."""
        self.rows, number = list[T](), 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes() if path.exists() else b""
            *lines, torn = data.split(b"\n")
            for number, line in enumerate((*lines, torn), 1):
                if number <= len(lines):
                    self.rows += [parse(json.loads(line))] if line.strip() else []
                elif not begin.encode().startswith(torn[: len(begin)]):
                    raise ValueError("it does not begin as one")
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
