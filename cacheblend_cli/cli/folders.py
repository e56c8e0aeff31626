"""Flags that select files in folders, and messages about skipped files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from cacheblend_cli.cli.inputs import read_stdin
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.units import counted, parse_size
from cacheblend_cli.errors import UsageError
from cacheblend_cli.text_files import read_text

if TYPE_CHECKING:
    from cacheblend_cli.corpus.documents import Skipped

_PANEL = "Reading documents"
Include = Annotated[
    list[str] | None,
    Option(help="Include only matching files of folders; patterns as in .gitignore (repeatable).", metavar="GLOB"),
]
Exclude = Annotated[
    list[str] | None, Option(help="Exclude matching files; patterns as in .gitignore (repeatable).", metavar="GLOB")
]
NoIgnore = Annotated[
    bool | None,
    Option(
        "--no-ignore/--ignore",
        help="Include files that .gitignore and .ignore exclude.",
        show_default="ignore",
        rich_help_panel=_PANEL,
    ),
]
Follow = Annotated[
    bool | None,
    Option(
        "--follow/--no-follow",
        help="Follow links to folders, and to files outside the folder.",
        show_default="no-follow",
        rich_help_panel=_PANEL,
    ),
]
MaxFileSize = Annotated[
    str | None,
    Option(help="Skip larger files of folders.", metavar="SIZE", show_default="20MB", rich_help_panel=_PANEL),
]
FilesFrom = Annotated[
    str | None, Option(help="Read paths from a file or stdin, separated by newlines or NUL.", metavar="FILE|-")
]
Verbose = Annotated[bool, Option("--verbose", "-v", help="List every skipped file.")]
_WARNED = 10


def selected(
    include: list[str] | None,
    exclude: list[str] | None,
    no_ignore: bool | None,
    follow: bool | None,
    max_file_size: str | None,
) -> dict[str, Any]:
    """Return the given fields of a Selection. An empty pattern clears the remembered ones."""
    patterns = {"include": include, "exclude": exclude}
    found: dict[str, Any] = {name: tuple(filter(None, texts)) for name, texts in patterns.items() if texts}
    size = None if max_file_size is None else parse_size(max_file_size, "--max-file-size")
    others = {"no_ignore": no_ignore, "follow": follow, "max_file_size": size}
    return found | {name: value for name, value in others.items() if value is not None}


def read_list(name: str | None) -> list[str]:
    """Return the paths of --files-from. Raises UsageError if it has none."""
    if name is None:
        return []
    text = read_stdin("paths") if name == "-" else read_text(Path(name))
    found = text.split("\0") if "\0" in text else [line.removesuffix("\r") for line in text.split("\n")]
    if not any(found):
        raise UsageError(f"{name} contains no path", "did the command that wrote it find anything?")
    return [path for path in found if path]


class SkippedFiles:
    """Messages about skipped files: warnings for the first unreadable ones, and counts by reason at the end.

    verbose: name every file. json: with verbose, also print each as a JSON object.
    """

    def __init__(self, output: Output, *, verbose: bool, json: bool) -> None:
        self._output, self._verbose, self._json = output, verbose, json
        self._warned = 0

    def report(self, file: Skipped) -> None:
        if self._json and self._verbose:
            self._output.json({"path": file.typed, "status": "passed over", "reason": file.reason})
        if file.named:
            self._output.warn(f"skipped {file.typed}: {file.reason}")
        elif not file.by_rule and self._warned < _WARNED:
            self._warned += 1
            self._output.warn(f"skipped {file.typed}: {file.reason}")
        elif self._verbose:
            self._output.note(f"skipped {file.typed}: {file.reason}")

    def summarise(self, files: Sequence[Skipped]) -> None:
        if not files:
            return
        counts = Counter(file.group for file in files)
        groups = ", ".join(f"{count:,} {group}" for group, count in counts.most_common())
        named = "" if self._verbose else "; -v lists them"
        self._output.note(f"skipped {counted(len(files), 'file')}: {groups}{named}")
