"""Walk a folder and yield files that can be documents, in sorted order.

.gitignore, .ignore and .git/info/exclude apply with ripgrep's precedence: a rule applies below the folder of its file;
.ignore overrides .gitignore, a nearer file overrides one further up, and a later line overrides an earlier one. Unlike
in ripgrep, .gitignore also applies outside of a repository.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend_cli.corpus.converters import converter_of
from cacheblend_cli.corpus.converters.converter import NoDocument
from cacheblend_cli.errors import UsageError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec


_NAMES = (".ignore", ".gitignore")


@dataclass(frozen=True)
class IgnoreRules:
    """Rules of a folder and its parents, by file name, nearest first."""

    chains: tuple[tuple[tuple[str, GitIgnoreSpec], ...], ...] = ((),) * (len(_NAMES) + 1)

    @classmethod
    def above(cls, folder: Path) -> IgnoreRules:
        """Return the rules of the parent folders, up to the repository.

        Return no rules if they would ignore the folder itself, because the user named it.
        """
        parents: list[Path] = []
        here = folder.resolve()
        while not os.path.exists(here / ".git"):  # Path.exists raises in a folder without permission
            if here == here.parent:
                return cls()
            here = here.parent
            parents.append(here)
        rules = cls()
        for parent in reversed(parents):
            rules = rules.within(parent)
        return cls() if rules.ignore(f"{folder.resolve()}/") else rules

    def within(self, folder: Path) -> IgnoreRules:
        """Return these rules plus the rules of a subfolder."""
        base = f"{folder}/"
        found = [_read(folder / name) for name in _NAMES]
        found.append(_read(folder / ".git" / "info" / "exclude"))
        if not any(found):
            return self
        own = (((base, spec),) if spec else () for spec in found)
        return IgnoreRules(tuple(new + old for new, old in zip(own, self.chains, strict=True)))

    def ignore(self, path: str) -> bool:
        """Return whether to ignore a real absolute path, with a trailing slash for a folder."""
        for chain in self.chains:
            for base, spec in chain:
                verdict = spec.check_file(path.removeprefix(base)).include
                if verdict is not None:
                    return bool(verdict)
        return False


def _read(file: Path) -> GitIgnoreSpec | None:
    from pathspec import GitIgnoreSpec  # imported only to walk files

    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    kept = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # nested brackets
        for line in lines:
            try:
                GitIgnoreSpec.from_lines([line])
            except ValueError:  # git skips invalid patterns
                continue
            kept.append(line)
        return GitIgnoreSpec.from_lines(kept)


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
    from pathspec import GitIgnoreSpec

    return GitIgnoreSpec.from_lines(lines)


_OUTWARD = NoDocument(
    "a link to a file outside the folder: name it, or --follow", "links out of the folder", by_rule=True
)
Found = tuple[Path, NoDocument | None]
"""A file, and the reason to skip it (None: read it)."""


def walk(folder: Path, selection: Selection) -> Iterator[Found]:
    """Yield the files, except hidden, ignored and excluded ones.

    Raises UsageError for a folder that cannot be listed: otherwise its documents would count as deleted.
    """
    rules = IgnoreRules() if selection.no_ignore else IgnoreRules.above(folder)
    yield from _walk(folder, folder.resolve(), "", rules, (), selection)


def _walk(
    folder: Path, real: Path, below: str, rules: IgnoreRules, parents: tuple[Path, ...], selection: Selection
) -> Iterator[Found]:
    """Walk one folder.

    below: its path relative to the named folder, with a trailing slash, or "" for that folder.
    parents: real paths of the folders above, to stop at cycles of links.
    """
    if real in parents:
        return
    if not selection.no_ignore:
        rules = rules.within(real)
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise UsageError(f"cannot list {folder}: {error.strerror}", "check its permissions") from error
    for entry in entries:
        is_folder = os.path.isdir(entry)  # Path.is_dir raises without permission
        end = "/" if is_folder else ""
        if entry.name.startswith(".") or rules.ignore(f"{real / entry.name}{end}"):
            continue
        if selection.excludes(f"{below}{entry.name}{end}"):
            continue
        if not is_folder:
            leads_out = not selection.follow and _leads_out(entry, (*parents, real)[0])
            yield entry, _OUTWARD if leads_out else unwanted(entry, selection)
        elif os.path.islink(entry) and not selection.follow:
            yield entry, NoDocument("a link to a folder: name it, or --follow", "linked folders", by_rule=True)
        else:
            inside = entry.resolve() if os.path.islink(entry) else real / entry.name
            yield from _walk(entry, inside, f"{below}{entry.name}/", rules, (*parents, real), selection)


def _leads_out(entry: Path, folder: Path) -> bool:
    """Return whether a file is a link to a file outside the folder.

    Such a link would let the author of the folder read any file that its reader can read.
    """
    if not os.path.islink(entry) or not os.path.exists(entry):
        return False
    return not Path(os.path.realpath(entry)).is_relative_to(folder)


def unwanted(file: Path, selection: Selection) -> NoDocument | None:
    """Return the reason not to open a file that the user did not name, or None."""
    if not selection.include and converter_of(file.name) is None:
        suffix = file.suffix.lower()
        why = f"{suffix or 'a name without a suffix'} is not read; name the file, or --include it"
        return NoDocument(why, suffix or "without a suffix", by_rule=True)
    return too_large(file, selection.max_file_size)


def too_large(file: Path, most: int) -> NoDocument | None:
    try:
        size = file.stat().st_size
    except OSError:
        return None  # reported when the file is read
    if size <= most:
        return None
    shown, megabytes = f"{most / 2**20:.3g} MB", f"{size / 2**20:.3g}" if size < 1000 << 20 else f"{size / 2**20:,.0f}"
    return NoDocument(f"larger than {shown}: {megabytes} MB", f"over {shown}", by_rule=True)
