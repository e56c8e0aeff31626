"""Import: an export into a store. Whatever the archive holds, nothing reaches the store that was not checked."""

from __future__ import annotations

import hmac
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as changed
from pathlib import Path
from typing import Literal

from msgspec import structs

from cacheblend_store.archive.files import (
    DAMAGED,
    MANIFEST,
    NO_OPTIONS,
    SIGNATURE,
    SUFFIX,
    ArchiveFiles,
    ArchiveOptions,
    open_archive,
)
from cacheblend_store.archive.manifest import ChunkLine, CollectionLine, DocumentLine, End, Line, decode_line, sign
from cacheblend_store.errors import ArchiveError, BadBlob, StoreFull
from cacheblend_store.format.records import ChunkManifest, DocumentRecord
from cacheblend_store.store import ChunkStore

MAX_MANIFEST_BYTES = 4 << 30  # some million chunks
_BATCH_BYTES = 32 << 20  # of chunks a transaction
Status = Literal["new", "unchanged", "replaced", "rejected", "skipped"]
Signature = Literal["right", "absent", "unchecked"]


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

    signature: Signature = "absent"
    chunks: dict[Status, int] = field(default_factory=dict)
    documents: int = 0
    kept: list[str] = field(default_factory=list)
    unproven: int = 0


def import_chunks(
    store: ChunkStore,
    path: Path,
    options: ArchiveOptions = NO_OPTIONS,
    *,
    replace: bool = False,
    on_start: Callable[[ImportReport], None] | None = None,
    on_chunk: Callable[[ImportedChunk, int, int], None] | None = None,
) -> ImportReport:
    """Take an export (see `export_chunks`) into the store.

    Before anything is stored: names, types and sizes of the files; the signature, with a sign_key; every line of the
    manifest; ids against the digest of what they are made of. Then chunk by chunk the file's SHA-256, header and shapes: a
    chunk that fails is rejected, the others are taken. Chunks the store has, undamaged, stay as they are. Chunks without KV
    come as text, as do those that the quota has no room for. Documents the store has in another version stay too unless
    `replace`. Interrupted, what is done stays, and a second import goes on from there. A signature says who made the
    archive; without one, KV can be false while every digest is right (`chunks verify --recheck` computes it again).
    Raises FileNotFoundError, ArchiveError, StoreErrors.
    """
    with open_archive(path, options) as files:
        text = files.read(MANIFEST, MAX_MANIFEST_BYTES)
        report = ImportReport(_check_signature(files, text, options.sign_key))
        manifest = _Manifest(text, files.sizes, options.salt)
        report.unproven = manifest.unproven
        taken, needless = _choose_documents(store, manifest, options, replace, report)
        if on_start is not None:
            on_start(report)
        store.put_documents(taken)  # first: no chunk on its way in is one that no document refers to
        report.documents = len(taken)
        for done, chunk in enumerate(_take(store, files, manifest.lines(options.rename), needless), 1):
            report.chunks[chunk.status] = report.chunks.get(chunk.status, 0) + 1
            if on_chunk is not None:
                on_chunk(chunk, done, len(manifest.chunks))
    return report


# before anything is stored


def _check_signature(files: ArchiveFiles, manifest: bytes, sign_key: bytes | None) -> Signature:
    signed = SIGNATURE in files.sizes
    if sign_key is None:
        return "unchecked" if signed else "absent"
    if not signed:
        raise ArchiveError("the archive is not signed", "get a signed one, or import it without --sign-key")
    if not hmac.compare_digest(files.read(SIGNATURE, 256), sign(sign_key, manifest)):
        what = "the archive's signature is wrong: it was changed, or signed with another key"
        raise ArchiveError(what, "do not use it")
    return "right"


class _Manifest:
    """The manifest, checked from end to end. chunks: their keys; each one's line is decoded again when its turn comes, since
    that takes many times its bytes. sizes: of the archive's files."""

    def __init__(self, text: bytes, sizes: Mapping[str, int], salt: str) -> None:
        self._text, self._sizes, self._salt = text, sizes, salt
        self.collections = dict[str, CollectionLine]()
        self.chunks = set[bytes]()
        self.documents = dict[tuple[str, str, str], DocumentRecord]()
        self.unproven = 0
        self._shapes = dict[str, tuple[int, int, int]]()
        line = None
        for line in self._decoded():
            if isinstance(line, CollectionLine):
                line.check(salt)
                self.collections[line.id] = line
            elif isinstance(line, ChunkLine):
                self._check_chunk(line)
                self.chunks.add(line.manifest.key)
            elif isinstance(line, DocumentLine):
                document = line.record
                if document.place in self.documents or document.collection not in self.collections:
                    raise ArchiveError(f"the manifest's record of {document.source[:40]!r} is out of place", DAMAGED)
                self.documents[document.place] = document
        if line != End(len(self.collections), len(self.chunks), len(self.documents)):
            raise ArchiveError("the manifest has no end, or its end counts others", DAMAGED)
        for file in sizes:  # that every line has its file is checked with the lines
            if file.endswith(SUFFIX) and bytes.fromhex(file.removesuffix(SUFFIX)) not in self.chunks:
                raise ArchiveError(f"the manifest does not name {file}", DAMAGED)

    def lines(self, rename: Callable[[str], str]) -> Iterator[ChunkLine]:
        for line in self._decoded():
            if isinstance(line, ChunkLine):
                yield structs.replace(line, manifest=changed(line.manifest, source=rename(line.manifest.source)))

    def _decoded(self) -> Iterator[Line]:
        return (decode_line(text, number) for number, text in enumerate(io.BytesIO(self._text), 1))

    def _check_chunk(self, line: ChunkLine) -> None:
        chunk, name = line.manifest, f"chunk {line.manifest.id[:12]}"
        if self._sizes.get(line.file, 0) != line.num_bytes:
            raise ArchiveError(f"the file of {name} is missing or of another size", DAMAGED)
        collection = self.collections.get(chunk.collection)
        if chunk.key in self.chunks or collection is None:
            raise ArchiveError(f"the manifest names {name} twice, or not what it is of", DAMAGED)
        collection.check_chunk(chunk, self._salt)
        shape = chunk.num_layers, chunk.num_kv_heads, chunk.head_dim
        if self._shapes.setdefault(collection.id, shape) != shape:
            raise ArchiveError(f"{name} has another shape than others of its model", "do not use the archive")
        self.unproven += collection.prefix_ids is None


def _choose_documents(
    store: ChunkStore, manifest: _Manifest, options: ArchiveOptions, replace: bool, report: ImportReport
) -> tuple[list[DocumentRecord], set[bytes]]:
    """The documents that are new to the store, and the keys of chunks that only others have which are not taken."""
    taken, kept, wanted = list[DocumentRecord](), set[bytes](), set[bytes]()
    for named in manifest.documents.values():
        document = changed(named, source=options.rename(named.source))
        old, keys = store.get_document(*document.place), {c.key for c in document.chunks}
        same = old is not None and (old.chunks, old.content_digest) == (document.chunks, document.content_digest)
        if old is not None and not same and not replace:
            report.kept.append(document.source)
            kept |= keys
            continue
        wanted |= keys
        if not same:
            taken.append(document)
    return taken, kept - wanted


# chunk by chunk


def _take(
    store: ChunkStore, files: ArchiveFiles, lines: Iterator[ChunkLine], needless: set[bytes]
) -> Iterator[ImportedChunk]:
    """Store the chunks, several a transaction, and say of each what became of it."""
    batch, held = list[tuple[ChunkManifest, list[bytes]]](), 0
    for line in lines:
        if line.manifest.key in needless:
            yield ImportedChunk(line.manifest, "skipped")
        elif line.num_bytes and _holds(store, line.manifest):
            yield ImportedChunk(line.manifest, "unchanged")
        else:
            try:
                batch.append(
                    (line.manifest, line.blobs(files.read(line.file, line.num_bytes)) if line.num_bytes else [])
                )
                held += line.num_bytes + len(line.manifest.text)
            except ArchiveError as error:
                yield ImportedChunk(line.manifest, "rejected", error.message)
        if held >= _BATCH_BYTES:
            yield from _put(store, batch)
            batch, held = [], 0
    yield from _put(store, batch)


def _put(store: ChunkStore, batch: list[tuple[ChunkManifest, list[bytes]]]) -> Iterator[ImportedChunk]:
    whole, texts = [item for item in batch if item[1]], [manifest for manifest, blobs in batch if not blobs]
    try:
        statuses = store.put_chunks(whole) if whole else []
    except StoreFull:  # the quota has no room for a batch
        statuses, texts = [], [manifest for manifest, _ in batch]
    yield from (ImportedChunk(manifest, status) for (manifest, _), status in zip(whole, statuses, strict=False))
    known = {manifest.key for manifest in texts if store.has_chunk(manifest.key)}
    store.put_documents((), (), texts)
    yield from (ImportedChunk(manifest, "unchanged" if manifest.key in known else "new") for manifest in texts)


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
