"""Import: an export into a store. Whatever the archive holds, nothing reaches the store that was not checked."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from dataclasses import replace as renamed
from pathlib import Path
from typing import Literal

from cacheblend_store.archive.exporting import sign
from cacheblend_store.archive.input import MANIFEST, SIGNATURE, SUFFIX, ArchiveInput, ArchiveLimits, open_archive
from cacheblend_store.archive.records import (
    MAX_LINE_BYTES,
    ChunkLine,
    CollectionLine,
    check_first_line,
    chunk_header,
    decode_line,
    last_line,
    layer_spec,
    parse_chunk,
    parse_collection,
    parse_document,
)
from cacheblend_store.errors import ArchiveError, BadBlob, StoreFull
from cacheblend_store.format.blobs import blob_prefix
from cacheblend_store.format.records import ChunkManifest, DocumentRecord
from cacheblend_store.store import ChunkStore

_BATCH_BYTES = 32 << 20  # of chunks a transaction
Status = Literal["new", "unchanged", "replaced", "rejected", "skipped"]


@dataclass(frozen=True)
class ImportedChunk:
    """unchanged: the store had it. replaced: the store's was damaged. rejected: `reason` says why it is not trusted.
    skipped: only of documents of which the store keeps its own version."""

    manifest: ChunkManifest
    status: Status
    reason: str = ""


@dataclass
class ImportReport:
    """chunks: how many of each status. signature: "right", "absent" or "unchecked" (no key was given).

    kept: documents of which the store has another version, which stays. unproven: chunks whose id could not be made
    again, since the archive does not say what stood before them.
    """

    signature: Literal["right", "absent", "unchecked"] = "absent"
    chunks: dict[Status, int] = field(default_factory=dict)
    documents: int = 0
    kept: list[str] = field(default_factory=list)
    unproven: int = 0


@dataclass(frozen=True)
class _Line:
    """Where a line of the manifest is, and its digest: it is parsed again when its turn comes, and must be the same."""

    offset: int
    size: int
    digest: bytes


@dataclass
class _Index:
    """The manifest, read once from end to end."""

    collections: dict[str, CollectionLine] = field(default_factory=dict)
    chunks: dict[bytes, _Line] = field(default_factory=dict)
    documents: list[DocumentRecord] = field(default_factory=list)
    sources: set[tuple[str, str, str]] = field(default_factory=set)
    shapes: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    unproven: int = 0


def import_chunks(
    store: ChunkStore,
    path: Path,
    *,
    sign_key: bytes | None = None,
    salt: str = "",
    limits: ArchiveLimits | None = None,
    replace: bool = False,
    rename: Callable[[str], str] = str,
    on_start: Callable[[ImportReport], None] | None = None,
    on_chunk: Callable[[ImportedChunk, int, int], None] | None = None,
) -> ImportReport:
    """Take an export (see `export_chunks`) into the store.

    Before anything is stored: names, types and sizes of the files; the signature, when sign_key is given; every record
    of the manifest; ids against the digest of what they are made of. Then chunk by chunk the file's SHA-256, header
    and shapes: a chunk that fails is rejected, the others are taken. Chunks the store has, undamaged, stay as they are.
    Chunks without KV come as text, as do those that the quota has no room for.
    Documents it has in another version stay too unless `replace`. Interrupted, what is done stays, and a second import
    goes on from there. rename: from a source in the archive to one in the store. A signature says who made the archive; without one, KV can be false while every digest is right
    (`chunks verify --recheck` computes it again). Raises FileNotFoundError, ArchiveError, StoreErrors.
    """
    report = ImportReport()
    with open_archive(path, limits or ArchiveLimits()) as archive:
        if MANIFEST not in archive.sizes:
            raise ArchiveError(f"{path} has no {MANIFEST}: it is no export", "make one: cacheblend chunks export PATH")
        report.signature = _check_signature(archive, sign_key)
        index = _read_manifest(archive, salt)
        index.documents = [renamed(document, source=rename(document.source)) for document in index.documents]
        report.unproven = index.unproven
        _check_files(archive, index)
        documents, wanted = _choose_documents(store, index, replace, report)
        if on_start is not None:
            on_start(report)
        _import_all(store, archive, index, wanted, rename, report, on_chunk)
    changed = [document for document in documents if not _is_same(store, document)]
    store.put_documents(changed)  # in one transaction: a chunk that moves from one of them to another stays
    report.documents = len(changed)
    return report


# before anything is stored


def _check_signature(archive: ArchiveInput, sign_key: bytes | None) -> Literal["right", "absent", "unchecked"]:
    signed = SIGNATURE in archive.sizes
    if sign_key is None:
        return "unchecked" if signed else "absent"
    if not signed:
        raise ArchiveError("the archive is not signed", "get a signed one, or import it without --sign-key")
    with archive.open(SIGNATURE) as file:
        found = file.read(256)
    if not hmac.compare_digest(found, sign(sign_key, _pieces(archive))):
        raise ArchiveError(
            "the archive's signature is wrong: it was changed, or signed with another key", "do not use it"
        )
    return "right"


def _pieces(archive: ArchiveInput) -> Iterator[bytes]:
    with archive.open(MANIFEST) as file:
        while piece := file.read(1 << 20):
            yield piece


def _lines(archive: ArchiveInput) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of the manifest, each line bounded."""
    rest, offset = b"", 0
    for piece in _pieces(archive):
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield offset, line
            offset += len(line) + 1
        if len(rest) > MAX_LINE_BYTES:
            raise ArchiveError("the manifest has a line without end", "the archive is damaged: get it again")
    if rest:
        raise ArchiveError("the manifest ends within a line", "the archive was cut off: get it again")


def _read_manifest(archive: ArchiveInput, salt: str) -> _Index:
    index, ended = _Index(), False
    for number, (offset, line) in enumerate(_lines(archive), 1):
        record = decode_line(line, number)
        kind = record.get("type")
        if ended or (number == 1) != (kind == "cacheblend-export"):
            raise ArchiveError("the manifest's lines are not in order", "the archive is damaged: get it again")
        if number == 1:
            check_first_line(record)
        elif kind == "collection":
            collection = parse_collection(record, salt)
            index.collections[collection.id] = collection
        elif kind == "chunk":
            place = _Line(offset, len(line), hashlib.sha256(line).digest())
            _index_chunk(archive, index, parse_chunk(record), place)
        elif kind == "document":
            _index_document(index, parse_document(record))
        elif kind == "end":
            counts = len(index.collections), len(index.chunks), len(index.documents)
            if record != last_line(*counts):
                raise ArchiveError(
                    "the manifest lacks lines that its end counts", "the archive is damaged: get it again"
                )
            ended = True
        else:
            raise ArchiveError(f"line {number} of the manifest is of no known type", "the archive is damaged")
    if not ended:
        raise ArchiveError("the manifest has no end", "the archive was cut off: get it again")
    return index


def _index_chunk(archive: ArchiveInput, index: _Index, line: ChunkLine, place: _Line) -> None:
    manifest = line.manifest
    if archive.sizes.get(line.file, 0) != line.size:
        raise ArchiveError(
            f"the file of chunk {manifest.id[:12]} is missing or of another size", "get the archive again"
        )
    if manifest.key in index.chunks:
        raise ArchiveError(f"the manifest names chunk {manifest.id[:12]} twice", "the archive is damaged")
    collection = index.collections.get(manifest.collection)
    if collection is None:
        raise ArchiveError(f"the manifest does not say what chunk {manifest.id[:12]} is of", "the archive is damaged")
    collection.check(manifest)
    shape = manifest.num_layers, manifest.num_kv_heads, manifest.head_dim
    if index.shapes.setdefault(collection.id, shape) != shape:
        raise ArchiveError(
            f"chunk {manifest.id[:12]} has another shape than others of its model", "do not use the archive"
        )
    index.unproven += collection.prefix_ids is None
    index.chunks[manifest.key] = place


def _index_document(index: _Index, document: DocumentRecord) -> None:
    name = (document.collection, document.source, document.context)
    if name in index.sources or document.collection not in index.collections:
        raise ArchiveError(
            f"the manifest's record of {document.source[:40]!r} is out of place", "the archive is damaged"
        )
    index.sources.add(name)
    index.documents.append(document)


def _check_files(archive: ArchiveInput, index: _Index) -> None:
    """No file without a line (that every line has its file is checked with the lines)."""
    for name in archive.sizes:
        if name.endswith(SUFFIX) and bytes.fromhex(name.removesuffix(SUFFIX)) not in index.chunks:
            raise ArchiveError(f"the manifest does not name {name}", "the archive is damaged: get it again")


def _choose_documents(
    store: ChunkStore, index: _Index, replace: bool, report: ImportReport
) -> tuple[list[DocumentRecord], set[bytes]]:
    """The documents to take, and the keys of chunks that are of no other."""
    taken, kept = [], list[DocumentRecord]()
    for document in index.documents:
        if replace or _is_same(store, document, absent=True):
            taken.append(document)
        else:
            kept.append(document)
            report.kept.append(document.source)
    needless = {c.key for d in kept for c in d.chunks} - {c.key for d in taken for c in d.chunks}
    return taken, index.chunks.keys() - needless


def _is_same(store: ChunkStore, document: DocumentRecord, *, absent: bool = False) -> bool:
    """Whether the store has this version of the document; `absent` when it has none."""
    old = store.get_document(document.collection, document.source, document.context)
    return absent if old is None else (old.chunks, old.content_digest) == (document.chunks, document.content_digest)


# chunk by chunk


def _import_all(
    store: ChunkStore,
    archive: ArchiveInput,
    index: _Index,
    wanted: set[bytes],
    rename: Callable[[str], str],
    report: ImportReport,
    on_chunk: Callable[[ImportedChunk, int, int], None] | None,
) -> None:
    batch: list[tuple[ChunkManifest, list[bytearray]]] = []
    texts: list[ChunkManifest] = []  # of chunks without KV
    done = 0

    def tell(manifest: ChunkManifest, status: Status, reason: str = "") -> None:
        nonlocal done
        done += 1
        report.chunks[status] = report.chunks.get(status, 0) + 1
        if on_chunk is not None:
            on_chunk(ImportedChunk(manifest, status, reason), done, len(index.chunks))

    def flush() -> None:
        try:
            for (manifest, _), status in zip(batch, store.put_chunks(batch) if batch else (), strict=True):
                tell(manifest, status)
        except StoreFull:  # the quota has no room for a batch
            texts.extend(manifest for manifest, _ in batch)
        new = {manifest.key for manifest in texts if not store.has_chunk(manifest.key)}
        store.put_records(texts)
        for manifest in texts:
            tell(manifest, "new" if manifest.key in new else "unchanged")
        batch.clear()
        texts.clear()

    held = 0
    for key, place in index.chunks.items():
        line = _reread(archive, place)
        if key not in wanted:
            tell(line.manifest, "skipped")
        elif not line.size:
            texts.append(line.manifest)
            held += place.size
        elif _holds(store, line.manifest):
            tell(line.manifest, "unchanged")
        else:
            try:
                blobs = _read_blobs(archive, line)
                batch.append((renamed(line.manifest, source=rename(line.manifest.source)), blobs))
            except ArchiveError as error:
                tell(line.manifest, "rejected", error.message)
                continue
            held += line.size
        if held >= _BATCH_BYTES:
            flush()
            held = 0
    flush()


def _reread(archive: ArchiveInput, place: _Line) -> ChunkLine:
    with archive.open(MANIFEST) as file:
        file.skip(place.offset)
        line = file.read(place.size)
    if hashlib.sha256(line).digest() != place.digest:
        raise ArchiveError("the manifest was changed while it was read", "import the archive again")
    return parse_chunk(decode_line(line, 0))


def _holds(store: ChunkStore, manifest: ChunkManifest) -> bool:
    """Whether the store has the chunk, whole."""
    try:
        with store.read() as reader:
            own = reader.manifest(manifest.key)
            if own is None or own.token_ids != manifest.token_ids:
                return False
            for layer in range(own.num_layers):
                reader.layer(own, layer)
    except BadBlob:
        return False
    return True


def _read_blobs(archive: ArchiveInput, line: ChunkLine) -> list[bytearray]:
    """A blob a layer, out of the chunk's file. Raises ArchiveError when the file is not what its line says."""
    manifest, spec = line.manifest, layer_spec(line.manifest)
    header, start = chunk_header(manifest), blob_prefix(spec)
    size = sum(tensor.num_bytes for tensor in spec.values())
    blobs = []
    with archive.open(line.file) as file:
        found = file.read(len(header))
        digest = hashlib.sha256(found)
        if found != header:
            raise ArchiveError(f"the header of {line.file} is not what its record implies")
        for _ in range(manifest.num_layers):
            blob = bytearray(len(start) + size)
            blob[: len(start)] = start
            body = memoryview(blob)[len(start) :]
            file.read_into(body)
            digest.update(body)
            blobs.append(blob)
    if digest.hexdigest() != line.sha256:
        raise ArchiveError(f"{line.file} does not match its digest")
    return blobs
