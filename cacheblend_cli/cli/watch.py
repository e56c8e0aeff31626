"""Remembered folders of a store, and `precompute --watch`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cacheblend_store

from cacheblend_cli.cli.folders import report_omissions
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.stores import open_store
from cacheblend_cli.cli.tier import share
from cacheblend_cli.cli.units import counted
from cacheblend_cli.errors import CacheBlendError, NotFoundError, UsageError
from cacheblend_cli.settings import Settings

if TYPE_CHECKING:
    from cacheblend_cli.collect.events import PrecomputeEvent, PrecomputeReport
    from cacheblend_cli.engine.stored_documents import StoredDocuments

_IGNORE_FILES = (".gitignore", ".ignore")
_RETRY_MS = 2000


def remembered_paths(engine: StoredDocuments, settings: Settings, output: Output) -> tuple[list[str], list[str]]:
    """Return the paths that the store remembers for this model and that exist, and the names of those that do not.

    Warns of each missing path with stored documents, and returns only these; documents of a renamed folder have moved
    with it. Raises NotFoundError if no path exists, StoreNotFound without a store.
    """
    from cacheblend_cli.corpus.places import is_within, on_disk
    from cacheblend_cli.prompt.records import kept_records

    with open_store(settings, write=False) as store:
        names = set(engine.roots(store, settings.salt))
        records = kept_records(store)
        stored = [record.source for record in store.documents()]
    found = {name: path for name in names if (path := on_disk(name)) is not None and os.path.lexists(path)}
    missing = [n for n in sorted(names - found.keys()) if any(is_within(source, n) for source in stored)]
    for name in missing:
        output.warn(f"{name} cannot be found; if it was deleted: chunks rm --source {name}")
    if missing and not found:
        raise NotFoundError("no remembered folder exists now; the stored documents are kept", "is a drive not mounted?")
    if not found:
        hint = "name a folder of documents: cacheblend precompute FOLDER"
        for other in sorted({record.model_name for record in records.values()} - {engine.prompts.model.name}):
            hint += f"; it has documents for {other}: cacheblend config set model {other} makes that the default"
        raise NotFoundError(f"the store remembers no folder for {engine.prompts.model.name}", hint)
    return sorted(found.values()), missing


def watch_folders(engine: StoredDocuments, settings: Settings, paths: Sequence[str], output: Output) -> None:
    """Precompute the paths again whenever a file in one of the folders changes, until Ctrl-C. The store is open for
    writing only while something is stored. Raises UsageError if no path is a folder."""
    import watchfiles

    folders = [path for path in paths if os.path.isdir(path)]
    if not folders:
        raise UsageError("--watch needs a folder, and only files were named", "name the folder that contains them")
    for file in sorted({*paths} - {*folders}):
        output.warn(f"{file} is not a folder and is not watched")
    changes = watchfiles.watch(
        *folders,
        watch_filter=_Relevant(folders, settings.store_path),
        raise_interrupt=True,
        yield_on_timeout=True,
        rust_timeout=_RETRY_MS,
    )
    output.note(f"watching {', '.join(folders)}; Ctrl-C stops it")
    follow(changes, _updater(engine, settings, paths, output), output)


def follow(changes: Iterable[Set[Any]], update: Callable[[], PrecomputeReport], output: Output) -> None:
    """Update once at the start, then after each change; retry a failed update at the next timeout. changes: sets of
    changes; an empty set is a timeout without one."""
    pending = True  # for changes before watching began
    for changed in changes:
        if not (pending or changed):
            continue
        try:
            report = update()
            pending = False
            if report.new or report.replaced or report.removed or report.gone:
                output.note(_summary(report))
        except (CacheBlendError, cacheblend_store.StoreError) as error:  # a locked store, a folder that is being moved
            if changed or not pending:
                output.warn(f"{error.message}; retrying")
            pending = True


def _updater(
    engine: StoredDocuments, settings: Settings, paths: Sequence[str], output: Output
) -> Callable[[], PrecomputeReport]:
    """Precompute the paths with their remembered settings; conversions of unchanged files are kept between runs."""
    from cacheblend_cli.collect.corpus_diff import Paths
    from cacheblend_cli.collect.precompute import PrecomputeOptions
    from cacheblend_cli.corpus.documents import Conversions

    kept = Paths(paths, conversions=Conversions())

    def on_event(event: PrecomputeEvent) -> None:
        if event.kind == "removed":
            output.note(event.message)
        elif event.kind == "omitted":
            report_omissions(event.incomplete, output)
        elif event.kind == "kept" or (event.skipped and (event.skipped.named or event.skipped.is_stored)):
            output.warn(event.message)

    def update() -> PrecomputeReport:
        with open_store(settings, write=True) as store:
            share(store, settings, output)
            return engine.precompute(store, kept, PrecomputeOptions(salt=settings.salt, list_unchanged=False), on_event)

    return update


class _Relevant:
    """Filter for watchfiles: False for hidden files (except ignore files) and for the store's own files."""

    def __init__(self, folders: Sequence[str], store: Path) -> None:
        self._folders = [os.path.realpath(folder).rstrip("/") + "/" for folder in folders]
        self._store = os.path.realpath(store)

    def __call__(self, change: Any, path: str) -> bool:
        real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if real == self._store or real.startswith(self._store + "/"):
            return False
        below = next((real.removeprefix(f) for f in self._folders if real.startswith(f)), os.path.basename(path))
        return not any(part.startswith(".") and part not in _IGNORE_FILES for part in below.split("/"))


def _summary(report: PrecomputeReport) -> str:
    counts = [(report.new, "new"), (report.replaced, "replaced"), (report.removed, "removed")]
    changes = ", ".join(f"{count} {name}" for count, name in counts if count) or "nothing new"
    return f"{counted(report.documents, 'document')}: {changes}, {report.unchanged} unchanged"
