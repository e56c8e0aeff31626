"""cacheblend precompute: documents into the store."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.sizes import format_size, parse_size
from cacheblend_cli.corpus.documents import SUFFIXES, check_paths
from cacheblend_cli.corpus.places import text_of
from cacheblend_cli.errors import UsageError

if TYPE_CHECKING:
    from cacheblend_cli.api import PrecomputeEvent, PrecomputeReport


def precompute(
    paths: Annotated[list[str], typer.Argument(help="Files and directories; - is stdin.", metavar="PATH...")],
    model: options.Model = None,
    store: options.Store = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Tokens of a chunk at most.", show_default="512")] = None,
    context: Annotated[
        str | None,
        typer.Option(
            help="What a chunk sees when it is collected: sink (the prompt's beginning), document (and the chunks before "
            "it in its document) or neighbours (and the chunks most like it, of these documents and the store).",
            show_default="document",
        ),
    ] = None,
    window: options.Window = None,
    neighbours: options.Neighbours = None,
    kv_dtype: options.KvDtype = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    attention_backend: options.Backend = None,
    threads: options.Threads = None,
    salt: options.Salt = None,
    max_size: Annotated[
        str | None,
        typer.Option(
            help="The most KV the store keeps, as 20GB: the least recently used goes, its text stays. 0: all.",
            show_default=False,
        ),
    ] = None,
    lock_timeout: options.LockTimeout = None,
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
    settings = options.settings_of(
        model=model, store=store, chunk_tokens=chunk_tokens, context=context, window=window, neighbours=neighbours, kv_dtype=kv_dtype, device=device,
        dtype=dtype, attention_backend=attention_backend, threads=threads, salt=salt, max_size=max_size, lock_timeout=lock_timeout,
    )  # fmt: skip
    from cacheblend_cli.api import PrecomputeOptions

    wanted = PrecomputeOptions(
        settings.chunk_tokens,
        settings.context,
        settings.window,
        settings.neighbours,
        kv_dtype=settings.kv_dtype,
        force=force,
        dry_run=dry_run,
        salt=settings.salt,
    )
    check_paths(paths)
    quota = parse_size(settings.max_size, "--max-size") if settings.max_size else None
    engine = options.load_engine(settings, output)
    opened = nullcontext() if dry_run else options.open_store(settings, write=True, max_bytes=quota)
    with opened as kv_store, output.progress("precompute") as bar:
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
