"""JSON Lines files that a run appends to and a later run continues."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from cacheblend_cli.errors import UsageError

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
