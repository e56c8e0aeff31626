"""Walk a folder and yield files that can be documents, in sorted order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend_cli.corpus.converters import converter_of
from cacheblend_cli.corpus.converters.converter import NoDocument
from cacheblend_cli.corpus.selection import Selection
from cacheblend_cli.errors import UsageError

if TYPE_CHECKING:
    from cacheblend_cli.corpus.ignore_files import IgnoreRules

_OUTWARD = NoDocument(
    "a link to a file outside the folder: name it, or --follow", "links out of the folder", by_rule=True
)
Found = tuple[Path, NoDocument | None]
"""A file, and the reason to skip it (None: read it)."""


def walk(folder: Path, selection: Selection) -> Iterator[Found]:
    """Yield the files, except hidden, ignored and excluded ones.

    Raises UsageError for a folder that cannot be listed: otherwise its documents would count as deleted.
    """
    from cacheblend_cli.corpus.ignore_files import IgnoreRules  # imports pathspec, which `ask` does not need

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
