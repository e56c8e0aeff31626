"""cacheblend precompute: documents into the store."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_cli.cli import options
from cacheblend_cli.cli.interrupts import on_interrupt
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.sizes import format_size, parse_size
from cacheblend_cli.corpus.documents import SUFFIXES, check_paths
from cacheblend_cli.corpus.places import text_of
from cacheblend_cli.errors import UsageError
from cacheblend_cli.settings import Settings, of_settings

if TYPE_CHECKING:
    from cacheblend_cli.api import PrecomputeEvent, PrecomputeReport


@options.with_settings(
    "model",
    "store",
    "chunk_tokens",
    "context",
    "window",
    "neighbours",
    "kv_dtype",
    *options.MACHINE,
    "salt",
    "max_size",
    "lock_timeout",
    context="What a chunk sees when it is collected: sink (the prompt's beginning), document (and the chunks before it in its document) or neighbours (and the chunks most like it, of these documents and the store).",
)
def precompute(
    settings: Settings,
    paths: Annotated[list[str], typer.Argument(help="Files and directories; - is stdin.", metavar="PATH...")],
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say tokens, bytes and time, as if nothing were stored yet, and store nothing."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Compute everything again.")] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compute the KV cache of every chunk of the documents once, and keep it in the store.

    A second run does only what changed. Ctrl-C keeps what is done. Contexts live side by side: ask --context chooses.
    """
    output = Output(quiet=quiet)
    from cacheblend_cli.api import PrecomputeOptions

    wanted = of_settings(PrecomputeOptions, settings, force=force, dry_run=dry_run)
    check_paths(paths)
    quota = parse_size(settings.max_size, "--max-size") if settings.max_size else None
    engine = options.load_engine(settings, output)
    options.about_demo(settings, output, paths)
    opened = nullcontext() if dry_run else options.open_store(settings, write=True, max_bytes=quota)
    told = nullcontext() if dry_run else on_interrupt("what was stored stays; the same command goes on from there")
    with told, opened as kv_store, output.progress("precompute") as bar:
        report = engine.precompute(kv_store, paths, wanted, _View(output, bar, json, quiet).on_event)
    _summary(report, output, str(settings.store_path), dry_run, json)
    _check_named(paths, report)


class _View:
    """Turns events into lines and the bar."""

    def __init__(self, output: Output, bar: object, json: bool, quiet: bool) -> None:
        import time

        self.output, self.bar, self.json, self.quiet = output, bar, json, quiet
        self.done = self.total = self.computed = 0
        self._clock, self._start = time.perf_counter, time.perf_counter()

    def on_event(self, event: PrecomputeEvent) -> None:
        if event.kind == "plan":
            self.total, self._start = event.tokens_total, self._clock()
        elif event.kind == "skipped":
            self.output.warn(f"skipped {event.message}")
        elif event.kind == "removed":
            self.output.note(event.message)
        elif event.chunk is not None:
            self.done += event.chunk.tokens
            self.computed += event.chunk.tokens * (event.chunk.status != "unchanged")
            rate = self.computed / max(1e-9, self._clock() - self._start)
            self.bar(self.done, self.total, f"{rate:,.0f} tokens/s")  # type: ignore[operator]
            if self.json:
                self.output.json(vars(event.chunk))
            elif self.quiet:
                self.output.text(event.chunk.id)


def _check_named(paths: list[str], report: PrecomputeReport) -> None:
    """A file that was named and could not be read is an error, after everything else was done."""
    named = {text_of(str(Path(p))) for p in paths}
    bad = [(source, reason) for source, reason in report.skipped if source in named]
    if bad:
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise UsageError(
            f"{bad[0][0]} was not stored: {bad[0][1]}{more}",
            "cacheblend reads files of UTF-8 text that are not empty; - is stdin",
        )
    if not report.documents and not report.gone:
        raise UsageError(
            "no document was found", f"in directories cacheblend reads {', '.join(SUFFIXES)}; name other files"
        )


def _summary(report: PrecomputeReport, output: Output, store: str, dry_run: bool, json: bool) -> None:
    if dry_run:
        _dry_summary(report, output, json)
        return
    chunks = report.new + report.unchanged + report.replaced
    speed = f"; {report.tokens_per_s:,.0f} tokens/s" if report.computed_tokens else ""
    output.note(
        f"{report.documents} documents, {chunks} chunks: {report.new} new, {report.replaced} replaced, "
        f"{report.unchanged} unchanged, {report.removed} removed; {format_size(report.bytes)} of KV in {store}{speed}, "
        f"{report.seconds:.1f} s"
    )
    if report.evicted:
        output.warn(
            f"the store's quota has no room for the KV of all of these documents: {report.evicted} of their chunks are "
            "found and cited as ever, and computed when they are asked for; raise --max-size"
        )


def _dry_summary(report: PrecomputeReport, output: Output, json: bool) -> None:
    seconds = report.estimated_seconds or 0.0
    if json:
        facts = {"documents": report.documents, "tokens": report.tokens, "bytes": report.bytes}
        output.json({**facts, "seconds": round(seconds, 3), "skipped": len(report.skipped)})
    else:
        output.text(
            f"{report.documents} documents, {report.tokens:,} tokens: {format_size(report.bytes)} of KV, "
            f"about {seconds:,.1f} s on this machine if nothing is stored yet"
        )
