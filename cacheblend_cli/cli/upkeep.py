"""cacheblend chunks stats, verify, prune, compact: the upkeep of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.sizes import format_size, parse_age, parse_size
from cacheblend_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from cacheblend_store import Share


def stats(
    sources: Annotated[bool, typer.Option("--sources", help="Also what each source takes.")] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Say what the store holds: chunks and bytes by model, the file's size and what of it is free."""
    output = Output()
    settings = options.settings_of(store=store)
    with options.open_store(settings, write=False) as kv_store:
        found = kv_store.full_stats()
    models = [
        {"model": name, "fingerprint": fingerprint, "kv_dtype": codec, **vars(share)}
        for (name, fingerprint, codec), share in sorted(found.models.items())
    ]
    by_source = [{"source": name, **vars(share)} for name, share in sorted(found.sources.items())]
    if json:
        record: dict[str, Any] = {
            "path": str(settings.store_path),
            **found.totals(),
            "damaged": found.damaged,
            "models": models,
        }
        output.json({**record, "sources": by_source} if sources else record)
        return
    output.text(f"{settings.store_path}: {found.chunks} chunks of {found.documents} documents")
    quota = f" of at most {format_size(found.max_bytes)}" if found.max_bytes else ""
    output.text(
        f"{format_size(found.live_bytes)} of KV{quota}; file {format_size(found.file_bytes)}, {format_size(found.free_bytes)} of it free"
    )
    if found.damaged:
        output.warn(f"{found.damaged} damaged records; see: cacheblend chunks verify")
    columns = ("chunks", "tokens", "KV")
    if models:
        rows = [
            (name, fingerprint[:12], codec, *_share(share))
            for (name, fingerprint, codec), share in sorted(found.models.items())
        ]
        output.table(("model", "fingerprint", "KV dtype", *columns), rows, right=(3, 4, 5))
    if sources:
        output.table(
            ("source", *columns),
            [(name, *_share(share)) for name, share in sorted(found.sources.items())],
            right=(1, 2, 3),
        )


def verify(
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove what is damaged; it is computed again when needed.")
    ] = False,
    store: options.Store = None,
    lock_timeout: options.LockTimeout = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Check everything in the store, both ways: digests of all blobs, records without blobs, blobs without records.

    Exits with 4 when something is damaged and was not repaired. With -q only the ids of damaged chunks.
    """
    output = Output(quiet=quiet)
    settings = options.settings_of(store=store, lock_timeout=lock_timeout)
    with options.open_store(settings, write=repair, create=False) as kv_store, output.progress("verify") as bar:
        report = kv_store.verify(lambda done, total: bar(done, total, "chunks"), repair=repair)
    if json:
        findings = [{"kind": f.kind, "message": f.message, "id": f.key.hex() or None} for f in report.findings]
        output.json({**vars(report), "findings": findings, "ok": report.ok})
    elif quiet:
        for key in dict.fromkeys(f.key for f in report.findings if f.kind in ("manifest", "blob", "stray-blob")):
            output.text(key.hex())
    else:
        for finding in report.findings:
            output.text(f"{finding.kind}: {finding.message}")
        output.note(f"{report.chunks} chunks, {report.blobs} blobs, {format_size(report.bytes)} checked")
        if report.missing:
            output.note(f"{report.missing} chunks of documents are not stored; cacheblend precompute brings them back")
    if report.ok:
        output.note("nothing is damaged")
    elif repair:
        output.note(f"{report.repaired} findings repaired; cacheblend precompute brings removed chunks back")
    else:
        output.error(
            f"{len(report.findings)} findings in {settings.store_path}", "repair: cacheblend chunks verify --repair"
        )
        raise typer.Exit(int(ExitCode.STORE))


def prune(
    older_than: Annotated[
        str | None, typer.Option(help="Chunks not used for so long: 30d, 12h.", show_default=False)
    ] = None,
    to_size: Annotated[
        str | None, typer.Option(help="The least recently used, until so much KV is left: 20GB.", show_default=False)
    ] = None,
    orphans: Annotated[bool, typer.Option("--orphans", help="Chunks that no document refers to.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Chunks of this model, by name or fingerprint.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    store: options.Store = None,
    lock_timeout: options.LockTimeout = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Remove what is no longer wanted: what any of the conditions names."""
    output = Output(quiet=quiet)
    if older_than is None and to_size is None and not orphans and model is None:
        raise UsageError("say what to remove", "--older-than 30d, --to-size 20GB, --orphans or --model NAME")
    age = None if older_than is None else parse_age(older_than, "--older-than")
    size = None if to_size is None else parse_size(to_size, "--to-size")
    settings = options.settings_of(store=store, lock_timeout=lock_timeout)
    with options.open_store(settings, write=not dry_run, create=False) as kv_store:
        report = kv_store.prune(older_than=age, to_bytes=size, orphans=orphans, model=model, dry_run=dry_run)
    ids = [key.hex() for key in report.keys]
    if json:
        output.json({"removed": 0 if dry_run else len(ids), "bytes": report.bytes, "ids": ids, "dry_run": dry_run})
    elif quiet:
        for name in ids:
            output.text(name)
    else:
        output.note(f"{'would remove' if dry_run else 'removed'} {len(ids)} chunks, {format_size(report.bytes)}")


def compact(
    store: options.Store = None,
    lock_timeout: options.LockTimeout = None,
    json: options.Json = False,
) -> None:
    """Give the free pages of the store's file back to the disk."""
    output = Output()
    settings = options.settings_of(store=store, lock_timeout=lock_timeout)
    with options.open_store(settings, write=True, create=False) as kv_store, output.progress("compact") as bar:
        before, after = kv_store.compact(lambda done, total: bar(done, total, ""))
    if json:
        output.json({"bytes_before": before, "bytes_after": after})
    else:
        output.note(f"{format_size(before)} before, {format_size(after)} after")


def _share(share: Share) -> tuple[str, str, str]:
    return f"{share.chunks:,}", f"{share.tokens:,}", format_size(share.bytes)
