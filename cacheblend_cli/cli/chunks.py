"""cacheblend chunks: list, show and remove stored chunks; upkeep, push and pull."""

from __future__ import annotations

import sys
from collections import Counter
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from typer import Argument, Option

from cacheblend_cli.cli import completion, deleting, options, tier, upkeep
from cacheblend_cli.cli.folders import first_of
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.stores import open_store
from cacheblend_cli.cli.units import counted, format_size
from cacheblend_cli.corpus.places import shown, with_parents
from cacheblend_cli.corpus.scopes import holds, roots_in, scope_of
from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.settings import Settings
from cacheblend_cli.types import EVERYTHING

if TYPE_CHECKING:
    from cacheblend_store import ChunkManifest, DocumentRecord, Memo

    from cacheblend_cli.corpus.citations import Citation

_TEXT_READ, _TEXT_SHOWN = 1000, 50  # characters of a text
_LABELS = {"lines": "place", "also_in": "also in"}
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, show, check and remove stored chunks.")


@app.command("ls")
@options.with_settings("store")
def ls(
    settings: Settings,
    source: options.Source = None,
    limit: int | None = Option(None, min=1, help="Maximum number of chunks."),
    after: str | None = Option(None, help="Continue after this chunk (next page).", metavar="ID"),
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """List the chunks: id, tokens, size, source, beginning of the text. Pages are in order of ids.

    Stored KV of prompt prefixes is not listed.
    """
    from cacheblend_cli.corpus.citations import Citations

    output = Output(json=json, quiet=quiet)
    last, count, rows = None, 0, list[_ChunkRow]()
    with open_store(settings, write=False) as kv_store:
        start = None if after is None else kv_store.resolve(after)
        scope = EVERYTHING if source is None else scope_of(source)
        citations = Citations(kv_store, None if source is None else scope)
        all_of = ((m, citations.all_of(m)) for m in kv_store.chunks(start_after=start))
        within = ((m, [c for c in places if holds(scope, c.name)]) for m, places in all_of)
        for manifest, places in islice((found for found in within if found[1]), limit):
            last, count = manifest, count + 1
            if json:
                output.json(_record(manifest, *places))
            elif quiet:
                output.text(manifest.id)
            else:
                rows += (_ChunkRow.of(manifest, citation) for citation in places)
    if last is None:
        output.note("no chunks are stored" if source is None and after is None else "no more chunks match")
    elif rows:
        _show_rows(rows, output)
        if count == limit:
            output.note(f"next page: --after {last.id[:12]}")


@app.command("show")
@options.with_settings("store")
def show(
    settings: Settings,
    chunk: str = Argument(help="Chunk id or a unique prefix of it.", metavar="ID", autocompletion=completion.chunk_ids),
    json: options.Json = False,
) -> None:
    """Show one chunk: source, storage format and text."""
    from cacheblend_cli.corpus.citations import Citations

    output = Output(json=json)
    with open_store(settings, write=False) as kv_store:
        manifest = kv_store.get_chunk(kv_store.resolve(chunk))
        assert manifest is not None
        citation, *others = Citations(kv_store).all_of(manifest)
    record = _record(manifest, citation, *others)
    about = {"omissions": list(citation.omissions), "text": manifest.text, "token_ids": list(manifest.token_ids)}
    output.json({**record, **about})
    facts = {**record, "lines": citation.place, "headings": " > ".join(citation.locator.headings)}
    facts["also_in"] = ", ".join(record["also_in"])
    for name, value in facts.items():
        if name != "part" and value != "":
            output.line(f"{_LABELS.get(name, name):<14}{value}")
    for omission in citation.omissions:
        output.line(f"{'left out':<14}{omission}")
    output.text("\n" + manifest.text)


@app.command("rm")
@options.with_settings("store", "lock_timeout")
def rm(
    settings: Settings,
    chunks: list[str] | None = Argument(
        None, help="Chunk ids or unique prefixes.", metavar="[ID]...", autocompletion=completion.chunk_ids
    ),
    source: options.Source = None,
    everything: bool = Option(False, "--all", help="Remove every chunk."),
    yes: bool = deleting.YES,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Remove chunks. The next precompute computes their documents again, unless their folder is forgotten.

    --all and --source also forget the folders that they name, so that precompute without a path does not update them.
    Asks before chunks of more than one document are removed.
    """
    output = Output(json=json, quiet=quiet)
    if sum((bool(chunks), source is not None, everything)) != 1:
        raise UsageError("chunks to remove must be named in exactly one way", "chunk ids, --source PATH or --all")
    with open_store(settings, write=False) as reading:
        keys, found = list(map(reading.resolve, chunks or ())), list["DocumentRecord"]()
        listed, roots = set(keys), dict[str, list["Memo"]]()
        if not chunks:
            scope = EVERYTHING if source is None else scope_of(source)
            found, roots = [d for d in reading.documents() if holds(scope, d.source)], roots_in(reading, scope)
            if source is not None and not (found or roots):
                raise NotFoundError(f"no stored document matches {source}", "list them: cacheblend chunks ls")
            listed.update((m.key for m in reading.chunks()), reading.damaged_keys())
        if everything:
            keys = list(listed.union(m.key for m in reading.chunks(prefixes=True)))
        deleting.confirm(output, reading, keys, found, yes=yes)
    with open_store(settings, write=True, create=False) as kv_store:
        if keys:
            kv_store.remove_chunks(keys)
        keys += kv_store.remove_documents(d.key for d in found)
        kv_store.remove_memos(memo for memos in roots.values() for memo in memos)
        left, free = roots_in(kv_store), deleting.free_bytes(kv_store)
    ids = [key.hex() for key in dict.fromkeys(keys) if key in listed]
    if json:
        output.json({"removed": len(ids), "ids": ids, "forgotten": list(map(shown, roots))})
        return
    output.ids(ids)
    of = f" of {counted(count, 'document')}" if (count := len({d.source for d in found})) else ""
    output.note(f"removed {counted(len(ids), 'chunk')}{of}")
    if roots:
        output.note(f"precompute without a path does not update {first_of(list(roots))} any more")
    if above := {path for d in found for path in with_parents(d.source) if path in left}:
        output.note(f"{first_of(sorted(above))}: the next precompute computes what is there again")
    deleting.note_free(output, free)


class _ChunkRow(NamedTuple):
    source: str
    position: int
    id: str
    model: tuple[str, str]  # fingerprint and name
    num_tokens: int
    num_bytes: int
    size: str  # num_bytes with a unit
    text: str  # beginning of the chunk's text

    @classmethod
    def of(cls, m: ChunkManifest, citation: Citation) -> _ChunkRow:
        model = sys.intern(m.model), sys.intern(m.model_name)
        text = " ".join(m.text[:_TEXT_READ].split())[:_TEXT_SHOWN]
        return cls(citation.source, citation.index, m.id[:12], model, m.num_tokens, m.num_bytes, _size(m), text)


def _show_rows(rows: list[_ChunkRow], output: Output) -> None:
    rows.sort(key=lambda row: (row.source, row.position))
    names = _names(dict(row.model for row in rows))
    several = int(len(names) > 1)  # omit the column for a single model
    table = [
        (r.id, *[names[r.model[0]]] * several, r.num_tokens, r.size, f"{r.source}#{r.position}", r.text) for r in rows
    ]
    columns = ("id", *["model"] * several, "tokens", "size", "source", "text")
    output.table(columns, table, right=(1 + several, 2 + several), ends=(3 + several, *[1] * several))
    chunks = {row.id: row for row in rows}.values()  # a chunk of several documents has several rows
    tokens, size = sum(r.num_tokens for r in chunks), format_size(sum(r.num_bytes for r in chunks))
    output.note(f"{counted(len(chunks), 'chunk')}, {tokens:,} tokens, {size}")


def _names(models: dict[str, str]) -> dict[str, str]:
    """Return the models' names by fingerprint; equal names get the beginning of the fingerprint."""
    count = Counter(models.values())
    return {m: name if count[name] == 1 else f"{name} {m[:6]}" for m, name in models.items()}


def _size(m: ChunkManifest) -> str:
    return format_size(m.num_bytes) if m.has_kv else "evicted" if m.evicted else "no KV yet"


def _record(m: ChunkManifest, citation: Citation, *others: Citation) -> dict[str, Any]:
    return {
        "id": m.id, "source": citation.source, "index": citation.index, "span": list(m.span),
        "lines": list(citation.locator.lines) if any(citation.locator.lines) else None, "part": citation.locator.part,
        "headings": list(citation.locator.headings), "tokens": m.num_tokens, "bytes": m.num_bytes,
        "kv": "stored" if m.has_kv else "evicted" if m.evicted else "none",
        "model": m.model_name, "context": m.context, "kv_dtype": m.codec, "layers": m.num_layers,
        "created": datetime.fromtimestamp(m.created).isoformat(timespec="seconds"),
        "also_in": [f"{other.source}#{other.index}" for other in others],
    }  # fmt: skip


for _command in (upkeep.stats, upkeep.verify, upkeep.prune, upkeep.compact, tier.push, tier.pull):
    app.command(_command.__name__)(_command)
