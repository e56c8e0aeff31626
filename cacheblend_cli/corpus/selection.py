"""Rules that select files of a folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MAX_FILE_SIZE = 20 << 20


@dataclass(frozen=True)
class Selection:
    """Rules for files found in a folder. Files that the user names are always read."""

    # .gitignore patterns, relative to the folder that the user named.
    include: tuple[str, ...] = ()  # if given: read only matching files, with any suffix
    exclude: tuple[str, ...] = ()
    no_ignore: bool = False  # disregard .gitignore and .ignore
    follow: bool = False  # follow links to folders, and to files outside the named folder
    max_file_size: int = MAX_FILE_SIZE  # bytes

    @cached_property
    def _included(self) -> GitIgnoreSpec | None:
        return _rules(self.include) if self.include else None

    @cached_property
    def _excluded(self) -> GitIgnoreSpec:
        return _rules(self.exclude)

    def excludes(self, path: str) -> bool:
        """Return whether to skip a path. It is relative to the named folder, with a trailing slash for a folder."""
        if self._excluded.match_file(path):
            return True
        return self._included is not None and not path.endswith("/") and not self._included.match_file(path)


ALL = Selection()


def _rules(lines: tuple[str, ...]) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec  # imported only to walk files

    return GitIgnoreSpec.from_lines(lines)
