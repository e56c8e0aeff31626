"""Where documents are: the one name a document has, and how it is shown.

A document is known by its real path: absolute, links resolved, whatever was typed. What was read from stdin is known by
the project it was read in, or the directory where there is none: that path and `//-`, which ends no real path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cacheblend_cli.settings import FILE

STDIN = "-"
_STDIN = "//-"
SENT, PUT = "(sent)/", "(put)/"
"""What the names of documents begin with that came over the wire: with a question, and to be kept and searched."""


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


def is_file(name: str) -> bool:
    """Whether it is the path of a file, or of stdin, and did not come over the wire."""
    return name.startswith("/")


def is_stdin(name: str) -> bool:
    return name.endswith(_STDIN)


def on_disk(name: str) -> str | None:
    """The path of a document or directory of that name, None where there is nothing."""
    with suppress(ValueError):
        return next(filter(os.path.lexists, (name, os.fsdecode(_unescaped(name)))), None)
    return None


def is_on_disk(name: str) -> bool:
    """Whether there is anything at the document's path."""
    return on_disk(name) is not None


def is_below(name: str, folder: str) -> bool:
    return name.startswith(folder.rstrip("/") + "/")


def is_within(name: str, path: str) -> bool:
    """Whether it is that path or below it."""
    return name == path or is_below(name, path)


def with_parents(name: str) -> Iterator[str]:
    """The path, and every one above it."""
    while name:
        yield name
        name = name.rpartition("/")[0]


def linked_from(path: str) -> str | None:
    """The current project, where the path as it was typed is below it, and by a link leads out of it."""
    folder = project_folder()
    if folder is None or path == STDIN or is_within(place_of(path), folder):
        return None
    return folder if is_within(text_of(os.path.normpath(os.path.join(os.getcwd(), path))), folder) else None


def shown(name: str) -> str:
    """The name as a person standing here types it: relative where that is no longer than the whole path."""
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


def _stdin_of(here: Path) -> str:
    return (project_folder(here) or text_of(str(here))).rstrip("/") + _STDIN


def _unescaped(name: str) -> bytes:
    """The bytes of a path that `text_of` made text of."""
    pieces = re.split(r"\\x([89a-f][0-9a-f])", name)
    return b"".join(bytes.fromhex(p) if i % 2 else os.fsencode(p) for i, p in enumerate(pieces))
