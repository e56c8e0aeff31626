"""Names of documents and of places in them, and how they are shown.

A document's name is its real path: absolute, with links resolved. Stdin is named after the current project, or the
current directory without a project, with `//-` at the end, which no real path has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend_documents.converted import shortened, told_apart

from cacheblend_cli.settings.sources import FILE

if TYPE_CHECKING:
    from cacheblend_store import Locator

_MAX_HEADINGS = 16  # innermost headings to keep: code can be nested deeper
STDIN = "-"
_STDIN = "//-"
SENT, PUT = "(sent)/", "(put)/"
"""Name prefixes of documents that came over HTTP: sent with a request, and uploaded to be stored and searched."""


def place_of(path: str) -> str:
    """Return the document name of a path as typed; "-" is stdin."""
    if path == STDIN:
        return (project_folder() or text_of(os.getcwd())).rstrip("/") + _STDIN
    try:
        return text_of(os.path.realpath(path))
    except ValueError:  # not a valid path, but usable as a name
        return os.path.normpath(os.path.join(text_of(os.getcwd()), path))


def text_of(path: str) -> str:
    """Return a path as printable text: bytes that are not UTF-8 become \\xNN."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def is_file(name: str) -> bool:
    """Return whether the document is a file or stdin, as opposed to one that came over HTTP."""
    return name.startswith("/")


def is_stdin(name: str) -> bool:
    return name.endswith(_STDIN)


def on_disk(name: str) -> str | None:
    """Return the path of a document or directory by name, None if it does not exist. A path that cannot be looked up
    (no permission, a drive that does not answer) may exist."""
    for path in (name, os.fsdecode(_unescaped(name))):
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            continue
        except OSError:
            pass
        return path
    return None


def is_below(name: str, folder: str) -> bool:
    return name.startswith(folder.rstrip("/") + "/")


def is_within(name: str, path: str) -> bool:
    """Return whether the name is the path or below it."""
    return name == path or is_below(name, path)


def with_parents(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition("/")[0]


def linked_from(path: str) -> str | None:
    """Return the current project if the typed path is below it but a link leads out of it; else None."""
    folder = project_folder()
    if folder is None or path == STDIN or is_within(place_of(path), folder):
        return None
    return folder if is_within(text_of(os.path.normpath(os.path.join(os.getcwd(), path))), folder) else None


def shown(name: str) -> str:
    """Return the name relative to the current directory, or the absolute path if that is shorter."""
    if not name.startswith("/"):
        return name
    if is_stdin(name):
        if name == place_of(STDIN):
            return STDIN
        return f"{shown(name.removesuffix(_STDIN) or '/')}/{STDIN}"
    relative = os.path.relpath(name, text_of(os.getcwd()))
    return relative if len(relative) <= len(name) else name


def portable(name: str) -> str:
    """Return the name to use in a tier: relative to the current directory for documents below it."""
    here = text_of(os.getcwd())
    return name.removeprefix(here.rstrip("/") + "/").lstrip("/") if is_below(name, here) else name


def landed(source: str) -> str:
    """Convert a name in a tier to a name in a store. Relative names start from the current directory."""
    if source.startswith(("/", "(")):
        return source
    return place_of(source.removesuffix(_STDIN)) + _STDIN if is_stdin(source) else place_of(source)


def project_folder() -> str | None:
    """Return the nearest directory, here or above, with a cacheblend.toml or a .git; None if there is none."""
    here = Path.cwd()
    found = (f for f in (here, *here.parents) if (f / FILE).is_file() or (f / ".git").exists())
    folder = next(found, None)
    return None if folder is None else text_of(str(folder))


def _unescaped(name: str) -> bytes:
    """Undo `text_of`."""
    pieces = re.split(r"\\x([89a-f][0-9a-f])", name)
    return b"".join(bytes.fromhex(p) if i % 2 else os.fsencode(p) for i, p in enumerate(pieces))


def bounded(locator: Locator) -> Locator:
    """Return the locator with names within the limit."""
    headings = tuple(map(shortened, locator.headings[-_MAX_HEADINGS:]))
    return locator._replace(part=told_apart(locator.part), headings=headings)
