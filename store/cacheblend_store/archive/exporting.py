"""Export: chunks and their documents as a tar of flat files, for other machines and other tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from cacheblend_store.archive.files import MANIFEST, NO_OPTIONS, SIGNATURE, ArchiveOptions, create_archive
from cacheblend_store.archive.manifest import ChunkLine, CollectionLine, encode_line, file_spec, manifest_file, sign
from cacheblend_store.errors import BadBlob
from cacheblend_store.format.blobs import blob_prefix
from cacheblend_store.format.keys import collection_id
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

    A tar, which appears whole or not at all. It holds `manifest.jsonl`, a safetensors file a chunk (K before RoPE and V of
    every layer, in the codec they are stored in) and, with a sign_key, `manifest.hmac`: the HMAC-SHA256 of the manifest,
    which holds the SHA-256 of every file. Damaged chunks are left out; those that have no KV now come as text. Raises
    ArchiveError, OSError.
    """
    wanted, prefixes = _choose(store, keys)
    collections, lines = dict[str, CollectionLine](), list[bytes]()
    done, damaged = set[bytes](), list[bytes]()
    size = without_kv = 0
    with create_archive(path, force=force) as add:
        for count, key in enumerate(sorted(wanted), 1):
            try:
                chunk, data = _read(store, key)
            except BadBlob:
                damaged.append(key)
            else:
                if chunk is not None:
                    of = chunk.collection
                    collections[of] = collections.get(of) or _collection(chunk, prefixes.get(of), options.salt)
                    line = ChunkLine.of(chunk, options.rename(chunk.source), data)
                    if data:
                        add(line.file, data)
                    lines.append(encode_line(line))
                    done.add(key)
                    size += len(data)
                    without_kv += not data
            if progress is not None:
                progress(count, len(wanted))
        documents = [d for d in store.documents() if any(c.key in done for c in d.chunks)]
        named = [replace(document, source=options.rename(document.source)) for document in documents]
        manifest = manifest_file(collections.values(), lines, named)
        add(MANIFEST, manifest)
        if options.sign_key is not None:
            add(SIGNATURE, sign(options.sign_key, manifest))
    return ExportReport(len(done), len(documents), size, tuple(damaged), without_kv)


def _choose(store: ChunkStore, keys: Iterable[bytes] | None) -> tuple[set[bytes], dict[str, ChunkManifest]]:
    """The keys of what is exported, prefixes of its collections among them; collection -> its prefix."""
    collection_of, prefixes = dict[bytes, str](), dict[str, ChunkManifest]()
    for manifest in store.chunks(prefixes=True):
        collection_of[manifest.key] = manifest.collection
        if manifest.context == "prefix":
            prefixes[manifest.collection] = manifest
    wanted = {*collection_of, *store.damaged_keys()} if keys is None else set(keys)
    collections = {collection_of[key] for key in wanted if key in collection_of}
    return wanted | {prefix.key for name, prefix in prefixes.items() if name in collections}, prefixes


def _read(store: ChunkStore, key: bytes) -> tuple[ChunkManifest | None, bytes]:
    """A chunk's record (None: it is gone) and its file (b"": it has no KV). Raises BadBlob for a damaged one."""
    with store.read() as reader:
        manifest = reader.manifest(key)
        if manifest is None or not manifest.has_kv:
            return manifest, b""
        tensors = (t for number in range(manifest.num_layers) for t in reader.layer(manifest, number).values())
        return manifest, b"".join((blob_prefix(file_spec(manifest)), *tensors))


def _collection(manifest: ChunkManifest, prefix: ChunkManifest | None, salt: str) -> CollectionLine:
    unproven = CollectionLine(manifest.collection, manifest.model, manifest.tokenizer, manifest.codec, None, False)
    for ids in ((), () if prefix is None else prefix.token_ids):
        for salted in (False, True):
            line = structs.replace(unproven, prefix_ids=ids, salted=salted)
            if collection_id(line.parts(salt)) == line.id:
                return line
    return unproven
