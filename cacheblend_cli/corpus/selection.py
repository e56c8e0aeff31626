"""Which files of a folder are taken."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pathspec import GitIgnoreSpec

MAX_FILE_SIZE = 20 << 20


@dataclass(frozen=True)
class Selection:
    """What is taken of the folders that are named; files that are named are always. include, exclude: patterns as in .gitignore,
    of paths from the folder that was named on; with `include`, only what one of them matches, whatever its suffix. no_ignore:
    .gitignore and .ignore do not count. follow: links to folders are followed. max_file_size: bytes of a file at most."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    no_ignore: bool = False
    follow: bool = False
    max_file_size: int = MAX_FILE_SIZE

    @cached_property
    def _included(self) -> GitIgnoreSpec | None:
        return GitIgnoreSpec.from_lines(self.include) if self.include else None

    @cached_property
    def _excluded(self) -> GitIgnoreSpec:
        return GitIgnoreSpec.from_lines(self.exclude)

    def excludes(self, path: str) -> bool:
        """path: from the folder that was named on, with a slash at its end for a folder."""
        if self._excluded.match_file(path):
            return True
        return self._included is not None and not path.endswith("/") and not self._included.match_file(path)


ALL = Selection()
