"""Walk a folder and yield files that can be documents, in sorted order.

.gitignore, .ignore and .git/info/exclude apply with ripgrep's precedence: a rule applies below the folder of its file;
.ignore overrides .gitignore, a nearer file overrides one further up, and a later line overrides an earlier one. Unlike
in ripgrep, .gitignore also applies outside of a repository.
"""

from __future__ import annotations

import codecs
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

from cacheblend_documents.converted import NotConverted
from cacheblend_documents.formats import format_of, reason_of_suffix

from cacheblend_cli.corpus.ignore_patterns import Folder, IgnorePatterns
from cacheblend_cli.corpus.ignore_rules import IgnoreRules
from cacheblend_cli.corpus.places import is_within
from cacheblend_cli.errors import UsageError

MAX_FILE_SIZE = 20 << 20
MAX_PATH = os.pathconf("/", "PC_PATH_MAX") - 1
"""Longest path that the system opens, in bytes."""


@dataclass(frozen=True)
class Selection:
    """Rules for files found in a folder, and how to read PDFs. Files that the user names are always read."""

    # .gitignore patterns, relative to the folder that the user named.
    include: tuple[str, ...] = ()  # if given: read only matching files, with any suffix
    exclude: tuple[str, ...] = ()
    no_ignore: bool = False  # disregard .gitignore and .ignore
    follow: bool = False  # follow links to folders, and to files outside the named folder
    max_file_size: int = MAX_FILE_SIZE  # bytes
    ocr: str = ""  # languages of scanned PDFs to recognise, as tesseract names them; "": do not recognise text

    @cached_property
    def included(self) -> IgnorePatterns:
        return IgnorePatterns(self.include)

    @cached_property
    def excluded(self) -> IgnorePatterns:
        return IgnorePatterns(self.exclude)


ALL = Selection()


class Unwanted(NotConverted):
    """Raised for a file that a rule says not to open."""

    def __init__(self, reason: str, group: str = "") -> None:
        super().__init__(reason, group, unread=True)


@dataclass(frozen=True, slots=True)
class FoundFile:
    path: str  # below the folder as the user named it
    real: str  # path with links to folders resolved; "" for a link
    skip: NotConverted | None = None  # reason to skip it


_OUTWARD = Unwanted("a link to a file outside the folder: name it, or --follow", "links out of the folder")
_LINKED = Unwanted("a link to a folder: name it, or --follow", "linked folders")
_TOO_LONG = NotConverted(
    f"its path is longer than {MAX_PATH:,} bytes, and the system cannot open it", "too long paths", unread=True
)


def walk(folder: str, selection: Selection) -> Iterator[FoundFile]:
    """Yield the files, except hidden, ignored and excluded ones. Ignore files that are not read are yielded, too.

    Raises UsageError for a folder that cannot be listed: otherwise its documents would count as deleted.
    """
    return _Walk(os.path.realpath(folder), selection).files(folder)


@dataclass(frozen=True, slots=True)
class _OpenFolder:
    """A folder whose entries are being walked."""

    path: str
    real: str
    rules: IgnoreRules
    # The folder's place for the patterns of the selection.
    included: Folder
    excluded: Folder
    is_included: bool  # by the nearest parent that a pattern matches
    entries: Iterator[os.DirEntry[str]]


class _Walk:
    """One walk, with a stack of open folders in place of recursion. top: real path of the named folder."""

    def __init__(self, top: str, selection: Selection) -> None:
        self._top, self._selection = top, selection
        self._stack = list[_OpenFolder]()
        self._real_paths = set[str]()  # of the stack, to stop at cycles of links

    def files(self, folder: str) -> Iterator[FoundFile]:
        selection, rules = self._selection, IgnoreRules(self._top)
        if not selection.no_ignore:
            rules, unread = IgnoreRules.above(self._top)
            yield from (FoundFile(file, file, why) for file, why in unread)
        yield from self._enter(folder, self._top, rules, selection.included.top, selection.excluded.top, False)
        while self._stack:
            here = self._stack[-1]
            if (entry := next(here.entries, None)) is None:
                self._stack.pop()
                self._real_paths.remove(here.real)
            else:
                yield from self._look_at(entry, here)

    def _enter(
        self, path: str, real: str, rules: IgnoreRules, included: Folder, excluded: Folder, is_included: bool
    ) -> Iterator[FoundFile]:
        """Open a folder. Yield its ignore files that are not read, or the folder itself if its path is too long."""
        if real in self._real_paths:
            return
        if len(os.fsencode(real)) > MAX_PATH:
            yield FoundFile(path, real, _TOO_LONG)
            return
        try:
            with os.scandir(path) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                yield FoundFile(path, real, _TOO_LONG)
                return
            raise UsageError(f"cannot list {path}: {error.strerror}", "check its permissions") from error
        if not self._selection.no_ignore:
            rules, unread = rules.with_files_of(real, {entry.name for entry in entries})
            yield from (FoundFile(os.path.join(path, f), os.path.join(real, f), why) for f, why in unread)
        self._stack.append(_OpenFolder(path, real, rules, included, excluded, is_included, iter(entries)))
        self._real_paths.add(real)

    def _look_at(self, entry: os.DirEntry[str], here: _OpenFolder) -> Iterator[FoundFile]:
        """Yield a file, or open a folder."""
        selection, name, is_folder = self._selection, entry.name, _is_folder(entry)
        if name.startswith(".") or here.rules.ignore(name, is_folder=is_folder):
            return
        if selection.excluded.verdict(here.excluded, name, is_folder=is_folder):
            return
        verdict = selection.included.verdict(here.included, name, is_folder=is_folder)
        is_included = here.is_included if verdict is None else verdict
        path, real = os.path.join(here.path, name), os.path.join(here.real, name)
        is_link = entry.is_symlink()
        if not is_folder:
            if selection.include and not is_included:
                return
            leads_out = is_link and not selection.follow and _leads_out(path, self._top)
            skip = _OUTWARD if leads_out else _TOO_LONG if len(os.fsencode(real)) > MAX_PATH else None
            yield FoundFile(path, "" if is_link else real, skip or unwanted(path, selection))
        elif is_link and not selection.follow:
            yield FoundFile(path, "", _LINKED)
        else:
            rules = here.rules.within(name)
            included = selection.included.within(here.included, name)
            excluded = selection.excluded.within(here.excluded, name)
            real = os.path.realpath(path) if is_link else real
            yield from self._enter(path, real, rules, included, excluded, is_included)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that cannot be followed
        return False


def _leads_out(path: str, folder: str) -> bool:
    """Return whether a link to a file leads out of the folder.

    Such a link would let the author of the folder read any file that its reader can read.
    """
    return os.path.exists(path) and not is_within(os.path.realpath(path), folder)


_PEEK_BYTES = 8192
_BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)


def unwanted(path: str, selection: Selection) -> NotConverted | None:
    """Return the reason not to read a file that the user did not name, or None."""
    suffix = PurePath(path).suffix.lower()
    if not selection.include:
        if format_of(os.path.basename(path)) is None:
            why = reason_of_suffix(path) or f"{suffix} is not read: name the file, or --include '*{suffix}'"
            return Unwanted(why, suffix)
        if not suffix and _is_binary(path):
            return Unwanted("binary, without a suffix", "binary without a suffix")
    return too_large(path, selection.max_file_size)


def _is_binary(path: str) -> bool:
    """Return whether a regular file does not begin as text. An unreadable file is reported when it is read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            data = stream.read(_PEEK_BYTES)
        if data.startswith(_BYTE_ORDER_MARKS):
            return False
        codecs.getincrementaldecoder("utf-8")().decode(data)  # a character may be cut at the end
    except OSError:
        return False
    except UnicodeDecodeError:
        return True
    return b"\0" in data


def too_large(path: str, most: int) -> NotConverted | None:
    try:
        size = os.stat(path).st_size
    except OSError:
        return None  # reported when the file is read
    if size <= most:
        return None
    shown, megabytes = f"{most / 2**20:.3g} MB", f"{size / 2**20:.3g}" if size < 1000 << 20 else f"{size / 2**20:,.0f}"
    return Unwanted(f"larger than {shown}: {megabytes} MB", f"over {shown}")
