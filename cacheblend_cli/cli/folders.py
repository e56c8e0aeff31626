"""Files selected by flags, and messages about skipped files and parts left out of documents."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cacheblend_store

from cacheblend_cli.cli.inputs import read_stdin
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.stores import open_store
from cacheblend_cli.cli.units import counted, parse_size
from cacheblend_cli.corpus.places import on_disk, shown
from cacheblend_cli.errors import CacheBlendError, NotFoundError, UsageError
from cacheblend_cli.text_files import read_text

if TYPE_CHECKING:
    from cacheblend_cli.collect.events import Incomplete, PrecomputeReport
    from cacheblend_cli.corpus.documents import Skipped
    from cacheblend_cli.settings import Settings

_WARNED = 10
_NAMED = 3  # omissions to name without --verbose, and documents in an error
_HINTS = {
    "links out of the folder": "name them, or --follow",
    "linked folders": "name them, or --follow",
    "scanned PDFs": "read them with --ocr",
    "with a password": "save them without it, a PDF for example with qpdf --decrypt",
}
"""Group of skipped files -> how to read them."""
_SUPPORTED = (
    "supported: text, code, HTML, XML, LaTeX, CSV, JSON, notebooks, mail, calendars, contacts, RTF; with the extra `documents` also PDF, "
    "Office files and books"
)


def selected(
    include: list[str] | None,
    exclude: list[str] | None,
    no_ignore: bool | None,
    follow: bool | None,
    max_file_size: str | None,
    ocr: bool | None,
    ocr_languages: str,
) -> dict[str, Any]:
    """Return the given fields of a Selection. An empty pattern clears the remembered ones. Raises UsageError."""
    if ocr:
        from cacheblend_documents.ocr import check_ocr

        from cacheblend_cli.corpus.documents import ocr_errors

        with ocr_errors():
            check_ocr(ocr_languages)
    found = {
        "include": tuple(filter(None, include)) if include else None,
        "exclude": tuple(filter(None, exclude)) if exclude else None,
        "no_ignore": no_ignore,
        "follow": follow,
        "max_file_size": None if max_file_size is None else parse_size(max_file_size, "--max-file-size"),
        "ocr": None if ocr is None else ocr_languages * ocr,
    }
    return {name: value for name, value in found.items() if value is not None}


def read_list(name: str | None, paths: Sequence[str] | None) -> list[str]:
    """Return the paths of --files-from. Raises UsageError if it has none, and if stdin is one of `paths`, too."""
    if name == "-" and "-" in (paths or ()):
        raise UsageError("- was given twice, and stdin can be read only once", "write the paths to a file")
    if name is None:
        return []
    text = read_stdin("paths") if name == "-" else read_text(Path(name))
    found = text.split("\0") if "\0" in text else [line.removesuffix("\r") for line in text.split("\n")]
    if not any(found):
        raise UsageError(f"{name} contains no path", "did the command that wrote it find anything?")
    return [path for path in found if path]


class SkippedFiles:
    """Messages about skipped files: warnings for the first unreadable ones, and counts by reason at the end. verbose:
    name every file, with --json as JSON, too."""

    def __init__(self, output: Output, *, verbose: bool) -> None:
        self._output, self.verbose = output, verbose
        self._warned = 0

    def report(self, file: Skipped) -> None:
        if self._output.is_json and self.verbose:
            self._output.json({"path": file.typed, "status": "passed over", "reason": file.reason})
        if file.named:
            self._output.warn(f"skipped {file.typed}: {file.reason}")
        elif not file.by_rule and self._warned < _WARNED:
            self._warned += 1
            self._output.warn(f"skipped {file.typed}: {file.reason}")
        elif self.verbose:
            self._output.note(f"skipped {file.typed}: {file.reason}")

    def summarise(self, files: Sequence[Skipped]) -> None:
        if not files:
            return
        hints = dict[str, list[str]]()
        for group, count in Counter(file.group for file in files).most_common():
            hints.setdefault(_hint(group), []).append(f"{count:,} {group}")
        groups = "; ".join(f"{', '.join(counts)}{hint and f' ({hint})'}" for hint, counts in hints.items())
        named = "" if self.verbose else "; -v lists them"
        self._output.note(f"skipped {counted(len(files), 'file')}: {groups}{named}")


def _hint(group: str) -> str:
    """Return how to read the files of a group, or why that is impossible; "" if the group's name says so."""
    from cacheblend_documents.formats import reason_of_suffix

    if group.startswith("."):
        return reason_of_suffix(f"a{group}") or "name them, or --include them"
    return "name them, or --max-file-size" if group.startswith("over ") else _HINTS.get(group, "")


def not_read(missing: Sequence[str], report: PrecomputeReport, *, verbose: bool, watch: bool) -> CacheBlendError | None:
    """Return the error at the end of a run that could not read everything, or None.

    missing: remembered folders that do not exist. watch: stay silent if there is something to watch.
    """
    emptied, named = report.emptied, [file for file in report.skipped if file.named]
    lost, unread = ([], []) if watch and report.documents else ([*dict.fromkeys((*emptied, *missing))], report.unread)
    if lost:
        first = shlex.quote(shown(lost[0]))
        is_there = bool(emptied) and on_disk(lost[0]) is not None
        command = f"precompute {first}" if is_there else f"chunks rm --source {first}"
        what = f"no stored document of {first_of(lost)} was found: nothing of it was stored or removed"
        return NotFoundError(what, f"is a drive not mounted? if not: cacheblend {command} --yes")
    if unread:
        names = [file.source for file in unread]
        what = (
            f"{counted(len(names), 'document')} could not be read, and earlier versions stay stored: {first_of(names)}"
        )
        return UsageError(what, f"to remove one: cacheblend chunks rm --source {shlex.quote(shown(names[0]))}")
    if named:
        return not_stored(named)
    if report.documents or report.gone:
        return None
    return no_document(report.skipped, verbose=verbose)


def first_of(names: Sequence[str]) -> str:
    """Name the first documents or folders, and count the others."""
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(map(shown, names[:_NAMED])) + more


def not_stored(files: Sequence[Skipped]) -> UsageError:
    from cacheblend_documents.formats import reason_of_suffix

    first, more = files[0], f", and {len(files) - 1} more" if len(files) > 1 else ""
    hint = _HINTS.get(first.group, "").replace("them", "it")
    if first.group == "binary":
        hint = reason_of_suffix(first.typed) or _SUPPORTED
    return UsageError(f"{first.typed} was not stored: {first.reason}{more}", hint or None)


def no_document(files: Sequence[Skipped], *, verbose: bool) -> UsageError:
    """Return the error for folders without a document. files: those that were skipped."""
    hint = None if verbose else "-v lists the skipped files and the reasons"
    if not files:
        hint = "hidden and ignored files are not read; --no-ignore reads those that .gitignore and .ignore exclude"
    return UsageError("no document was found", hint)


def check_files(
    paths: Sequence[str], listed: Sequence[str], select: dict[str, Any], settings: Settings, skipped: SkippedFiles
) -> None:
    """Raise NotFoundError for a missing path, and UsageError if there is no file to read, before torch is imported.

    Paths known to the store are not checked: the store has their selection and their deleted documents. Without paths,
    the store must exist and remember some.
    """
    from cacheblend_cli.corpus.documents import check_paths, find_files
    from cacheblend_cli.corpus.walk import ALL

    if not (paths or listed):
        open_store(settings, write=False).close()
        return
    check_paths((*paths, *listed))
    if _are_known((*paths, *listed), settings):
        return
    found, selection = list["Skipped"](), replace(ALL, **select)
    for file in find_files(paths, listed, lambda path: selection):
        if file.skip is None:
            return
        found.append(file.skipped(file.skip))
    for one in found:
        skipped.report(one)
    skipped.summarise(found)
    raise no_document(found, verbose=skipped.verbose)


def _are_known(paths: Sequence[str], settings: Settings) -> bool:
    """Return whether the store remembers one of the paths or a path above or below it, or has a document there."""
    from cacheblend_cli.collect.document_records import stored_documents
    from cacheblend_cli.corpus.places import is_within, place_of
    from cacheblend_cli.corpus.scopes import ROOTS

    names = [place_of(path) for path in paths]
    try:
        with open_store(settings, write=False) as store:
            roots = [memo.value["path"] for memo in store.memos(ROOTS)]
            if any(is_within(name, root) or is_within(root, name) for root in roots for name in names):
                return True
            return any(is_within(d.source, name) for d in stored_documents(store).values() for name in names)
    except cacheblend_store.StoreNotFound:
        return False
    except (cacheblend_store.StoreError, KeyError, TypeError):  # reported when the store is opened for writing
        return True


def report_omissions(documents: Sequence[Incomplete], output: Output, *, verbose: bool = False) -> None:
    """Write one line about the documents whose omissions the store does not have yet. verbose: write a line per
    document instead, then their number, including those that the store has."""
    if verbose:
        for document in documents:
            output.note(f"{document.source}: left out: {'; '.join(document.omissions)}")
        if documents:
            output.warn(f"parts of {counted(len(documents), 'document')} are left out")
        return
    new = [document for document in documents if document.is_news]
    if not new:
        return
    first = new[0]
    named = "; ".join(first.omissions[:_NAMED])
    if len(new) > 1:
        count = f"{len(new):,} documents"
        output.warn(f"parts of {count} are left out, for example of {first.source}: {named}; -v lists them")
    else:
        rest = len(first.omissions) - _NAMED
        output.warn(f"{first.source}: left out: {named}" + (f"; {rest} more, -v lists them" if rest > 0 else ""))
