"""Rules of the ignore files of a folder and its parents.

An ignore file may come from a stranger, so only small regular files are read, and links are followed only within the
repository (outside of one: the named folder). One with too many rules is an error, because what it excludes could be
private.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Container
from dataclasses import dataclass, replace

from cacheblend_documents.converted import NotConverted

from cacheblend_cli.corpus.ignore_patterns import MAX_SIZE, Folder, IgnorePatterns, TooManyPatterns
from cacheblend_cli.corpus.places import is_within
from cacheblend_cli.errors import UsageError

MAX_BYTES = 1 << 20
_NAMES = (".ignore", ".gitignore", ".git/info/exclude")
_FIRST_NAMES = tuple(name.split("/")[0] for name in _NAMES)
Unread = list[tuple[str, NotConverted]]
"""Ignore files that were not read, and the reasons."""


@dataclass(frozen=True)
class IgnoreRules:
    """Rules that apply to the entries of a folder."""

    top: str  # real path of the repository, or of the named folder
    # For each of _NAMES the patterns of that file in the folder and its parents, nearest first, with the folder's place
    # for these patterns.
    chains: tuple[tuple[tuple[IgnorePatterns, Folder], ...], ...] = ((),) * len(_NAMES)

    @classmethod
    def above(cls, folder: str) -> tuple[IgnoreRules, Unread]:
        """Return the rules of the parents of a real path, up to the repository.

        Return no rules if they would ignore the folder itself, because the user named it.
        """
        top = folder
        while not os.path.exists(os.path.join(top, ".git")):
            if top == (top := os.path.dirname(top)):
                return cls(folder), []
        rules, unread, here = cls(top), Unread(), top
        for name in () if folder == top else os.path.relpath(folder, top).split("/"):
            rules, more = rules.with_files_of(here, _FIRST_NAMES)
            unread += ((os.path.join(here, file), why) for file, why in more)
            if rules.ignore(name, is_folder=True):
                return cls(top), []
            rules, here = rules.within(name), os.path.join(here, name)
        return rules, unread

    def within(self, name: str) -> IgnoreRules:
        chains = (tuple((patterns, patterns.within(f, name)) for patterns, f in chain) for chain in self.chains)
        return replace(self, chains=tuple(chains))

    def with_files_of(self, folder: str, names: Container[str]) -> tuple[IgnoreRules, Unread]:
        """Add the ignore files of the folder itself. Unread ones are named relative to it.

        folder: its real path. names: its entries. Raises UsageError for a file with too many rules.
        """
        chains, unread = list(self.chains), Unread()
        for number, name in enumerate(_NAMES):
            if _FIRST_NAMES[number] not in names:
                continue
            try:
                patterns = self._read(os.path.join(folder, name))
            except NotConverted as why:
                unread.append((name, why))
                continue
            if patterns:
                size = patterns.size + sum(above.size for chain in chains for above, _ in chain)
                if size > MAX_SIZE:
                    raise _too_many(os.path.join(folder, name), f"with those above it: {TooManyPatterns().message}")
                chains[number] = ((patterns, patterns.top), *chains[number])
        return replace(self, chains=tuple(chains)), unread

    def ignore(self, name: str, *, is_folder: bool) -> bool:
        for chain in self.chains:
            for patterns, folder in chain:
                verdict = patterns.verdict(folder, name, is_folder=is_folder)
                if verdict is not None:
                    return verdict
        return False

    def _read(self, file: str) -> IgnorePatterns | None:
        """Return the patterns of a file, None if it does not exist. Raises NotConverted."""
        if not os.path.lexists(file):
            return None
        real = os.path.realpath(file)
        if real != file and not is_within(real, self.top):  # with --follow, the folder itself may be elsewhere
            raise _unread("it is a link out of the folder")
        try:
            if not stat.S_ISREG(os.stat(real).st_mode):  # opening a device can have effects
                raise _unread("it is not a regular file")
            descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "rb") as stream:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise _unread("it is not a regular file")
                data = stream.read(MAX_BYTES + 1)
        except OSError as error:
            raise _unread(f"it is unreadable: {error.strerror}") from error
        if len(data) > MAX_BYTES:
            raise _too_many(file, f"it is larger than {MAX_BYTES >> 20} MiB")
        try:
            return IgnorePatterns.of_text(os.fsdecode(data))
        except TooManyPatterns as error:
            raise _too_many(file, error.message) from None


def _too_many(file: str, why: str) -> UsageError:
    return UsageError(
        f"the rules of {file} cannot be applied: {why}",
        "shorten it; or read what it excludes, too: --no-ignore, with --exclude GLOB for what should be left out",
    )


def _unread(why: str) -> NotConverted:
    return NotConverted(f"its rules do not apply: {why}", "with ignore rules", unread=True)
