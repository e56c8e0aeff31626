"""Output streams: answers and data on stdout, everything else on stderr."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, TextIO

_ERASE_LINE = "\r\x1b[2K"
_REDRAW_S = 0.1
_LINE_EVERY_S = 60.0  # between progress messages without a terminal
_LEAST_WIDTH = 6
_BAR_CELLS, _ETA_CELLS = 40, 8  # of a progress bar and its share; of its remaining time
_BAR_WIDTH = 30
_LEAST_NOTE = 16  # cells


class Output:
    """Streams and their TTY flags; tests replace the streams. Rich is imported only to draw a progress bar. is_json:
    only `json` writes data; without, it writes nothing. verbose: show details, too."""

    _bar_shown: ClassVar[bool] = False  # the last line is a bar or status, which the next message erases
    _in_line: ClassVar[bool] = False  # the last text on the terminal has not ended its line

    def __init__(
        self, out: TextIO | None = None, err: TextIO | None = None, *, json: bool = False, quiet: bool = False, verbose: bool = False
    ) -> None:  # fmt: skip
        self.out, self.err = out or sys.stdout, err or sys.stderr
        self.is_json, self.quiet, self.verbose = json, quiet, verbose
        for stream in (self.out, self.err):  # escape characters that the locale cannot encode
            if hasattr(stream, "reconfigure"):
                with suppress(OSError):  # it flushes what a closed pipe or a full disk has not taken
                    stream.reconfigure(errors="backslashreplace")
        self.out_tty, self.err_tty = self.out.isatty(), self.err.isatty()
        self.animated = self.err_tty and os.environ.get("TERM") != "dumb"
        self.color = self.animated and not os.environ.get("NO_COLOR")

    def text(self, text: str, end: str = "\n") -> None:
        """Write data to stdout. Control characters are shown as symbols on a terminal and unchanged in a pipe."""
        if self.is_json:
            return
        self._erase_bar(self.out_tty)
        self.out.write((visible(text) if self.out_tty else text) + end)
        self.out.flush()
        if self.out_tty and text + end:
            Output._in_line = not (text + end).endswith("\n")

    def json(self, record: Any) -> None:
        """Write a JSON object on one line, with --json. Control characters are escaped on a terminal."""
        if not self.is_json:
            return
        self._erase_bar(self.out_tty)
        line = json.dumps(record, ensure_ascii=not _is_unicode(self.out))
        if self.out_tty:  # JSON itself escapes only those below U+0020
            line = "".join(f"\\u{ord(c):04x}" if _is_control(c) else c for c in line)
        self.out.write(line + "\n")
        self.out.flush()

    def result(self, record: Any, text: str) -> None:
        """Write a result to stdout: a JSON object with --json, else a text."""
        self.json(record)
        self.text(text)

    def done(self, record: Any, note: str) -> None:
        """Write what was done: a JSON object to stdout with --json, else a message to stderr unless --quiet."""
        self.json(record)
        if not self.is_json:
            self.note(note)

    def ids(self, ids: Iterable[str]) -> None:
        """Write ids to stdout with --quiet, unless --json."""
        for name in ids if self.quiet else ():
            self.text(name)

    def note(self, text: str) -> None:
        """Write a message to stderr unless --quiet."""
        self.styled([(text, "2")])

    def detail(self, text: str) -> None:
        """Write a message to stderr if --verbose was given."""
        if self.verbose:
            self.note(text)

    def status(self, text: str) -> None:
        """Show a status on a terminal until the next message, not within a line of an answer: it would be erased."""
        if self.animated and not self.quiet and not self._in_line:
            self.aside(cut(visible_line(text), shutil.get_terminal_size().columns - 1, ""))
            Output._bar_shown = True

    def end_status(self) -> None:
        self._erase_bar(True)

    def aside(self, piece: str) -> None:
        """Write a piece of streamed text to stderr, dim on a terminal, unless --quiet."""
        if not self.quiet:
            self._erase_bar(True)
            piece = visible(piece) if self.err_tty else piece
            self.err.write(f"\x1b[2m{piece}\x1b[0m" if self.color else piece)
            self.err.flush()

    def styled(self, pieces: Sequence[tuple[str, str]]) -> None:
        """Write a message to stderr in pieces of (text, SGR style or ""), unless --quiet."""
        if not self.quiet:
            self._message(pieces)

    def warn(self, text: str) -> None:
        self._message([(f"warning: {text}", "33")])

    def error(self, message: str, hint: str | None) -> None:
        self._message([(f"error: {message}", "31")])
        if hint:
            self._message([(f"hint: {hint}", "2")])

    def plain(self, text: str) -> None:
        """Write a message to stderr, also with --quiet."""
        self._message([(text, "")])

    def line(self, text: str) -> None:
        """Write a line of data; newlines and tabs in it are shown as symbols on a terminal."""
        self.text(visible_line(text) if self.out_tty else text)

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = (), ends: Sequence[int] = ()
    ) -> None:
        """Write an aligned table to stdout. right: indexes of right-aligned columns. On a terminal, other columns
        except the first are cut to fit the width, those in `ends` at their beginning."""
        if self.is_json:
            return
        show = visible_line if self.out_tty else str
        cells = [[show(str(c)) for c in row] for row in [list(columns), *rows]]
        widths = [max(num_cells(row[i]) for row in cells) for i in range(len(columns))]
        if self.out_tty:
            room = shutil.get_terminal_size().columns - 2 * (len(columns) - 1)
            _narrow(widths, [i for i in range(len(columns)) if i in ends or (i and i not in right)], room)
        mark = "\u2026" if _is_unicode(self.out) else "~"
        self._erase_bar(self.out_tty)
        for row in cells:
            parts = []
            for i, (text, width) in enumerate(zip(row, widths, strict=True)):
                part = cut(text, width, mark, at_start=i in ends)
                padding = " " * (width - num_cells(part))
                parts.append(padding + part if i in right else part + padding)
            self.out.write("  ".join(parts).rstrip() + "\n")
        self.out.flush()

    @contextmanager
    def progress(self, description: str, *, with_eta: bool = True) -> Iterator[Callable[[int, int, str], None]]:
        """Show a progress bar on stderr, or a line a minute if it is not a terminal. Yields update(done, total or 0 if
        unknown, text beside the bar)."""
        if self.quiet or not self.animated:
            yield self._line_a_minute(description)
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        console = Console(file=self.err, no_color=not self.color)
        plain = partial(TextColumn, markup=False)  # brackets in names are not markup
        columns = [
            plain("{task.description}"),
            BarColumn(_BAR_WIDTH),
            TaskProgressColumn(),
            plain("{task.fields[note]}"),
        ]
        columns += [TimeRemainingColumn()] if with_eta else []
        cells = _BAR_CELLS + (_ETA_CELLS if with_eta else 0)
        room = max(_LEAST_NOTE, shutil.get_terminal_size().columns - cells - len(description))
        mark = "\u2026" if _is_unicode(self.err) else "~"
        self._erase_bar(True)
        # no redrawing thread, so that messages can be written between updates
        with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
            task, drawn = bar.add_task(description, total=None, note=""), 0.0

            def update(done: int, total: int, text: str) -> None:
                nonlocal drawn
                note = cut(visible_line(text), room, mark, at_start=True)
                bar.update(task, completed=done, total=total or None, note=note)
                if time.monotonic() - drawn >= _REDRAW_S:
                    bar.refresh()
                    drawn, Output._bar_shown = time.monotonic(), True

            try:
                yield update
            finally:
                Output._bar_shown = False

    def _line_a_minute(self, description: str) -> Callable[[int, int, str], None]:
        last = time.monotonic()

        def update(done: int, total: int, text: str) -> None:
            nonlocal last
            if time.monotonic() - last >= _LINE_EVERY_S:
                last = time.monotonic()
                share = f" {done / total:.0%}" if total else ""
                self.note(f"{description}{share}{f', {text}' if text else ''}")

        return update

    def _message(self, pieces: Sequence[tuple[str, str]]) -> None:
        self._erase_bar(True)
        shown = [(visible_line(text) if self.err_tty else text, style) for text, style in pieces]
        try:
            self.err.write("".join(f"\x1b[{s}m{t}\x1b[0m" if self.color and s else t for t, s in shown).rstrip() + "\n")
            self.err.flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # an engine answers also when its log's disk is full
                raise
        Output._in_line = False

    def _erase_bar(self, same_terminal: bool) -> None:
        if self._bar_shown and same_terminal:
            self.err.write(_ERASE_LINE)
            self.err.flush()
            Output._bar_shown = False


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], output: Output, left: int = 1) -> None:
    """Show a table; columns too wide for the terminal go into a second table that repeats the left columns."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    limit = shutil.get_terminal_size().columns if output.out_tty else sum(widths) + 2 * len(widths)
    head = list(range(left))
    parts: list[list[int]] = [[]]
    for i in range(left, len(columns)):
        if parts[-1] and sum(widths[j] + 2 for j in (*head, *parts[-1], i)) - 2 > limit:
            parts.append([])
        parts[-1].append(i)
    for number, part in enumerate(parts):
        if number:
            output.text("")
        shown = [*head, *part]
        cells = [[row[i] for i in shown] for row in rows]
        output.table([columns[i] for i in shown], cells, right=range(left, len(shown)))


def visible(text: str) -> str:
    """Replace control characters except newline and tab by symbols, so that text cannot control the terminal."""

    def symbol(c: str) -> str:
        return chr(0x2400 + ord(c)) if c < " " else "\u2421" if c == "\x7f" else "\ufffd"

    return "".join(symbol(c) if _is_control(c) else c for c in text)


def visible_line(text: str) -> str:
    """Replace control characters, including newline and tab, by symbols."""
    return visible(text).replace("\n", "\u240a").replace("\t", "\u2409")


def num_cells(text: str) -> int:
    """Return the terminal columns of a text: two for CJK characters and emoji, none for combining accents."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def cut(text: str, width: int, mark: str, *, at_start: bool = False) -> str:
    """Cut a text to `width` columns, with a mark at the cut."""
    if num_cells(text) <= width:
        return text
    part = text
    while part and num_cells(part) + len(mark) > width:
        part = part[1:] if at_start else part[:-1]
    return mark + part if at_start else part + mark


def _narrow(widths: list[int], which: Sequence[int], room: int) -> None:
    """Shrink the widest of these columns until all fit or none is wider than `_LEAST_WIDTH`."""
    while which and sum(widths) > room and widths[widest := max(which, key=lambda i: widths[i])] > _LEAST_WIDTH:
        widths[widest] -= 1


def _is_unicode(stream: TextIO) -> bool:
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def _is_control(c: str) -> bool:
    return (
        (c < " " and c not in "\n\t")
        or "\x7f" <= c <= "\x9f"
        or c in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    )
