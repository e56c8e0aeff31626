"""Where output goes: answer and data on stdout, everything else on stderr; one object that tests can replace."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO


class Output:
    """Streams and their TTY flags. Rich is imported only when something is drawn."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None, quiet: bool = False) -> None:
        self.out, self.err, self.quiet = out or sys.stdout, err or sys.stderr, quiet
        self.out_tty, self.err_tty = self.out.isatty(), self.err.isatty()
        self.color = self.err_tty and "NO_COLOR" not in os.environ

    def text(self, text: str, end: str = "\n") -> None:
        """Data for stdout. On a terminal control characters are made visible; a pipe gets them raw."""
        self.out.write((visible(text) if self.out_tty else text) + end)
        self.out.flush()

    def json(self, record: Any) -> None:
        """One JSON object a line."""
        self.out.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.out.flush()

    def note(self, text: str) -> None:
        """A message on stderr, not with --quiet."""
        if not self.quiet:
            self._err(text, "2")

    def warn(self, text: str) -> None:
        self._err(f"warning: {text}", "33")

    def error(self, message: str, hint: str | None) -> None:
        self._err(f"error: {message}", "31")
        if hint:
            self._err(f"hint: {hint}", "2")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()) -> None:
        """A plain aligned table on stdout. right: indexes of the columns to align right."""
        cells = [[visible(str(c)) for c in row] for row in [list(columns), *rows]]
        widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
        for row in cells:
            parts = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            self.out.write("  ".join(parts).rstrip() + "\n")
        self.out.flush()

    @contextmanager
    def progress(self, description: str) -> Iterator[Callable[[int, int, str], None]]:
        """A progress bar on stderr when that is a terminal; calls are (done, total, text beside the bar)."""
        if self.quiet or not self.err_tty:
            yield lambda done, total, text: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        console = Console(file=self.err, no_color=not self.color)
        columns = (
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(description, total=None, note="")
            yield lambda done, total, text: bar.update(task, completed=done, total=total, note=text)

    def _err(self, text: str, style: str) -> None:
        text = visible(text) if self.err_tty else text
        self.err.write(f"\x1b[{style}m{text}\x1b[0m\n" if self.color else text + "\n")
        self.err.flush()


def visible(text: str) -> str:
    """Control characters but newline and tab as their Unicode pictures, so that text cannot drive the terminal."""
    return "".join(_picture(c) if _is_control(c) else c for c in text)


def _is_control(c: str) -> bool:
    return (
        (c < " " and c not in "\n\t")
        or "\x7f" <= c <= "\x9f"
        or c in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    )


def _picture(c: str) -> str:
    return chr(0x2400 + ord(c)) if c < " " else "\u2421" if c == "\x7f" else "\ufffd"
