"""cacheblend sync and watch: the store as the documents are, with the settings it remembers of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Set
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_cli.cli import options
from cacheblend_cli.cli.exits import on_interrupt
from cacheblend_cli.cli.output import Output
from cacheblend_cli.errors import CacheBlendError, NotFoundError, UsageError
from cacheblend_cli.settings import Settings, grouped

if TYPE_CHECKING:
    from cacheblend_cli.api import Engine, PrecomputeEvent, PrecomputeReport

_RULES = (".gitignore", ".ignore")
_RETRY_MS = 2000
_STAYS = "what was stored stays"
Paths = Annotated[
    list[str] | None,
    typer.Argument(help="As given to precompute. Default: every path the store remembers.", metavar="[PATH]..."),
]
Changes = Set[Any]
START: Changes = frozenset(("start",))


@options.with_settings(*grouped("model", "prompt", "machine", "tenant"), "store", "lock_timeout")
def sync(
    settings: Settings,
    paths: Paths = None,
    json: options.Json = False,
    quiet: options.NoMessages = False,
) -> None:
    """Bring the store up to date with the documents, once.

    One precompute of the paths that were precomputed before, each cut, collected and selected as the store remembers it.
    """
    output = Output(quiet=quiet)
    engine = options.load_engine(settings, output)
    runs = _Syncing(engine, settings, output)
    with on_interrupt(_STAYS):
        report = runs.sync(runs.paths(paths))
    if json:
        output.json(_counts(report))
    else:
        output.note(_told(report))


@options.with_settings(*grouped("model", "prompt", "machine", "tenant"), "store", "lock_timeout")
def watch(settings: Settings, paths: Paths = None, quiet: options.NoMessages = False) -> None:
    """Keep the store up to date with folders, until Ctrl-C.

    Like sync, now and whenever something in the folders changes. A line tells each change. The store is open for writing
    only while something is stored, so ask, search and serve go on beside it.
    """
    output = Output(quiet=quiet)
    try:
        import watchfiles
    except ImportError:
        raise UsageError("watch needs watchfiles", "pip install 'cacheblend[watch]'") from None
    engine = options.load_engine(settings, output)
    runs = _Syncing(engine, settings, output)
    given = runs.paths(paths)
    folders = [path for path in given if os.path.isdir(path)]
    if not folders:
        raise UsageError("watch takes folders, and none was named", "name the folder that the files are in")
    for file in sorted({*given} - {*folders}):
        output.warn(f"{file} is no folder: it is read now, and not watched")
    with on_interrupt(_STAYS):
        changes = watchfiles.watch(
            *folders,
            watch_filter=_Wanted(folders, settings.store_path),
            raise_interrupt=True,
            yield_on_timeout=True,
            rust_timeout=_RETRY_MS,
        )
        follow(changes, lambda: runs.sync(given), output, ", ".join(folders))


def follow(changes: Iterable[Changes], sync: Callable[[], PrecomputeReport], output: Output, name: str) -> None:
    """Sync now, again once the watching has begun, then after each change; what failed is said, and tried again when the
    changes say that time has passed (an empty set)."""
    from cacheblend_store import StoreError

    due = True
    for changed in chain([START], changes):
        if not (due or changed):
            continue
        try:
            report = sync()
            due = changed is START  # what changed before the watching began is nobody else's to tell
            if changed is START or _is_news(report):
                output.note(_told(report) + (f"; watching {name}, Ctrl-C ends it" if changed is START else ""))
        except (CacheBlendError, StoreError) as error:  # a store that is busy, a folder that is being moved
            if changed is START and isinstance(error, CacheBlendError):
                raise
            if changed or not due:
                output.warn(f"{error.message}; it is tried again")
            due = True


class _Syncing:
    """Runs of an engine over the paths a store remembers."""

    def __init__(self, engine: Engine, settings: Settings, output: Output) -> None:
        from cacheblend_cli.corpus.conversions import Conversions

        self._engine, self._settings, self._output = engine, settings, output
        self._conversions = Conversions()

    def paths(self, given: list[str] | None) -> list[str]:
        """Those, or what the store remembers and is still on disk. Raises NotFoundError where that is nothing."""
        from cacheblend_cli.corpus.documents import check_paths
        from cacheblend_cli.corpus.places import on_disk

        if given:
            check_paths(given)
            return given
        with options.open_store(self._settings, write=False) as store:
            known = set(self._engine.roots(store, self._settings.salt))
        found = {name: path for name in known if (path := on_disk(name)) is not None}
        for path in sorted(known - found.keys()):
            self._output.warn(f"{path} is no more; chunks rm --source {path} removes its chunks")
        if not found:
            raise NotFoundError(
                f"the store remembers no path for {self._engine.model.name}", "cacheblend precompute docs/"
            )
        return sorted(found.values())

    def sync(self, paths: list[str]) -> PrecomputeReport:
        from cacheblend_cli.api import Paths, PrecomputeOptions

        wanted = PrecomputeOptions(salt=self._settings.salt)
        with options.open_store(self._settings, write=True) as store:
            return self._engine.precompute(store, Paths(paths, conversions=self._conversions), wanted, self._tell)

    def _tell(self, event: PrecomputeEvent) -> None:
        if event.kind == "removed":
            self._output.note(event.message)
        elif event.kind == "note" or (event.skipped is not None and event.skipped.named):
            self._output.warn(event.message)


class _Wanted:
    """Which changed files may change what is stored: none that are hidden, nor those of the store itself."""

    def __init__(self, folders: list[str], store: Path) -> None:
        self._folders = [os.path.realpath(folder).rstrip("/") + "/" for folder in folders]
        self._store = os.path.realpath(store)

    def __call__(self, change: Any, path: str) -> bool:
        real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if real == self._store or real.startswith(self._store + "/"):
            return False
        below = next((real.removeprefix(f) for f in self._folders if real.startswith(f)), os.path.basename(path))
        return not any(part.startswith(".") and part not in _RULES for part in below.split("/"))


def _counts(report: PrecomputeReport) -> dict[str, Any]:
    names = ("documents", "gone", "new", "replaced", "unchanged", "removed", "computed_tokens")
    return {**{name: getattr(report, name) for name in names}, "passed_over": len(report.skipped)}


def _is_news(report: PrecomputeReport) -> bool:
    return bool(report.new or report.replaced or report.removed or report.gone)


def _told(report: PrecomputeReport) -> str:
    counts = [(report.new, "new"), (report.replaced, "replaced"), (report.removed, "removed")]
    told = ", ".join(f"{count} {name}" for count, name in counts if count) or "nothing new"
    return f"{report.documents} documents: {told}, {report.unchanged} unchanged"
