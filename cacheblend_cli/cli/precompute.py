"""cacheblend precompute: compute and store the KV of documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cacheblend_store
from typer import Argument, Exit, Option

from cacheblend_cli import extensions
from cacheblend_cli.cli import folders, options
from cacheblend_cli.cli.exits import on_interrupt
from cacheblend_cli.cli.finishing import after_interrupt, finish_in_background, warm_engine
from cacheblend_cli.cli.inputs import yes_or_no
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.stores import open_store, remember_model
from cacheblend_cli.cli.tier import finish, open_tier, share
from cacheblend_cli.cli.units import counted, format_seconds, format_size, parse_size, size_for
from cacheblend_cli.cli.watch import remembered_paths, watch_folders
from cacheblend_cli.corpus.places import shown
from cacheblend_cli.errors import UsageError
from cacheblend_cli.extras import require
from cacheblend_cli.settings import Resolved, grouped
from cacheblend_cli.types import SearchParams

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.collect.collector import Cluster
    from cacheblend_cli.collect.difference import Difference
    from cacheblend_cli.collect.events import PrecomputeEvent, PrecomputeReport
    from cacheblend_cli.engine.engine import Engine
    from cacheblend_cli.engine.unloaded import UnloadedEngine
    from cacheblend_cli.settings import Settings

_REMEMBERED = ("chunk_tokens", "overlap", "context", "window", "neighbours", "state_every", "kv_dtype")
_KEPT = "what was stored is kept; run the command again to continue"
_MACHINE = ("device", "threads", "attention_backend", "tensor_parallel")
_LONG_S, _LONG_TOKENS = 10.0, 10_000  # from which the cost is shown before; tokens if the time is unknown
_reading_option = partial(Option, rich_help_panel="Reading documents")


@options.with_settings(
    "store",
    *_REMEMBERED,
    *grouped("reading", "model", "prompt", "machine", "tenant", "tier"),
    "max_size",
    "lock_timeout",
    "collection",
    collection="Name these documents, for --collection of ask, search and chat.",
    context="Left context when a chunk's KV is computed: sink (only the prompt's beginning), document (also the preceding text of its document) or neighbours (also similar chunks).",
)
def precompute(
    resolved: Resolved,
    paths: list[str] | None = Argument(
        None, help="Files and folders; - is stdin. Default: the remembered ones.", metavar="[PATH]..."
    ),
    include: list[str] | None = Option(
        None, help="Include only matching files of folders; patterns as in .gitignore (repeatable).", metavar="GLOB"
    ),
    exclude: list[str] | None = Option(
        None, help="Exclude matching files; patterns as in .gitignore (repeatable).", metavar="GLOB"
    ),
    no_ignore: bool | None = _reading_option(
        None, "--no-ignore/--ignore", help="Include files that .gitignore and .ignore exclude.", show_default="ignore"
    ),
    follow: bool | None = _reading_option(
        None,
        "--follow/--no-follow",
        help="Follow links to folders, and to files outside the folder.",
        show_default="no-follow",
    ),
    max_file_size: str | None = _reading_option(
        None, help="Skip larger files of folders.", metavar="SIZE", show_default="20MB"
    ),
    ocr: bool | None = _reading_option(
        None,
        "--ocr/--no-ocr",
        help="Recognise the text of scanned PDF pages with ocrmypdf, an installed program.",
        show_default="no-ocr",
    ),
    files_from: str | None = Option(
        None, help="Read paths from a file or stdin, separated by newlines or NUL.", metavar="FILE|-"
    ),
    watch: bool = Option(False, "--watch", help="Then watch the folders and store changes, until Ctrl-C."),
    background: bool = Option(
        False, "--background", help="Store the texts only, and let an engine in the background compute the KV."
    ),
    dry_run: bool = Option(False, "--dry-run", help="Show what would be computed and removed: tokens, bytes, time."),
    yes: bool = Option(
        False,
        "--yes",
        "-y",
        help="Don't ask before documents are recomputed with other settings, or all documents of a folder removed.",
    ),
    date: str | None = Option(
        None,
        help="For chat templates that print the date: the date to print from now on. Default: date of the first run.",
        metavar="today|YYYY-MM-DD",
        rich_help_panel="The prompt",
    ),
    force: bool = Option(False, "--force", help="Compute everything again."),
    verify_files: bool = Option(
        False,
        "--verify-files",
        help="Read every file, even if size, times and inode are unchanged since the last run.",
    ),
    collector: str | None = options.machine_option(
        None,
        help="Compute on workers that write KV to --tier, by an installed collector, such as ray:local (docs/scale.md).",
        metavar="NAME[:ADDRESS]",
    ),
    workers: int | None = options.machine_option(
        None,
        help="Number of --collector workers, each with --threads CPU cores (default 1) or one GPU. Default: 1.",
        show_default=False,
    ),
    verbose: bool = Option(False, "--verbose", "-v", help="List every skipped file, and all omissions of documents."),
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compute the KV cache of documents once, and store it.

    The texts of all documents are stored first: from then on, they can be asked about.

    A second run computes only what changed. The store remembers each PATH with its settings: --chunk-tokens, --overlap,
    --context, --window, --neighbours, --kv-dtype, --include and so on. Without PATH, all remembered paths are updated.
    Ctrl-C keeps what is stored.

    Chunks of deleted documents are removed; if a folder has none of its documents any more, only with --yes or after a
    question: its drive may not be mounted. A file that cannot be read keeps its stored version.
    """
    from cacheblend_cli.collect.settings import CollectSettings
    from cacheblend_cli.prompt.dates import parse_day

    output, settings = Output(json=json, quiet=quiet), resolved.settings
    select = folders.selected(include, exclude, no_ignore, follow, max_file_size, ocr, settings.ocr_languages)
    has_paths = bool(paths) or files_from is not None
    _check_flags(resolved, select, has_paths=has_paths, watch=watch, dry_run=dry_run)
    _check_background(background, {"--watch": watch, "--dry-run": dry_run, "--force": force, "--collector": collector})
    _check_collector(collector, workers, settings, watch=watch, dry_run=dry_run)
    quota = parse_size(settings.max_size, "--max-size") if settings.max_size else None
    given, day = _given(resolved, has_paths=has_paths), None if date is None else parse_day(date)
    CollectSettings(**given)  # raise errors before torch is imported, and read files before the model
    listed = folders.read_list(files_from, paths)
    skipped_files = folders.SkippedFiles(output, verbose=verbose)
    folders.check_files(paths or (), listed, select, settings, skipped_files)
    remember = (lambda: None) if dry_run else partial(remember_model, resolved)
    engine = options.engine_for_documents(settings, output, remember)
    from cacheblend_cli.collect.corpus_diff import Paths
    from cacheblend_cli.collect.precompute import PrecomputeOptions

    options.note_model(resolved, output)
    chosen, missing = Paths(paths or (), listed, select, settings.collection), list[str]()
    if not has_paths:
        remembered, missing = remembered_paths(engine, settings, output)
        chosen = Paths(remembered)
    opened = _store_there(settings) if dry_run else open_store(settings, write=True, max_bytes=quota)
    warm = None if collector or dry_run else warm_engine(resolved)
    if warm is not None:
        remember()  # it is loaded
    view = _View(output, skipped_files, background=background)
    hint = _KEPT if collector else partial(view.after_interrupt, settings)
    with nullcontext() if dry_run else on_interrupt(hint):
        with _cluster(engine, settings, collector, workers) as cluster, opened as kv_store, closing(view):
            if kv_store is not None and not dry_run:
                share(kv_store, settings, output, strict=True)
            wanted = PrecomputeOptions(
                **given,
                force=force,
                verify_files=verify_files,
                list_unchanged=json or quiet,
                dry_run=dry_run,
                salt=settings.salt,
                max_bytes=quota,
                day=day,
                cluster=cluster,
                warm=warm,
                texts_only=background,
                search=SearchParams.of(settings),
                machine=" ".join(map(str, (*(getattr(settings, name) for name in _MACHINE), collector, workers))),
            )
            confirm_removal = partial(view.confirm_removal, yes=yes, ask=not dry_run)
            report = engine.precompute(
                kv_store, chosen, wanted, view.on_event, partial(view.confirm, yes=yes), confirm_removal
            )
            remember()
            view.close()
            view.ready = None
            if kv_store is not None:
                finish(kv_store, output)
        if background and report.difference.computed_tokens:
            finish_in_background(resolved, report, output)
        else:
            view.show(report, settings.tier if collector else str(settings.store_path), dry_run=dry_run)
        if error := folders.not_read(missing, report, verbose=verbose, watch=watch):
            raise error
        if watch:
            watch_folders(engine, settings, chosen.all, output)


def _given(resolved: Resolved, *, has_paths: bool) -> dict[str, Any]:
    """Return the settings that replace remembered ones. Without PATH, only flags do: a configuration file applies to
    new documents."""
    origin = {name: resolved.origin[name] for name in _REMEMBERED}
    names = [name for name, its in origin.items() if its == "flag" or (has_paths and its != "default")]
    return {name: getattr(resolved.settings, name) for name in names}


def _check_flags(resolved: Resolved, select: dict[str, Any], *, has_paths: bool, watch: bool, dry_run: bool) -> None:
    """Raises UsageError for conflicting flags, and for --watch without its package."""
    if resolved.origin["ocr_languages"] == "flag" and not select.get("ocr"):
        raise UsageError("--ocr-languages was given without --ocr", "add --ocr")
    if watch and dry_run:
        raise UsageError("--watch and --dry-run were given together", "give one of them")
    if watch:
        require("--watch", "watch", "watchfiles")
    if not has_paths and (select or resolved.origin["collection"] == "flag"):
        raise UsageError(
            "flags that select files, --ocr and --collection need a PATH",
            "name the folder: cacheblend precompute FOLDER",
        )


def _check_background(background: bool, others: dict[str, object]) -> None:
    """Raise UsageError for flags that conflict with --background."""
    for flag in (flag for flag, given in others.items() if background and given):
        raise UsageError(f"{flag} cannot be used with --background", f"omit {flag}")


def _check_collector(
    collector: str | None, workers: int | None, settings: Settings, *, watch: bool, dry_run: bool
) -> None:
    """Raise UsageError for flags that conflict with --collector, and if it is not installed."""
    if collector is None:
        if workers is not None:
            raise UsageError("--workers was given without --collector", "for example --collector ray:local")
        return
    extensions.find("collector", collector.partition(":")[0])
    if workers is not None and workers < 1:
        raise UsageError(f"--workers is {workers}; the minimum is 1", "one per GPU, or one for a few CPU cores")
    if not settings.tier:
        raise UsageError(
            "--collector needs --tier, where the workers write KV", "name a bucket, or a folder that all machines share"
        )
    for flag, given in (("--watch", watch), ("--dry-run", dry_run), ("--max-size", bool(settings.max_size))):
        if given:
            raise UsageError(f"{flag} cannot be used with --collector", f"omit {flag}")


def _cluster(
    of: Engine | UnloadedEngine, settings: Settings, collector: str | None, workers: int | None
) -> AbstractContextManager[Cluster | None]:
    """Return the cluster to compute on, not yet started. Raises TierErrors."""
    if collector is None:
        return nullcontext()
    engine = of.loaded
    if engine.is_parallel:
        raise UsageError("--collector is not implemented with --tensor-parallel", "omit one of them")
    from cacheblend_cli.collect.collector import ClusterJob

    name, _, address = collector.partition(":")
    make_cluster = extensions.load("collector", name)
    tier = open_tier(settings)
    tier.check()
    threads, key_file = settings.threads or 1, settings.tier_key_file
    cluster: Cluster = make_cluster(
        ClusterJob(
            address,
            workers or 1,
            engine.worker_loader(threads),
            engine.model.fingerprint,
            tier,
            key_file and str(Path(key_file).absolute()),
            cpus=threads,
            gpus=int(engine.model.decoder.device.type == "cuda"),
        )
    )
    return cluster


def _store_there(settings: Settings) -> AbstractContextManager[ChunkStore | None]:
    try:
        return open_store(settings, write=False)
    except cacheblend_store.StoreNotFound:
        return nullcontext()


def _cost(difference: Difference) -> str:
    amount = format_size(difference.new.bytes + difference.replaced.bytes)
    time_left = f", {_time(difference)}" if difference.seconds else ""
    return f"{difference.computed_tokens:,} tokens to compute, {amount} of KV{time_left}"


def _time(difference: Difference) -> str:
    """Return the estimated time and its source."""
    source = "measured now" if difference.is_measured else "as in earlier runs here"
    return f"about {format_seconds(difference.seconds)} ({_speed(difference.computed_tokens, difference.seconds)}, {source})"


def _speed(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:,.0f} tokens/s"


def _changes(difference: Difference) -> Iterator[str]:
    for (stored, now), count in sorted(difference.changes.items()):
        documents = "1 document is" if count == 1 else f"{count} documents are"
        yield f"{documents} stored with {stored}; this run has {now}"


class _View:
    """Show events as messages and a progress bar: first for reading, then for the tokens to compute. Tokens that need
    no work are not part of the bar, so that they do not count as speed."""

    def __init__(self, output: Output, skipped_files: folders.SkippedFiles, *, background: bool = False) -> None:
        self.output, self.skipped_files, self._background = output, skipped_files, background
        self._stack, self._bar_name = ExitStack(), ""
        self._bar: Callable[[int, int, str], None] = lambda done, total, text: None
        self.done = self.total = 0
        self.ready: PrecomputeReport | None = None  # of a run that computes KV: all texts are stored

    def close(self) -> None:
        """Remove the bar; the next event shows it again."""
        self._stack.close()
        self._bar_name = ""

    def confirm(self, difference: Difference, *, yes: bool) -> bool:
        """Show the cost of other settings and ask for confirmation. Raises UsageError if stdin is not a terminal; Exit
        for a no."""
        self.close()
        for change in _changes(difference):
            self.output.warn(change)
        cost = _cost(difference)
        if yes:
            self.output.note(cost)
            return True
        unasked = f"documents are stored with other settings: {cost}"
        hint = "--yes to continue, --dry-run for details"
        if not yes_or_no(f"{cost}. Continue?", self.output, UsageError(unasked, hint)):
            self.output.note("nothing was computed; without the flag, documents are cut and collected as before")
            raise Exit()
        return True

    def confirm_removal(self, folder: str, num_documents: int, *, yes: bool, ask: bool) -> bool:
        """Ask before all documents of a folder are removed. Return False without a terminal."""
        if yes or not ask:
            return yes
        self.close()
        are_gone = "is not there any more; remove it" if num_documents == 1 else "are not there any more; remove them"
        question = f"{shown(folder)}: its {counted(num_documents, 'stored document')} {are_gone}?"
        return yes_or_no(question, self.output, None)

    def show(self, report: PrecomputeReport, place: str, *, dry_run: bool) -> None:
        """Show the result of storing in `place`."""
        if report.documents or report.gone or self.output.is_json:
            if dry_run:
                _dry_summary(report, self.output)
            else:
                _summary(report, self.output, place)
        if report.hidden:
            _warn_hidden(report.hidden, self.output)
        self.skipped_files.summarise(report.skipped)

    def on_event(self, event: PrecomputeEvent) -> None:
        if event.kind == "reading":
            self._show_bar("reading")
            text = event.message if event.total else f"{event.message}; {event.done:,} found"
            self._bar(event.done, event.total, text)
        elif event.kind == "measure":
            self.close()
            self.output.status("measuring how fast the model reads here")
        elif event.kind == "plan":
            self.close()
        elif event.planned is not None and event.report is not None:
            self._show_ready(event.planned, event.report)
        elif event.room is not None:
            room, needed = event.room, format_size(event.room.needed)
            self.output.warn(
                f"text and KV of the documents need {needed}, and the store's quota is {format_size(room.max_bytes)}: "
                f"{room.without_kv} of the {room.chunks} chunks get no KV; they are found and cited, and computed when a "
                f"question needs them; --max-size {size_for(room.needed)} fits all"
            )
        elif event.skipped is not None:
            self.skipped_files.report(event.skipped)
        elif event.kind == "omitted":
            folders.report_omissions(event.incomplete, self.output, verbose=self.skipped_files.verbose)
        elif event.kind == "removed":
            self.output.note(event.message)
        elif event.kind == "kept":
            self.output.warn(event.message)
        elif event.kind == "speed":
            if event.left_s >= _LONG_S:
                self.output.note(f"about {self._rest(event.left_s)}")
        elif event.chunk is not None:
            self._count(event)
            if self.output.is_json:
                self.output.json(event.chunk.record)
            elif self.output.quiet:
                self.output.text(event.chunk.id)

    def _show_ready(self, planned: Difference, report: PrecomputeReport) -> None:
        self.close()
        self.ready = report
        self.output.note(f"ready to ask: {counted(report.documents, 'document')}, {counted(report.chunks, 'chunk')}")
        is_long = planned.seconds >= _LONG_S if planned.seconds else planned.computed_tokens >= _LONG_TOKENS
        if is_long and not self._background and not planned.changes:  # changes were shown with their cost
            self.output.note(f"{_cost(planned)}; Ctrl-C stops and keeps what is stored")
        self.total = planned.computed_tokens

    def after_interrupt(self, settings: Settings) -> str:
        """Say what is kept and how to continue."""
        return _KEPT if self.ready is None else after_interrupt(settings, self.ready)

    def _count(self, event: PrecomputeEvent) -> None:
        if event.done:
            self._show_bar("precompute")
            self.done += event.done
            self._bar(self.done, max(self.done, self.total), self._rest(event.left_s) if event.left_s else "")

    @staticmethod
    def _rest(left_s: float) -> str:
        return f"{format_seconds(left_s)} left"

    def _show_bar(self, name: str) -> None:
        if name != self._bar_name:
            self._stack.close()
            bar = self.output.progress(name, with_eta=False)
            self._bar, self._bar_name = self._stack.enter_context(bar), name


def _warn_hidden(names: list[str], output: Output) -> None:
    some = ", ".join(map(shown, names[:3])) + (", ..." if len(names) > 3 else "")
    one = len(names) == 1
    output.warn(
        f"{len(names)} other document{'' if one else 's'} ({some}) {'is' if one else 'are'} stored with another date in the "
        f"prompt: ask does not find {'it until it is' if one else 'them until they are'} precomputed again"
    )


def _summary(report: PrecomputeReport, output: Output, place: str) -> None:
    chunks = report.new + report.unchanged + report.replaced
    taken = f", {report.taken} of them from the tier" if report.taken else ""
    speed = f"; {report.tokens_per_s:,.0f} tokens/s" if report.computed_tokens else ""
    counts = {name: getattr(report, name) for name in ("new", "replaced", "unchanged", "removed")}
    changes = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    output.note(
        f"{counted(report.documents, 'document')}, {counted(chunks, 'chunk')}{f': {changes}' if changes else ''}{taken}; "
        f"{format_size(report.bytes)} of KV in {place}{speed}, {report.seconds:.1f} s"
    )


def _dry_summary(report: PrecomputeReport, output: Output) -> None:
    difference = report.difference
    amounts = {name: getattr(difference, name) for name in ("new", "replaced", "unchanged", "removed")}
    if output.is_json:
        facts = {"documents": report.documents, "tokens": report.tokens, "bytes": report.bytes}
        facts |= {name: vars(amount) for name, amount in amounts.items()}
        omissions = {document.source: document.omissions for document in report.incomplete}
        output.json(
            {**facts, "omissions": omissions, "seconds": round(difference.seconds, 3), "skipped": len(report.skipped)}
        )
        return
    rows = [(name, f"{a.chunks:,}", f"{a.tokens:,}", format_size(a.bytes)) for name, a in amounts.items()]
    output.table(("", "chunks", "tokens", "KV"), rows, right=(1, 2, 3))
    output.text(
        f"{counted(report.documents, 'document')}, {report.tokens:,} tokens: {format_size(report.bytes)} of KV; "
        f"{difference.computed_tokens:,} tokens to compute{f', {_time(difference)}' if difference.seconds else ''}"
    )
    for change in _changes(difference):
        output.note(change)
