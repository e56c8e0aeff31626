"""cacheblend chunks export, import: stored chunks as plain files, for other machines and other tools."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_cli.cli import completion, options
from cacheblend_cli.cli.exits import on_interrupt
from cacheblend_cli.cli.inputs import read_ids
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.sizes import format_size, parse_size
from cacheblend_cli.errors import ExitCode, NotFoundError, UsageError
from cacheblend_cli.settings import Settings

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore
    from cacheblend_store.archive import ImportedChunk, ImportReport

_SHORTEST_KEY = 16
SignKey = Annotated[
    Path | None,
    typer.Option(help="A file with a secret of 16 bytes or more, for the signature.", metavar="FILE"),
]


@options.with_settings("store", "salt")
def export(
    settings: Settings,
    path: Annotated[Path, typer.Argument(help="A new file, a tar.", metavar="PATH")],
    chunks: Annotated[
        list[str] | None,
        typer.Argument(
            help="Chunk ids or unique beginnings; - is stdin.", metavar="[ID]...", autocompletion=completion.chunk_ids
        ),
    ] = None,
    source: options.Source = None,
    model: Annotated[str | None, typer.Option(help="Chunks of this model, by name or fingerprint.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every chunk; so it is when nothing is named.")] = False,
    sign_key: SignKey = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an export that is there.")] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write chunks to PATH, a tar of plain files: a manifest in JSON lines and a safetensors file a chunk.

    The documents' records and the prompt's prefix go with them, so that search, ask and precompute go on from there.
    Documents below this directory are named relative to it; import takes such names as relative to where it runs.
    """
    output = Output(quiet=quiet)
    if sum((bool(chunks), source is not None or model is not None, everything)) > 1:
        raise UsageError("chunks to export were named in more than one way", "ids, --source and --model, or --all")
    secret = _read_key(sign_key)
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} is there already", "name another path, or give --force to replace it")
    if not path.absolute().parent.is_dir():
        raise NotFoundError(f"no such folder: {path.absolute().parent}", "make it first")
    from cacheblend_store.archive import ArchiveOptions, export_chunks

    from cacheblend_cli.corpus.places import portable

    with (
        options.open_store(settings, write=False) as kv_store,
        output.progress("export") as bar,
        _of_file(path, "written"),
    ):
        keys = _choose(kv_store, chunks, source, model)
        ids = [key.hex() for key in keys or {m.key for m in kv_store.chunks()}] if quiet else []
        made_with = ArchiveOptions(secret, settings.salt, portable)
        report = export_chunks(
            kv_store, path, keys, made_with, force=force, progress=lambda done, total: bar(done, total, "chunks")
        )
    if json:
        facts = {"chunks": report.chunks, "documents": report.documents, "bytes": report.num_bytes}
        facts["without_kv"] = report.without_kv
        damaged = [key.hex() for key in report.damaged]
        output.json({"path": str(path), **facts, "signed": secret is not None, "damaged": damaged})
    elif quiet:
        for name in sorted(set(ids) - {key.hex() for key in report.damaged}):
            output.text(name)
    else:
        output.note(
            f"{report.chunks} chunks, prompt prefixes included, of {report.documents} documents, {format_size(report.num_bytes)}, in {path}"
            + ("" if secret else ", not signed")
            + (f"; {report.without_kv} of them have no KV now and travel as text" if report.without_kv else "")
        )
    if report.damaged:
        output.error(f"{len(report.damaged)} damaged chunks were left out", "see: cacheblend chunks verify --repair")
        raise typer.Exit(int(ExitCode.STORE))


@options.with_settings("store", "salt", "lock_timeout")
def import_(
    settings: Settings,
    path: Annotated[Path, typer.Argument(help="An export.", metavar="PATH")],
    sign_key: SignKey = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Take documents that the store has in another version, too.")
    ] = False,
    max_entries: Annotated[int, typer.Option(min=1, help="Files in the archive at most.")] = 100_000,
    max_bytes: Annotated[str, typer.Option(help="Bytes in the archive at most.")] = "100GB",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Take the chunks of an export into the store, each checked against its digest, its shapes and its id.

    A second import does only what is missing. Exits with 4 when a chunk was rejected; the others are taken.
    """
    output = Output(quiet=quiet)
    limit = parse_size(max_bytes, "--max-bytes")
    secret = _read_key(sign_key)
    if not path.exists():
        raise NotFoundError(f"no such file: {path}", "make one: cacheblend chunks export PATH")
    from cacheblend_store.archive import ArchiveOptions, import_chunks

    from cacheblend_cli.corpus.places import landed, shown

    with (
        on_interrupt("the chunks that were taken stay; the same command takes the rest"),
        options.open_store(settings, write=True) as kv_store,
        output.progress("import") as bar,
        _of_file(path, "read"),
    ):

        def on_chunk(chunk: ImportedChunk, done: int, total: int) -> None:
            bar(done, total, "chunks")
            _tell(output, chunk, json, quiet)

        read_with = ArchiveOptions(secret, settings.salt, landed, max_entries, limit)
        report = import_chunks(
            kv_store, path, read_with, replace=replace, on_start=lambda found: _warn(output, found), on_chunk=on_chunk
        )
    for name in report.kept:
        output.warn(f"{shown(name)} is in the store in another version, which stays; --replace takes the archive's")
    counts = [f"{report.chunks[s]} {s}" for s in ("new", "replaced", "unchanged", "skipped") if report.chunks.get(s)]
    output.note(f"chunks: {', '.join(counts) or 'none'}; {report.documents} documents new; in {settings.store_path}")
    if report.chunks.get("rejected"):
        output.error(
            f"{report.chunks['rejected']} chunks were rejected", "get the archive again; the others were taken"
        )
        raise typer.Exit(int(ExitCode.STORE))


@contextmanager
def _of_file(path: Path, what: str) -> Iterator[None]:
    """What the system says of the archive is the user's to mend. A full disk is told elsewhere."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE):
            raise
        raise UsageError(f"{path} cannot be {what}: {error.strerror}", "check the path and its permissions") from error


def _read_key(path: Path | None) -> bytes | None:
    """The secret in a file, without a newline at its end."""
    if path is None:
        return None
    try:
        key = path.read_bytes().rstrip(b"\r\n")
    except FileNotFoundError:
        raise NotFoundError(f"no such file: {path}", "make one: openssl rand -hex 32 > key") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "check the path and its permissions") from error
    if len(key) < _SHORTEST_KEY:
        raise UsageError(f"the key in {path} is shorter than {_SHORTEST_KEY} bytes", "openssl rand -hex 32 > key")
    return key


def _choose(store: ChunkStore, chunks: list[str] | None, source: str | None, model: str | None) -> set[bytes] | None:
    """Keys of what was named, None for everything. Raises NotFoundError when that is nothing."""
    if chunks:
        return {store.resolve(name) for text in chunks for name in read_ids(text)}
    if source is None and model is None:
        return None
    from cacheblend_cli.corpus.citations import Citations
    from cacheblend_cli.corpus.scopes import EVERYTHING, Scope

    scope = EVERYTHING if source is None else Scope.matching(source)
    citations = Citations(store, scope)
    found = {
        m.key for m in store.chunks() if scope.holds(citations.of(m).name) and (model is None or m.is_of_model(model))
    }
    if not found:
        raise NotFoundError(
            "no chunk in the store is of that source and model", "see: cacheblend chunks stats --sources"
        )
    return found


def _tell(output: Output, chunk: ImportedChunk, json: bool, quiet: bool) -> None:
    manifest = chunk.manifest
    if json:
        record: dict[str, Any] = {"id": manifest.id, "source": manifest.source, "index": manifest.index}
        output.json({**record, "tokens": manifest.num_tokens, "status": chunk.status, "reason": chunk.reason or None})
    elif quiet and chunk.status != "rejected":
        output.text(manifest.id)
    if chunk.status == "rejected":
        output.warn(f"chunk {manifest.id[:12]} is rejected: {chunk.reason}")


def _warn(output: Output, report: ImportReport) -> None:
    if report.signature == "absent":
        output.warn("the archive is not signed: nothing says who made it; chunks verify --recheck N tests its KV")
    elif report.signature == "unchecked":
        output.warn("the archive's signature is not checked: give --sign-key FILE")
    if report.unproven:
        output.warn(
            f"the ids of {report.unproven} chunks cannot be made again: the archive lacks their prompt's prefix"
        )
