"""Where documents are: the one name a document has, how it is shown, and which documents a command takes.

A document is known by its real path: absolute, links resolved, whatever was typed. What was read from stdin is known by
the project it was read in, or the directory where there is none: that path and `//-`, which ends no real path. A store
that an earlier version wrote has names as they were typed, beside a digest of the directory they are relative to: they
are `.../DIGEST/docs/a.md` here until a command runs in that directory or below it, which can tell.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from cacheblend_cli.settings import FILE

STDIN = "-"
_STDIN = "//-"
_TYPED = ".../"
_MAGIC = re.compile(r"[*?\[]")


def place_of(path: str) -> str:
    """The name of the document or directory at a path as it was typed; "-" is stdin."""
    if path == STDIN:
        return _stdin_of(Path.cwd())
    try:
        return text_of(os.path.realpath(path))
    except ValueError:  # no system has such a path; a name it can be all the same
        return os.path.normpath(os.path.join(text_of(os.getcwd()), path))


def text_of(path: str) -> str:
    """A path as text: bytes of a name that are no UTF-8 become \\xNN, so that it can be stored and printed."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def known_as(source: str, settings: Mapping[str, Any] | None = None) -> str:
    """The name of a document by the source and the settings of its record, or by the source in a chunk's manifest.

    What an earlier version named by what was typed is still to be settled."""
    if source.startswith(("/", "(")):
        return source
    return f"{_TYPED}{(settings or {}).get('directory', '')}/{source}"


def settle(name: str) -> str:
    """The real path of a document whose name was relative to this directory or one above it; other names as they are."""
    if not name.startswith(_TYPED):
        return name
    digest, _, typed = name.removeprefix(_TYPED).partition("/")
    folder = _digests(os.getcwd()).get(digest)
    if folder is None:
        return name
    return _stdin_of(Path(folder)) if typed == STDIN else place_of(os.path.join(folder, typed))


def is_settled(name: str) -> bool:
    """Whether it is known where the document is."""
    return name.startswith("/")


def is_stdin(name: str) -> bool:
    return name.endswith(_STDIN)


def is_on_disk(name: str) -> bool:
    """Whether there is anything at the document's path."""
    try:
        return os.path.lexists(name) or os.path.lexists(_unescaped(name))
    except ValueError:
        return False


def is_below(name: str, folder: str) -> bool:
    return name.startswith(folder.rstrip("/") + "/")


def shown(name: str) -> str:
    """The name as a person standing here types it: relative where that is no longer than the whole path."""
    name = settle(name)
    if name.startswith(_TYPED):
        return _TYPED + name.removeprefix(_TYPED).partition("/")[2]
    if not name.startswith("/"):
        return name
    if is_stdin(name):
        if name == place_of(STDIN):
            return STDIN
        return f"{shown(name.removesuffix(_STDIN) or '/')}/{STDIN}"
    relative = os.path.relpath(name, text_of(os.getcwd()))
    return relative if len(relative) <= len(name) else name


def portable(name: str) -> str:
    """The name in an archive: relative to this directory where the document is below it."""
    here = text_of(os.getcwd())
    return name.removeprefix(here.rstrip("/") + "/").lstrip("/") if is_below(name, here) else name


def landed(source: str) -> str:
    """The name in a store of what an archive calls so: what is relative there is relative to this directory here."""
    if source.startswith(("/", "(")):
        return source
    return place_of(source.removesuffix(_STDIN)) + _STDIN if is_stdin(source) else place_of(source)


def project_folder(here: Path | None = None) -> str | None:
    """The nearest directory from here up that holds a cacheblend.toml or a .git."""
    here = here or Path.cwd()
    found = (f for f in (here, *here.parents) if (f / FILE).is_file() or (f / ".git").exists())
    folder = next(found, None)
    return None if folder is None else text_of(str(folder))


@dataclass(frozen=True)
class Scope:
    """Which documents are taken: those at or below a path, those a pattern matches, or, with neither, all.

    path: a real path. pattern: with *, ? and [...], which match slashes too, from a real path on.
    """

    path: str = ""
    pattern: str = ""
    typed: str = ""

    @classmethod
    def matching(cls, text: str) -> Scope:
        """What `--source` means: a document, a directory, or a pattern of them, from here on unless it is absolute."""
        parts = text.split("/")
        plain = next((i for i, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
        if plain == len(parts):
            return cls(place_of(text), "", text)
        head = place_of("/".join(parts[:plain]) or ("/" if text.startswith("/") else "."))
        tail = "/".join(parts[plain:]).replace("**/", "*")
        return cls(place_of(text), f"{glob.escape(head).rstrip('/')}/{tail}", text)

    def holds(self, name: str) -> bool:
        if not self.path:
            return True
        if self.typed and name.startswith(_TYPED):
            return fnmatchcase(shown(name), self.typed)
        if name == self.path or is_below(name, self.path):
            return True
        return bool(self.pattern) and (fnmatchcase(name, self.pattern) or fnmatchcase(name, f"{self.pattern}/*"))


EVERYTHING = Scope()


def scope_here(names: Iterable[str]) -> tuple[Scope, str]:
    """What a command takes of these documents when nothing was said: those below the current project, where there are
    any, else all; and a sentence that says so."""
    everything = list(names)
    folder = project_folder()
    if folder is None:
        return (
            EVERYTHING,
            f"searching all {len(everything)} documents: there is no cacheblend.toml or .git here or above",
        )
    scope = Scope(folder)
    count = sum(map(scope.holds, everything))
    if not count:
        return EVERYTHING, f"searching all {len(everything)} documents: none of them is below {folder}"
    return scope, f"searching the {count} of {len(everything)} documents below {folder}; --all takes the others too"


def directory_digest(folder: str) -> str:
    """What earlier versions wrote of the directory that a document's name is relative to."""
    return hashlib.blake2b(os.fsencode(folder), digest_size=16).hexdigest()


def _stdin_of(here: Path) -> str:
    return (project_folder(here) or text_of(str(here))).rstrip("/") + _STDIN


@lru_cache(maxsize=4)
def _digests(here: str) -> dict[str, str]:
    """Of a directory and all above it: digest -> path."""
    return {directory_digest(str(f)): text_of(str(f)) for f in (Path(here), *Path(here).parents)}


def _unescaped(name: str) -> bytes:
    """The bytes of a path that `text_of` made text of."""
    pieces = re.split(r"\\x([89a-f][0-9a-f])", name)
    return b"".join(bytes.fromhex(p) if i % 2 else os.fsencode(p) for i, p in enumerate(pieces))
