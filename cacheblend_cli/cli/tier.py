"""cacheblend chunks push and pull, and the tier of other commands."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import cacheblend_store
import typer
from typer import Argument, Option

from cacheblend_cli.cli import completion, options
from cacheblend_cli.cli.exits import on_interrupt
from cacheblend_cli.cli.inputs import read_ids
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.stores import open_store
from cacheblend_cli.cli.units import counted, format_size
from cacheblend_cli.corpus.places import landed, portable, shown
from cacheblend_cli.corpus.scopes import holds, scope_of
from cacheblend_cli.errors import ExitCode, NotFoundError, UsageError
from cacheblend_cli.extras import install_hint
from cacheblend_cli.settings import Settings
from cacheblend_cli.types import EVERYTHING

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore, DocumentRecord
    from cacheblend_store.tier import Tier, TierObject
    from cacheblend_store.upkeep.moving import MovedChunk, MoveReport

_FLUSH_STEP_S, _LIST_S, _SAMPLE = 0.2, 5.0, 8
Url = Annotated[
    str,
    Argument(
        help="A tier: ./FOLDER, file:///FOLDER, s3://BUCKET/PREFIX, gs:// or az://.", metavar="URL", show_default=False
    ),
]


@options.with_settings("store", "tier_key_file")
def push(
    settings: Settings,
    url: Url,
    chunks: list[str] | None = Argument(
        None, help="Chunk ids or unique prefixes; - is stdin.", metavar="[ID]...", autocompletion=completion.chunk_ids
    ),
    source: options.Source = None,
    model: str | None = Option(None, help="Chunks of this model, by name or fingerprint."),
    everything: bool = Option(False, "--all", help="Every chunk (default)."),
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Copy chunks and their documents to a tier.

    A tier is an object store or a portable folder.
    Existing objects are not copied again, so an interrupted push can be continued. Documents below the working
    directory get relative names, which pull resolves in its own working directory.
    """
    output = Output(json=json, quiet=quiet)
    if sum((bool(chunks), source is not None or model is not None, everything)) > 1:
        raise UsageError("chunks to push were named in more than one way", "ids, --source and --model, or --all")
    tier = open_tier(settings, url)
    from cacheblend_store.upkeep.moving import push as push_to

    with (
        on_interrupt("what was copied is kept; run the command again to copy the rest"),
        open_store(settings, write=False) as store,
        output.progress("push") as bar,
    ):
        keys = _choose(store, chunks, source, model)
        report = push_to(store, tier, keys, portable, partial(_on_chunk, output, bar))
    _summary(output, report, f"to {url}", "see: cacheblend chunks verify --repair")


@options.with_settings("store", "tier_key_file", "lock_timeout")
def pull(
    settings: Settings,
    url: Url,
    chunks: list[str] | None = Argument(None, help="Chunk ids or prefixes; - is stdin.", metavar="[ID]..."),
    source: options.Source = None,
    replace: bool = Option(False, "--replace", help="Also replace documents that the store has in another version."),
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Copy chunks and documents from a tier to the store. Digests and shapes are verified.

    The store's own data is kept, so an interrupted pull can be continued. Exits with 4 if an object was rejected; the
    others are copied. Without --tier-key-file, everyone who can write to the tier is trusted.
    """
    output = Output(json=json, quiet=quiet)
    if chunks and source is not None:
        raise UsageError("chunks to pull were named in more than one way", "ids or --source")
    tier = open_tier(settings, url, create=False)
    from cacheblend_store.upkeep.moving import pull as pull_from

    with (
        on_interrupt("what was copied is kept; run the command again to copy the rest"),
        open_store(settings, write=True) as store,
        output.progress("pull") as bar,
    ):
        report = pull_from(
            store, tier, _wanted(chunks, source), landed, partial(_on_chunk, output, bar),
            replace_documents=replace,
        )  # fmt: skip
    for name in report.kept:
        output.warn(f"{shown(name)} was kept: the store has another version; --replace takes the tier's")
    for reason in report.rejected:
        output.warn(f"document rejected: {reason}")
    if not (report.chunks or report.documents or report.kept) and (chunks or source):
        raise NotFoundError(f"nothing at {url} matches", "cacheblend doctor shows what the tier contains")
    _summary(output, report, f"from {url}", "push them again from a store that has them; the others were copied")


def open_tier(settings: Settings, url: str = "", *, create: bool = True) -> Tier:
    """Return the tier at the URL, by default that of the settings. Raises TierErrors and UsageError."""
    from cacheblend_cli.kv.tier_location import open_tier as open_at

    if "/" in url and "://" not in url:
        url = Path(url).expanduser().absolute().as_uri()
    try:
        return open_at(url or settings.tier, settings.tier_key_file or None, create=create)
    except cacheblend_store.TierUsage as error:
        if "not installed" in error.message:
            raise UsageError(error.message, install_hint("tier")) from error
        raise


def share(store: ChunkStore, settings: Settings, output: Output, *, strict: bool = False) -> None:
    """Attach the tier of the settings, if any, to the store. strict: check the tier now and raise errors of its
    configuration. An unreachable tier is not an error: its chunks are computed."""
    if not settings.tier:
        return
    from cacheblend_store.tier import SharedTier

    tier = open_tier(settings)
    if strict:
        try:
            tier.check()
        except cacheblend_store.TierError as error:
            if error.exit_code != ExitCode.STORE:
                raise
    shared = SharedTier(tier, settings.tier_deadline, output.warn)
    if not strict:
        shared.check_later()
    store.share(shared)


def finish(store: ChunkStore, output: Output) -> None:
    """Wait until chunks are written to the tier, with progress, and report failures. Ctrl-C stops waiting."""
    if store.tier is None:
        return
    total = left = store.tier.unput
    with output.progress("tier") as bar, suppress(KeyboardInterrupt):
        while left:
            bar(total - left, total, "chunks")
            left = store.tier.flush(_FLUSH_STEP_S)
    counts = store.tier.counts
    output.note(
        f"tier: wrote {counted(counts.puts, 'chunk')}, {format_size(counts.put_bytes)}, to {store.tier.tier.url}"
    )
    if left + counts.unput:
        output.warn(
            f"{left + counts.unput} chunks are not in the tier; write them: cacheblend chunks push {store.tier.tier.url}"
        )


def describe(settings: Settings) -> dict[str, Any]:
    """Return the contents of the tier, as far as listed in a few seconds, and its speed. Raises TierErrors."""
    tier, started = open_tier(settings, create=False), time.monotonic()
    tier.check()
    counts, sample, complete = {"chunks": 0, "documents": 0, "bytes": 0}, list["TierObject"](), True
    for kind, listed in (("chunks", tier.chunks()), ("documents", tier.documents())):
        for found in listed:
            counts[kind] += 1
            counts["bytes"] += found.size
            if kind == "chunks" and len(sample) < _SAMPLE:
                sample.append(found)
            if time.monotonic() - started > _LIST_S:
                complete = False
                break
    begun = time.perf_counter()
    for _ in range(3):
        tier.size(tier.name("0" * 40, bytes(20)))
    latency_s = (time.perf_counter() - begun) / 3
    begun, num_bytes = time.perf_counter(), 0
    for found in sample:
        with suppress(cacheblend_store.BadBlob):
            tier.get_chunk(found.name, found.size)
            num_bytes += found.size
        if time.perf_counter() - begun > 1.0:
            break
    seconds = time.perf_counter() - begun
    return {
        "url": tier.url, "encrypted": bool(settings.tier_key_file), **counts, "listed_whole": complete,
        "latency_ms": round(latency_s * 1e3, 2), "read_bytes_per_s": round(num_bytes / seconds) if num_bytes else None,
    }  # fmt: skip


def prune(settings: Settings, age: float, output: Output, *, dry_run: bool) -> None:
    """Delete the objects of the tier that were written longer than `age` seconds ago."""
    if not settings.tier:
        raise UsageError("no tier is set", "CACHEBLEND_TIER=URL, or: cacheblend config set tier URL")
    from cacheblend_store.upkeep.moving import prune_tier

    tier = open_tier(settings, create=False)
    with output.progress("prune") as bar:
        count, num_bytes = prune_tier(
            tier, time.time() - age, dry_run=dry_run, progress=lambda done, total: bar(done, total, "objects")
        )
    facts = {"removed": 0 if dry_run else count, "objects": count, "bytes": num_bytes, "dry_run": dry_run}
    would = "would be " if dry_run else ""
    output.done(facts, f"{counted(count, 'object')} of {tier.url} {would}removed: {format_size(num_bytes)}")


def _choose(store: ChunkStore, chunks: list[str] | None, source: str | None, model: str | None) -> set[bytes] | None:
    """Return the keys of the named chunks, None for all. Raises NotFoundError if nothing matches."""
    if chunks:
        return {store.resolve(name) for text in chunks for name in read_ids(text)}
    if source is None and model is None:
        return None
    from cacheblend_cli.corpus.citations import Citations

    scope = EVERYTHING if source is None else scope_of(source)
    citations = Citations(store, scope)
    found = {
        m.key for m in store.chunks() if holds(scope, citations.of(m).name) and (model is None or m.is_of_model(model))
    }
    if not found:
        raise NotFoundError("no stored chunk matches this source and model", "see: cacheblend chunks stats --sources")
    return found


def _wanted(chunks: list[str] | None, source: str | None) -> Callable[[DocumentRecord | str], bool] | None:
    if not chunks and source is None:
        return None
    ids = tuple(name.lower() for text in chunks or () for name in read_ids(text))
    scope = None if source is None else scope_of(source)

    def wanted(found: DocumentRecord | str) -> bool:
        if isinstance(found, str):
            return found.startswith(ids)
        if scope is not None:
            return holds(scope, found.source)
        return any(chunk.key.hex().startswith(ids) for chunk in found.chunks)

    return wanted


def _on_chunk(output: Output, bar: Callable[[int, int, str], None], chunk: MovedChunk, done: int, total: int) -> None:
    bar(done, total, "chunks")
    bad = chunk.status in ("rejected", "damaged")
    output.json({"id": chunk.id, "status": chunk.status, "bytes": chunk.num_bytes, "reason": chunk.reason or None})
    if not bad:
        output.ids([chunk.id])
    else:
        output.warn(f"chunk {chunk.id[:12]} is {chunk.status}: {chunk.reason}")


def _summary(output: Output, report: MoveReport, where: str, hint: str) -> None:
    """Show what was copied. Exits with 4 if something was damaged or rejected."""
    names = {"text": "without KV"}
    counts = [f"{count} {names.get(status, status)}" for status, count in sorted(report.chunks.items())]
    output.note(
        f"chunks: {', '.join(counts) or 'none'}; {counted(report.documents, 'document')}; {format_size(report.num_bytes)} {where}"
    )
    bad = sum(report.chunks.get(status, 0) for status in ("rejected", "damaged")) + len(report.rejected)
    if bad:
        output.error(f"{bad} objects were not copied", hint)
        raise typer.Exit(int(ExitCode.STORE))
