"""Export: chunks and their documents as a folder or tar of flat files, for other machines and other tools."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cacheblend_store.archive.input import MANIFEST, SIGNATURE, SUFFIX
from cacheblend_store.archive.output import ArchiveOutput, create_archive
from cacheblend_store.archive.records import (
    ChunkLine,
    CollectionLine,
    chunk_header,
    chunk_record,
    collection_record,
    document_record,
    encode_line,
    first_line,
    last_line,
    num_data_bytes,
)
from cacheblend_store.errors import BadBlob
from cacheblend_store.format.keys import KeyParts, collection_id
from cacheblend_store.format.records import ChunkManifest
from cacheblend_store.progress import Progress
from cacheblend_store.store import ChunkStore


@dataclass(frozen=True)
class ExportReport:
    """num_bytes: of the chunks' files. damaged: chunks that were left out. without_kv: how many of the chunks have no file."""

    chunks: int
    documents: int
    num_bytes: int
    damaged: tuple[bytes, ...]
    without_kv: int = 0


def export_chunks(
    store: ChunkStore,
    path: Path,
    keys: Iterable[bytes] | None = None,
    *,
    sign_key: bytes | None = None,
    salt: str = "",
    force: bool = False,
    rename: Callable[[str], str] = str,
    progress: Progress | None = None,
) -> ExportReport:
    """Write chunks (None: all), the prefixes they stand behind and the documents they are of to `path`.

    A tar when the name ends in .tar, else a folder; it appears whole or not at all. Holds `manifest.jsonl`, a
    safetensors file a chunk (K before RoPE and V of every layer, in the codec they are stored in) and, with sign_key,
    `manifest.hmac`: the HMAC-SHA256 of the manifest, which holds the SHA-256 of every file. salt: what the chunks were
    stored with; it is not written. rename: what the archive calls a source. Damaged chunks are left out; those that have
    no KV now come as text. Raises ArchiveError, OSError.
    """
    wanted = _with_prefixes(store, keys)
    lines: list[bytes] = []
    damaged: list[bytes] = []
    done, size, without_kv = set[bytes](), 0, 0
    with create_archive(path, force=force) as archive:
        collections = dict[str, CollectionLine]()
        for count, key in enumerate(sorted(wanted), 1):
            try:
                line = _add_chunk(store, archive, key, rename)
            except BadBlob:
                damaged.append(key)
                line = None
            if line is not None:
                name = line.manifest.collection
                if name not in collections:
                    collections[name] = _collection(line.manifest, _prefix_ids(store, name, wanted), salt)
                lines.append(encode_line(chunk_record(line)))
                done.add(key)
                size += line.size
                without_kv += not line.size
            if progress is not None:
                progress(count, len(wanted))
        documents = [
            replace(d, source=rename(d.source)) for d in store.documents() if any(c.key in done for c in d.chunks)
        ]
        lines = [
            encode_line(first_line(whole=not without_kv)),
            *(encode_line(collection_record(c)) for c in collections.values()),
            *lines,
            *(encode_line(document_record(d)) for d in documents),
            encode_line(last_line(len(collections), len(done), len(documents))),
        ]
        _add_lines(archive, lines, sign_key)
        archive.finish()
    return ExportReport(len(done), len(documents), size, tuple(damaged), without_kv)


def sign(sign_key: bytes, lines: Iterable[bytes]) -> bytes:
    """The content of `manifest.hmac`."""
    digest = hmac.new(sign_key, digestmod=hashlib.sha256)
    for line in lines:
        digest.update(line)
    return f"hmac-sha256 {digest.hexdigest()}\n".encode()


def _add_lines(archive: ArchiveOutput, lines: Collection[bytes], sign_key: bytes | None) -> None:
    archive.add(MANIFEST, sum(map(len, lines)), lines)
    if sign_key is not None:
        signature = sign(sign_key, lines)
        archive.add(SIGNATURE, len(signature), [signature])


def _with_prefixes(store: ChunkStore, keys: Iterable[bytes] | None) -> dict[bytes, str]:
    """key -> collection of what is exported, prefixes being those of the other chunks' collections."""
    chosen = None if keys is None else set(keys)
    found = {m.key: (m.collection, m.context) for m in store.chunks(prefixes=True)}
    collections = {c for key, (c, _) in found.items() if chosen is None or key in chosen}
    return {
        key: collection
        for key, (collection, context) in found.items()
        if chosen is None or key in chosen or (context == "prefix" and collection in collections)
    } | dict.fromkeys((set(store.damaged_keys()) if chosen is None else chosen) - found.keys(), "")


def _add_chunk(store: ChunkStore, archive: ArchiveOutput, key: bytes, rename: Callable[[str], str]) -> ChunkLine | None:
    """None when the chunk is gone. Raises BadBlob before anything of a damaged chunk is written."""
    with store.read() as reader:
        manifest = reader.manifest(key)
        if manifest is None:
            return None
        if not manifest.has_kv:
            return ChunkLine(manifest, 0, "")
        layers = [reader.layer(manifest, number) for number in range(manifest.num_layers)]
        header = chunk_header(manifest)
        size, digest = len(header) + num_data_bytes(manifest), hashlib.sha256()

        def parts() -> Iterator[bytes | memoryview]:
            digest.update(header)
            yield header
            for tensor in (tensor for layer in layers for tensor in layer.values()):
                digest.update(tensor)
                yield tensor

        archive.add(key.hex() + SUFFIX, size, parts())
    return ChunkLine(replace(manifest, source=rename(manifest.source)), size, digest.hexdigest())


def _prefix_ids(store: ChunkStore, collection: str, wanted: dict[bytes, str]) -> tuple[int, ...] | None:
    """Of a collection; None when the store does not say."""
    for key, name in wanted.items():
        if name == collection:
            try:
                manifest = store.get_chunk(key)
            except BadBlob:
                continue
            if manifest is not None and manifest.context == "prefix":
                return manifest.token_ids
    return None


def _collection(manifest: ChunkManifest, prefix_ids: tuple[int, ...] | None, salt: str) -> CollectionLine:
    def parts(ids: tuple[int, ...], with_salt: str) -> KeyParts:
        return KeyParts(manifest.model, manifest.tokenizer, ids, (), manifest.codec, with_salt)

    ids: Any
    for ids in (prefix_ids, ()):
        for salted in (False, True):
            if ids is not None and collection_id(parts(ids, salt if salted else "")) == manifest.collection:
                return CollectionLine(manifest.collection, parts(ids, ""), ids, salted)
    return CollectionLine(manifest.collection, parts((), ""), None, False)
