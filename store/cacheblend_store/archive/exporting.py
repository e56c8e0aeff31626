"""Export: chunks and their documents as a folder or tar of flat files, for other machines and other tools."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from cacheblend_store.archive.files import MANIFEST, NO_OPTIONS, SIGNATURE, Add, ArchiveOptions, create_archive
from cacheblend_store.archive.manifest import (
    ChunkLine,
    CollectionLine,
    chunk_record,
    collection_record,
    document_record,
    encode_line,
    file_spec,
    first_line,
    last_line,
    sign,
)
from cacheblend_store.errors import BadBlob
from cacheblend_store.format.blobs import blob_prefix
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
    options: ArchiveOptions = NO_OPTIONS,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Write chunks (None: all), the prefixes they stand behind and the documents they are of to `path`.

    A tar when the name ends in .tar, else a folder; it appears whole or not at all. Holds `manifest.jsonl`, a
    safetensors file a chunk (K before RoPE and V of every layer, in the codec they are stored in) and, with a sign_key,
    `manifest.hmac`: the HMAC-SHA256 of the manifest, which holds the SHA-256 of every file. Damaged chunks are left out;
    those that have no KV now come as text. Raises ArchiveError, OSError.
    """
    wanted, prefixes = _choose(store, keys)
    collections, lines = dict[str, CollectionLine](), list[bytes]()
    done, damaged = set[bytes](), list[bytes]()
    size = without_kv = 0
    with create_archive(path, force=force) as add:
        for count, key in enumerate(sorted(wanted), 1):
            try:
                line = _add_chunk(store, add, key, options.rename)
            except BadBlob:
                line = None
                damaged.append(key)
            if line is not None:
                of = line.manifest.collection
                if of not in collections:
                    collections[of] = _collection(line.manifest, prefixes.get(of), options.salt)
                lines.append(encode_line(chunk_record(line)))
                done.add(key)
                size += line.size
                without_kv += not line.size
            if progress is not None:
                progress(count, len(wanted))
        documents = [d for d in store.documents() if any(c.key in done for c in d.chunks)]
        head = [first_line(whole=not without_kv), *map(collection_record, collections.values())]
        tail = [document_record(replace(d, source=options.rename(d.source))) for d in documents]
        tail.append(last_line(len(collections), len(done), len(documents)))
        manifest = b"".join((*map(encode_line, head), *lines, *map(encode_line, tail)))
        add(MANIFEST, manifest)
        if options.sign_key is not None:
            add(SIGNATURE, sign(options.sign_key, [manifest]))
    return ExportReport(len(done), len(documents), size, tuple(damaged), without_kv)


def _choose(store: ChunkStore, keys: Iterable[bytes] | None) -> tuple[set[bytes], dict[str, tuple[int, ...]]]:
    """The keys of what is exported, prefixes of its collections among them; collection -> token ids of its prefix."""
    collection_of, prefixes = dict[bytes, str](), dict[str, ChunkManifest]()
    for manifest in store.chunks(prefixes=True):
        collection_of[manifest.key] = manifest.collection
        if manifest.context == "prefix":
            prefixes[manifest.collection] = manifest
    wanted = {*collection_of, *store.damaged_keys()} if keys is None else set(keys)
    collections = {collection_of[key] for key in wanted if key in collection_of}
    wanted |= {prefix.key for name, prefix in prefixes.items() if name in collections}
    return wanted, {name: prefix.token_ids for name, prefix in prefixes.items()}


def _add_chunk(store: ChunkStore, add: Add, key: bytes, rename: Callable[[str], str]) -> ChunkLine | None:
    """None when the chunk is gone. Raises BadBlob for a damaged one."""
    with store.read() as reader:
        manifest = reader.manifest(key)
        if manifest is None:
            return None
        named = replace(manifest, source=rename(manifest.source))
        if not manifest.has_kv:
            return ChunkLine(named, 0, "")
        layers = [reader.layer(manifest, number) for number in range(manifest.num_layers)]
    data = b"".join((blob_prefix(file_spec(manifest)), *(tensor for layer in layers for tensor in layer.values())))
    line = ChunkLine(named, len(data), hashlib.sha256(data).hexdigest())
    add(line.file, data)
    return line


def _collection(manifest: ChunkManifest, prefix_ids: tuple[int, ...] | None, salt: str) -> CollectionLine:
    def parts(ids: tuple[int, ...], with_salt: str) -> KeyParts:
        return KeyParts(manifest.model, manifest.tokenizer, ids, (), manifest.codec, with_salt)

    for ids in (prefix_ids, ()):
        for salted in (False, True):
            if ids is not None and collection_id(parts(ids, salt if salted else "")) == manifest.collection:
                return CollectionLine(manifest.collection, parts(ids, ""), ids, salted)
    return CollectionLine(manifest.collection, parts((), ""), None, False)
