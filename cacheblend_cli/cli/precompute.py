"""cacheblend precompute: documents into the store."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output
from cacheblend_cli.errors import UsageError

if TYPE_CHECKING:
    from cacheblend_cli.api import PrecomputeEvent, PrecomputeReport


def precompute(
    paths: Annotated[list[str], typer.Argument(help="Files and directories; - is stdin.", metavar="PATH...")],
    model: options.Model = None,
    store: options.Store = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Tokens of a chunk at most.", show_default="512")] = None,
    context: Annotated[
        str | None, typer.Option(help="What a chunk sees when it is collected: sink or document.", show_default="sink")
    ] = None,
    kv_dtype: options.KvDtype = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    attention_backend: options.Backend = None,
    threads: options.Threads = None,
    salt: options.Salt = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say tokens, bytes and time, and store nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Compute everything again.")] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compute the KV cache of every chunk of the documents once, and keep it in the store.

    A second run does only what changed. Ctrl-C keeps what is done.
    """
    output = Output(quiet=quiet)
    settings = options.settings_of(
        model=model, store=store, chunk_tokens=chunk_tokens, context=context, kv_dtype=kv_dtype, device=device,
        dtype=dtype, attention_backend=attention_backend, threads=threads, salt=salt,
    )  # fmt: skip
    from cacheblend_cli.api import PrecomputeOptions
    from cacheblend_cli.corpus.documents import check_paths

    wanted = PrecomputeOptions(
        settings.chunk_tokens,
        settings.context,
        kv_dtype=settings.kv_dtype,
        force=force,
        dry_run=dry_run,
        salt=settings.salt,
    )
    check_paths(paths)
    engine = options.load_engine(settings, output)
    opened = nullcontext() if dry_run else options.open_store(settings, write=True)
    with opened as kv_store, output.progress("precompute") as bar:
        report = engine.precompute(kv_store, paths, wanted, _View(output, bar, json, quiet).on_event)
    _check_explicit(paths, report)
    _summary(report, output, str(settings.store_path), dry_run, json)


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


def _check_explicit(paths: list[str], report: PrecomputeReport) -> None:
    """A file that was named and could not be read is an error, after everything else was done."""
    for source, reason in report.skipped:
        if source in paths and reason != "empty":
            raise UsageError(
                f"{source} was not stored: {reason}", "cacheblend reads UTF-8 text; convert the file first"
            )


def _summary(report: PrecomputeReport, output: Output, store: str, dry_run: bool, json: bool) -> None:
    chunks = report.new + report.unchanged + report.replaced
    if dry_run:
        facts = {
            "documents": report.documents, "tokens": report.tokens, "bytes": report.bytes,
            "seconds": round(report.estimated_seconds or 0.0, 3), "skipped": len(report.skipped),
        }  # fmt: skip
        if json:
            output.json(facts)
        else:
            output.text(
                f"{report.documents} documents, {report.tokens:,} tokens: {report.bytes / 2**20:,.1f} MiB of KV, "
                f"about {report.estimated_seconds or 0:,.1f} s on this machine"
            )
        return
    output.note(
        f"{report.documents} documents, {chunks} chunks: {report.new} new, {report.replaced} replaced, {report.unchanged} unchanged, "
        f"{report.removed} removed; {report.bytes / 2**20:,.1f} MiB of KV in {store}; {report.tokens_per_s:,.0f} tokens/s, {report.seconds:.1f} s"
    )
    if not report.documents:
        raise UsageError(
            "no document was found", "cacheblend reads .md, .txt, .rst, .adoc and .org files in directories"
        )
