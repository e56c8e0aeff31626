"""Selection of the files of a folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MAX_FILE_SIZE = 20 << 20


@dataclass(frozen=True)
class Selection:
    """Rules for files found in a folder; files named by the user are always read. include, exclude: .gitignore patterns, relative
    to the named folder; with `include`, read matching files only, whatever their suffix. no_ignore: disregard .gitignore and
    .ignore. follow: follow links to folders, and to files outside the named folder. max_file_size: in bytes."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    no_ignore: bool = False
    follow: bool = False
    max_file_size: int = MAX_FILE_SIZE

    @cached_property
    def _included(self) -> GitIgnoreSpec | None:
        return _rules(self.include) if self.include else None

    @cached_property
    def _excluded(self) -> GitIgnoreSpec:
        return _rules(self.exclude)

    def excludes(self, path: str) -> bool:
        """Return whether to leave out a path, relative to the named folder, with a trailing slash for a folder."""
        if self._excluded.match_file(path):
            return True
        return self._included is not None and not path.endswith("/") and not self._included.match_file(path)


ALL = Selection()


def _rules(lines: tuple[str, ...]) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec  # only where files are walked

    return GitIgnoreSpec.from_lines(lines)
