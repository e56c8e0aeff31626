"""cacheblend chunks: what is in the store."""

from __future__ import annotations

from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.sizes import format_size
from cacheblend_cli.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from cacheblend_store import ChunkManifest

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, show, check and remove stored chunks.")


@app.command("ls")
def ls(
    source: Annotated[
        str | None, typer.Option(help="Only chunks of sources that contain this text.", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many.", show_default=False)] = None,
    after: Annotated[
        str | None, typer.Option(help="Go on after this chunk: the next page.", metavar="ID", show_default=False)
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """List the chunks: id, tokens, size, source, beginning of the text. Pages follow the order of the ids.

    The KV of a prompt's prefix is stored like a chunk's; it is not listed here.
    """
    output = Output(quiet=quiet)
    last = None
    with options.open_store(options.settings_of(store=store), write=False) as kv_store:
        start = None if after is None else kv_store.resolve(after)
        found = (m for m in kv_store.chunks(start_after=start) if source is None or source in m.source)
        rows = []
        for manifest in islice(found, limit):
            last = manifest
            if json:
                output.json(_record(manifest))
            elif quiet:
                output.text(manifest.id)
            else:
                rows.append(manifest)
    if last is None:
        output.note("no chunk is stored" if source is None and after is None else "no such chunk, or no more of them")
    if rows:
        rows.sort(key=lambda m: (m.source, m.index))
        table = [
            (m.id[:12], m.num_tokens, _size(m), f"{m.source}#{m.index}", " ".join(m.text.split())[:50]) for m in rows
        ]
        output.table(("id", "tokens", "size", "source", "text"), table, right=(1, 2), ends=(3,))
        output.note(
            f"{len(rows)} chunks, {sum(m.num_tokens for m in rows):,} tokens, {format_size(sum(m.num_bytes for m in rows))}"
        )
        if last is not None and len(rows) == limit:
            output.note(f"the next page: --after {last.id[:12]}")


@app.command("show")
def show(
    chunk: Annotated[str, typer.Argument(help="A chunk id or a unique beginning of one.", metavar="ID")],
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Show one chunk: where it is from, how it is stored, its text."""
    output = Output()
    with options.open_store(options.settings_of(store=store), write=False) as kv_store:
        manifest = kv_store.get_chunk(kv_store.resolve(chunk))
    assert manifest is not None
    record = _record(manifest)
    if json:
        output.json({**record, "text": manifest.text, "token_ids": list(manifest.token_ids)})
        return
    for name, value in record.items():
        output.line(f"{name:<14}{value}")
    output.text("\n" + manifest.text)


@app.command("rm")
def rm(
    chunks: Annotated[
        list[str] | None, typer.Argument(help="Chunk ids or unique beginnings.", metavar="[ID]...")
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Remove a whole document, by its exact source.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove every chunk.")] = False,
    store: options.Store = None,
    lock_timeout: options.LockTimeout = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Remove chunks. The documents are computed again by the next precompute."""
    output = Output(quiet=quiet)
    if sum((bool(chunks), source is not None, everything)) != 1:
        raise UsageError("say what to remove, in one way", "chunk ids, --source PATH or --all")
    settings = options.settings_of(store=store, lock_timeout=lock_timeout)
    with options.open_store(settings, write=False) as reading:
        keys = [reading.resolve(c) for c in chunks or ()]
        found = [d for d in reading.documents() if everything or d.source == source]
        if source is not None and not found:
            raise NotFoundError(f"no document {source} in the store", "list them: cacheblend chunks ls")
        told = set(keys)
        if not chunks:
            told.update((m.key for m in reading.chunks()), reading.damaged_keys())
        if everything:
            keys = list(told.union(m.key for m in reading.chunks(prefixes=True)))  # told is what ls lists: no prefix
    with options.open_store(settings, write=True, create=False) as kv_store:
        if keys:
            kv_store.remove_chunks(keys)
        for document in found:
            keys += kv_store.remove_document(document.collection, document.source, document.context)
    ids = [key.hex() for key in dict.fromkeys(keys) if key in told]
    if json:
        output.json({"removed": len(ids), "ids": ids})
    elif quiet:
        for name in ids:
            output.text(name)
    else:
        output.note(f"removed {len(ids)} chunks")


def _size(m: ChunkManifest) -> str:
    return format_size(m.num_bytes) if m.has_kv else "evicted" if m.evicted else "no KV yet"


def _record(m: ChunkManifest) -> dict[str, Any]:
    return {
        "id": m.id, "source": m.source, "index": m.index, "span": list(m.span), "tokens": m.num_tokens, "bytes": m.num_bytes,
        "kv": "stored" if m.has_kv else "evicted" if m.evicted else "none",
        "model": m.model_name, "context": m.context, "kv_dtype": m.codec, "layers": m.num_layers,
        "created": datetime.fromtimestamp(m.created).isoformat(timespec="seconds"),
    }  # fmt: skip
