"""Import: an export into a store. Whatever the archive holds, nothing reaches the store that was not checked."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed
from pathlib import Path
from typing import Literal

from cacheblend_store.archive.files import (
    MANIFEST,
    NO_OPTIONS,
    SIGNATURE,
    SUFFIX,
    ArchiveFiles,
    ArchiveOptions,
    open_archive,
)
from cacheblend_store.archive.manifest import (
    MAX_LINE_BYTES,
    ChunkLine,
    CollectionLine,
    blobs_of,
    check_first_line,
    decode_line,
    last_line,
    parse_chunk,
    parse_collection,
    parse_document,
    sign,
)
from cacheblend_store.errors import ArchiveError, BadBlob, StoreFull
from cacheblend_store.format.records import ChunkManifest, DocumentRecord
from cacheblend_store.store import ChunkStore

_BATCH_BYTES = 32 << 20  # of chunks a transaction
_DAMAGED = "the archive is damaged: get it again"
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

    Before anything is stored: names, types and sizes of the files; the signature, with a sign_key; every record of the manifest; ids against the digest of what they are made of. Then chunk by chunk the file's SHA-256, header
    and shapes: a chunk that fails is rejected, the others are taken. Chunks the store has, undamaged, stay as they are.
    Chunks without KV come as text, as do those that the quota has no room for.
    Documents it has in another version stay too unless `replace`. Interrupted, what is done stays, and a second import
    goes on from there. A signature says who made the archive; without one, KV can be false while every digest is right (`chunks verify --recheck` computes it again).
    Raises FileNotFoundError, ArchiveError, StoreErrors.
    """
    with open_archive(path, options.limits) as files:
        if MANIFEST not in files.sizes:
            raise ArchiveError(f"{path} has no {MANIFEST}: it is no export", "make one: cacheblend chunks export PATH")
        report = ImportReport(_check_signature(files, options.sign_key))
        index = _Index(files, options.salt, options.rename)
        report.unproven = index.unproven
        documents, needless = _choose_documents(store, index, replace, report)
        if on_start is not None:
            on_start(report)
        new = [document for document in documents if not _has(store, document)]
        store.put_documents(new)  # first: no chunk on its way in is one that no document refers to
        report.documents = len(new)
        taking = _Taking(store, report, len(index.chunks), on_chunk)
        for line in index.read_again():
            if line.manifest.key in needless:
                taking.tell(line.manifest, "skipped")
            else:
                taking.take(line, files)
        taking.flush()
    return report


# before anything is stored


def _check_signature(files: ArchiveFiles, sign_key: bytes | None) -> Signature:
    signed = SIGNATURE in files.sizes
    if sign_key is None:
        return "unchecked" if signed else "absent"
    if not signed:
        raise ArchiveError("the archive is not signed", "get a signed one, or import it without --sign-key")
    with files.open(SIGNATURE) as file:
        found = file.read(256)
    if not hmac.compare_digest(found, sign(sign_key, _lines(files))):
        raise ArchiveError(
            "the archive's signature is wrong: it was changed, or signed with another key", "do not use it"
        )
    return "right"


def _lines(files: ArchiveFiles) -> Iterator[bytes]:
    with files.open(MANIFEST) as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            if not line.endswith(b"\n"):
                raise ArchiveError("the manifest ends within a line, or has one without end", _DAMAGED)
            yield line


class _Index:
    """The manifest, read once from end to end and checked. chunks: SHA-256 of each one's line, by key.

    The lines can be too many to be held: they are read again when their turn comes, and must be the same.
    """

    def __init__(self, files: ArchiveFiles, salt: str, rename: Callable[[str], str]) -> None:
        self._files, self._rename = files, rename
        self.collections = dict[str, CollectionLine]()
        self.chunks = dict[bytes, bytes]()
        self.documents = dict[tuple[str, str, str], DocumentRecord]()
        self.unproven = 0
        self._shapes = dict[str, tuple[int, int, int]]()
        self._read(salt)
        for name in files.sizes:  # that every line has its file is checked with the lines
            if name.endswith(SUFFIX) and bytes.fromhex(name.removesuffix(SUFFIX)) not in self.chunks:
                raise ArchiveError(f"the manifest does not name {name}", _DAMAGED)

    def read_again(self) -> Iterator[ChunkLine]:
        for number, text in enumerate(_lines(self._files), 1):
            record = decode_line(text, number)
            if record.get("type") == "chunk":
                line = parse_chunk(record)
                if self.chunks.get(line.manifest.key) != hashlib.sha256(text).digest():
                    raise ArchiveError("the manifest was changed while it was read", "import the archive again")
                source = self._rename(line.manifest.source)
                yield changed(line, manifest=changed(line.manifest, source=source))

    def _read(self, salt: str) -> None:
        ended = False
        for number, text in enumerate(_lines(self._files), 1):
            record = decode_line(text, number)
            kind = record.get("type")
            if ended or (number == 1) != (kind == "cacheblend-export"):
                raise ArchiveError("the manifest's lines are not in order", _DAMAGED)
            if number == 1:
                check_first_line(record)
            elif kind == "collection":
                collection = parse_collection(record, salt)
                self.collections[collection.id] = collection
            elif kind == "chunk":
                self._add_chunk(parse_chunk(record), hashlib.sha256(text).digest())
            elif kind == "document":
                self._add_document(parse_document(record))
            elif record == last_line(len(self.collections), len(self.chunks), len(self.documents)):
                ended = True
            else:
                raise ArchiveError(
                    f"line {number} of the manifest is of no known type, or its end counts others", _DAMAGED
                )
        if not ended:
            raise ArchiveError("the manifest has no end", "the archive was cut off: get it again")

    def _add_chunk(self, line: ChunkLine, digest: bytes) -> None:
        manifest, name = line.manifest, f"chunk {line.manifest.id[:12]}"
        if self._files.sizes.get(line.file, 0) != line.size:
            raise ArchiveError(f"the file of {name} is missing or of another size", _DAMAGED)
        if manifest.key in self.chunks:
            raise ArchiveError(f"the manifest names {name} twice", _DAMAGED)
        collection = self.collections.get(manifest.collection)
        if collection is None:
            raise ArchiveError(f"the manifest does not say what {name} is of", _DAMAGED)
        collection.check(manifest)
        shape = manifest.num_layers, manifest.num_kv_heads, manifest.head_dim
        if self._shapes.setdefault(collection.id, shape) != shape:
            raise ArchiveError(f"{name} has another shape than others of its model", "do not use the archive")
        self.unproven += collection.prefix_ids is None
        self.chunks[manifest.key] = digest

    def _add_document(self, document: DocumentRecord) -> None:
        name = (document.collection, document.source, document.context)
        if name in self.documents or document.collection not in self.collections:
            raise ArchiveError(f"the manifest's record of {document.source[:40]!r} is out of place", _DAMAGED)
        self.documents[name] = changed(document, source=self._rename(document.source))


def _choose_documents(
    store: ChunkStore, index: _Index, replace: bool, report: ImportReport
) -> tuple[Sequence[DocumentRecord], set[bytes]]:
    """The documents to take, and the keys of chunks that only others have."""
    taken, kept = list[DocumentRecord](), list[DocumentRecord]()
    for document in index.documents.values():
        old = store.get_document(document.collection, document.source, document.context)
        (taken if replace or old is None or _has(store, document) else kept).append(document)
    report.kept += [document.source for document in kept]
    return taken, {c.key for d in kept for c in d.chunks} - {c.key for d in taken for c in d.chunks}


def _has(store: ChunkStore, document: DocumentRecord) -> bool:
    """Whether the store has this version of the document."""
    old = store.get_document(document.collection, document.source, document.context)
    return old is not None and (old.chunks, old.content_digest) == (document.chunks, document.content_digest)


# chunk by chunk


class _Taking:
    """Chunks on their way into the store, several a transaction."""

    def __init__(
        self,
        store: ChunkStore,
        report: ImportReport,
        total: int,
        on_chunk: Callable[[ImportedChunk, int, int], None] | None,
    ) -> None:
        self._store, self._report, self._total, self._on_chunk = store, report, total, on_chunk
        self._batch: list[tuple[ChunkManifest, list[bytes]]] = []
        self._texts: list[ChunkManifest] = []  # of chunks without KV
        self._held = self._told = 0

    def tell(self, manifest: ChunkManifest, status: Status, reason: str = "") -> None:
        self._told += 1
        self._report.chunks[status] = self._report.chunks.get(status, 0) + 1
        if self._on_chunk is not None:
            self._on_chunk(ImportedChunk(manifest, status, reason), self._told, self._total)

    def take(self, line: ChunkLine, files: ArchiveFiles) -> None:
        """Raises nothing for a file that is not what its line says: the chunk is rejected."""
        manifest = line.manifest
        if not line.size:
            self._texts.append(manifest)
            self._held += len(manifest.text)
        elif self._holds(manifest):
            self.tell(manifest, "unchanged")
        else:
            try:
                self._batch.append((manifest, blobs_of(line, files.read(line.file))))
                self._held += line.size
            except ArchiveError as error:
                self.tell(manifest, "rejected", error.message)
        if self._held >= _BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        try:
            statuses = self._store.put_chunks(self._batch) if self._batch else []
            for (manifest, _), status in zip(self._batch, statuses, strict=True):
                self.tell(manifest, status)
        except StoreFull:  # the quota has no room for a batch
            self._texts += [manifest for manifest, _ in self._batch]
        new = {manifest.key for manifest in self._texts if not self._store.has_chunk(manifest.key)}
        self._store.put_records(self._texts)
        for manifest in self._texts:
            self.tell(manifest, "new" if manifest.key in new else "unchanged")
        self._batch, self._texts, self._held = [], [], 0

    def _holds(self, manifest: ChunkManifest) -> bool:
        """Whether the store has the chunk, whole."""
        try:
            with self._store.read() as reader:
                own = reader.manifest(manifest.key)
                if own is None or own.token_ids != manifest.token_ids:
                    return False
                for layer in range(own.num_layers):
                    reader.layer(own, layer)
        except BadBlob:
            return False
        return True
