"""cacheblend chunks stats, verify, prune and compact: maintenance of a store."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import cacheblend_store
import typer
from typer import Option

from cacheblend_cli.cli import deleting, options, tier
from cacheblend_cli.cli.output import Output, show_table
from cacheblend_cli.cli.stores import open_store
from cacheblend_cli.cli.units import counted, format_size, parse_age, parse_size
from cacheblend_cli.corpus.places import shown
from cacheblend_cli.corpus.scopes import roots_in
from cacheblend_cli.errors import ExitCode, UsageError
from cacheblend_cli.settings import Settings

if TYPE_CHECKING:
    from cacheblend_store import Amount, ChunkStore, SalvageReport
    from cacheblend_store.upkeep.prune import PruneReport
    from cacheblend_store.upkeep.stats import StoreStats
    from cacheblend_store.upkeep.verify import VerifyReport

_OF_A_CHUNK = ("manifest", "blob", "stray-blob")


@options.with_settings("store", "tier", "tier_key_file")
def stats(
    settings: Settings,
    sources: bool = Option(False, "--sources", help="Also show the share of each source."),
    json: options.Json = False,
) -> None:
    """Show what the store holds.

    Chunks and bytes by model, the size and free space of the file, and the folders that precompute remembers.
    """
    output = Output(json=json)
    with open_store(settings, write=False) as kv_store:
        found = cacheblend_store.stats(kv_store)
        shares = sorted(_by_source(kv_store).items()) if sources else []
        remembered = list(map(shown, roots_in(kv_store)))
    of_tier = tier.describe(settings) if settings.tier else None
    models = sorted(found.models.items())
    record: dict[str, Any] = {
        "path": str(settings.store_path),
        **found.totals(),
        "damaged": found.damaged,
        "without_kv": found.without_kv,
        "models": [
            {"model": name, "fingerprint": fingerprint, "kv_dtype": codec, **vars(share)}
            for (name, fingerprint, codec), share in models
        ],
        "prefixes": vars(found.prefixes),
        "remembered": remembered,
    }
    record |= {"tier": of_tier} if of_tier else {}
    output.json(record | ({"sources": [{"source": name, **vars(share)} for name, share in shares]} if sources else {}))
    if json:
        return
    _show_stats(settings, found, of_tier, output)
    if remembered:
        output.line(f"precompute without a path updates {', '.join(remembered)}")
    columns = ("chunks", "tokens", "KV", "KV per token")
    if models:
        rows = [(name, fingerprint[:12], codec, *_share(share)) for (name, fingerprint, codec), share in models]
        show_table(("model", "fingerprint", "KV dtype", *columns), rows, output)
    if sources:
        by_source = [(name, *_share(share)) for name, share in shares]
        output.table(("source", *columns), by_source, right=(1, 2, 3, 4), ends=(0,))


def _show_stats(settings: Settings, found: StoreStats, of_tier: dict[str, Any] | None, output: Output) -> None:
    chunks, of_chunks = found.totals()["chunks"], found.live_bytes - found.prefixes.bytes
    output.text(
        f"{settings.store_path}: {counted(chunks, 'chunk')} of {counted(found.documents, 'document')}, {format_size(of_chunks)} of KV"
    )
    quota = f"; {format_size(found.quota_bytes)} of the quota of {format_size(found.max_bytes)} used"
    output.text(
        f"prompt prefixes {format_size(found.prefixes.bytes)}, text {format_size(found.text_bytes)}"
        + (quota if found.max_bytes else "")
    )
    output.text(f"file {format_size(found.file_bytes)}, {format_size(found.free_bytes)} of it free")
    if found.without_kv:
        without = f"{found.without_kv:,} of {counted(chunks, 'chunk')}"
        output.text(f"{without} have no KV; they are computed when a question needs them")
    if found.damaged:
        output.warn(f"{found.damaged} damaged records; see: cacheblend chunks verify")
    if of_tier:
        speed = of_tier["read_bytes_per_s"]
        output.text(
            f"tier {of_tier['url']}: {'' if of_tier['listed_whole'] else 'more than '}{of_tier['chunks']} chunks, "
            f"{format_size(of_tier['bytes'])}; a request takes {of_tier['latency_ms']} ms"
            + (f", one reader gets {format_size(speed)}/s" if speed else "")
        )


def _by_source(store: ChunkStore) -> dict[str, Amount]:
    """Return each document's share of the store. A chunk of several documents counts for the cited one."""
    from cacheblend_cli.corpus.citations import Citations

    citations, shares = Citations(store), dict[str, "Amount"]()
    for manifest in store.chunks(prefixes=True):
        share = shares.setdefault(citations.of(manifest).source, cacheblend_store.Amount())
        share.add(manifest.num_tokens, manifest.num_bytes)
    return shares


@options.with_settings("store", "lock_timeout")
def verify(
    settings: Settings,
    repair: bool = Option(False, "--repair", help="Remove damaged records; they are computed again when needed."),
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Check the whole store for damage.

    Checks the digests of all blobs, and looks for records without blobs and blobs without records.

    Exits with 4 if damage was found and not repaired ("ok" in --json). With -q, print only the ids of damaged chunks.
    --repair also rebuilds a store that cannot be opened from its readable records.
    """
    output = Output(json=json, quiet=quiet)
    rebuilt = _rebuild(settings, output) if repair else None
    with open_store(settings, write=repair, create=False) as kv_store, output.progress("verify") as bar:
        report = cacheblend_store.verify(kv_store, lambda done, total: bar(done, total, "chunks"), repair)
    done, findings = report.repaired, report.findings
    left = len(findings) - done
    if json:
        found = [{"kind": f.kind, "message": f.message, "id": f.key.hex() or None} for f in findings]
        facts = {"rebuilt": rebuilt and vars(rebuilt), "repaired": done, "ok": not left}
        output.json({**vars(report), "findings": found, **facts})
    else:
        _show_findings(report, output)
    if rebuilt is not None:
        _note_rebuilt(rebuilt, output)
    if not findings:
        output.note("no damage found")
    elif done:
        output.note(f"{counted(done, 'finding')} repaired; cacheblend precompute restores damaged chunks")
    if left:
        output.error(
            f"{counted(left, 'finding')} in {settings.store_path}", "repair: cacheblend chunks verify --repair"
        )
        raise typer.Exit(int(ExitCode.STORE))


def _show_findings(report: VerifyReport, output: Output) -> None:
    """Show findings and what was checked; with --quiet the ids of damaged chunks."""
    if output.quiet:
        for key in dict.fromkeys(f.key for f in report.findings if f.kind in _OF_A_CHUNK):
            output.text(key.hex())
        return
    for finding in report.findings:
        output.line(f"{finding.kind}: {finding.message}")
    output.note(
        f"{counted(report.chunks, 'chunk')}, {counted(report.blobs, 'blob')}, {format_size(report.bytes)} checked"
    )
    if report.missing:
        output.note(f"{report.missing} chunks of documents are not stored; cacheblend precompute restores them")
    if report.without_kv:
        output.note(f"{report.without_kv} chunks have no KV; they are computed when a question needs them")


def _note_rebuilt(rebuilt: SalvageReport, output: Output) -> None:
    output.note(
        f"the store was rebuilt from readable records: {rebuilt.chunks} chunks; cacheblend precompute restores the others"
    )
    if rebuilt.sources:
        output.note(f"precompute again: {', '.join(map(shown, rebuilt.sources))}")


def _rebuild(settings: Settings, output: Output) -> SalvageReport | None:
    """Rebuild a store that cannot be opened. Return None if it can."""
    try:
        open_store(settings, write=True, create=False).close()
    except cacheblend_store.StoreCorrupt as error:
        output.warn(error.message)
        with output.progress("rebuild") as bar:
            return cacheblend_store.salvage(
                settings.store_path,
                settings.lock_timeout,
                lambda done, total: bar(done, total, "chunks"),
                force=settings.force_store,
            )
    return None


@options.with_settings("store", "lock_timeout", "tier_key_file")
def prune(
    settings: Settings,
    of_tier: bool = Option(
        False, "--tier", help="Instead, delete objects of the tier (setting tier) written before --older-than."
    ),
    older_than: str | None = Option(None, help="Evict KV not used for this long: 30d, 12h."),
    to_size: str | None = Option(None, help="Evict the least recently used KV down to this size: 20GB."),
    orphans: bool = Option(False, "--orphans", help="Remove chunks that no document refers to."),
    model: str | None = Option(None, help="Remove chunks of this model, by name or fingerprint."),
    dry_run: bool = Option(False, "--dry-run", help="Show what would be removed; remove nothing."),
    yes: bool = deleting.YES,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Evict unused KV and remove unwanted chunks.

    Takes all chunks that match one of the conditions.
    A chunk whose KV is evicted is still found and cited, and computed when a question needs it.
    Asks before --model removes chunks of more than one document.
    """
    output = Output(json=json, quiet=quiet)
    others = to_size is not None or orphans or model is not None
    if older_than is None and not others:
        raise UsageError("no condition was given", "--older-than 30d, --to-size 20GB, --orphans or --model NAME")
    age = None if older_than is None else parse_age(older_than, "--older-than")
    size = None if to_size is None else parse_size(to_size, "--to-size")
    if of_tier:
        if age is None or others:
            raise UsageError("--tier takes only --older-than", "chunks prune --tier --older-than 30d")
        tier.prune(settings, age, output, dry_run=dry_run)
        return
    with open_store(settings, write=not dry_run, create=False) as kv_store:
        free = partial(cacheblend_store.prune, kv_store, older_than=age, to_bytes=size, orphans=orphans, model=model)
        if model is not None and not dry_run:
            deleting.confirm(output, kv_store, free(dry_run=True).keys, yes=yes)
        report = free(dry_run=dry_run)
        free_bytes = deleting.free_bytes(kv_store)
    _show_pruned(report, output, dry_run=dry_run)
    if not (json or dry_run):
        deleting.note_free(output, free_bytes)


def _show_pruned(report: PruneReport, output: Output, *, dry_run: bool) -> None:
    if output.is_json:
        ids = {"ids": [key.hex() for key in report.keys], "evicted_ids": [key.hex() for key in report.evicted]}
        counts = {"removed": len(report.keys) * (not dry_run), "evicted": len(report.evicted) * (not dry_run)}
        output.json({**counts, "bytes": report.bytes, **ids, "dry_run": dry_run})
        return
    output.ids(key.hex() for key in (*report.keys, *report.evicted))
    removed, evicted = counted(len(report.keys), "chunk"), counted(len(report.evicted), "chunk")
    would = "would be " if dry_run else ""
    parts = [f"{removed} {would}removed"] if report.keys or not report.evicted else []
    parts += [f"the KV of {evicted} {would}freed"] if report.evicted else []
    output.note(f"{', '.join(parts)}: {format_size(report.bytes)}")


@options.with_settings("store", "lock_timeout")
def compact(settings: Settings, json: options.Json = False) -> None:
    """Return the free pages of the store's file to the disk."""
    with open_store(settings, write=True, create=False) as kv_store:
        before, after = cacheblend_store.compact(kv_store)
    facts = {"bytes_before": before, "bytes_after": after}
    Output(json=json).done(facts, f"{format_size(before)} before, {format_size(after)} after")


def _share(share: Amount) -> tuple[str, str, str, str]:
    per_token = format_size(share.bytes_per_token) if share.bytes else ""
    return f"{share.chunks:,}", f"{share.tokens:,}", format_size(share.bytes), per_token
