"""Audit a store in both directions: records have their data, and data belongs to a record."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import lmdb.verify

from cacheblend_store.errors import BadBlob, StoreCorrupt, StoreError
from cacheblend_store.format.keys import KEY_BYTES, blob_key
from cacheblend_store.format.records import MEMO_KEYS, decode_document, decode_memo
from cacheblend_store.format.summaries import SUMMARY_KEYS, decode_summary, stamped
from cacheblend_store.lmdb_file import locks
from cacheblend_store.lmdb_file.directory import DATA
from cacheblend_store.reader import StoreReader, bad_blob
from cacheblend_store.state import COUNTED, count_bytes, decode_state
from cacheblend_store.store import ChunkStore
from cacheblend_store.upkeep import Progress
from cacheblend_store.upkeep.rewriting import salvage
from cacheblend_store.writer import StoreWriter

T = TypeVar("T")
_DATABASE = {"document": "documents", "memo": "meta", "summary": "meta", "use": "lru"}
"""Kind of finding -> database with the record to delete."""


@dataclass(frozen=True)
class Finding:
    kind: str  # "page", "manifest", "blob", "stray-blob", "document", "reference", "counter", "memo", "summary", "use"
    message: str
    key: bytes = b""  # of the record, if any


@dataclass
class VerifyReport:
    chunks: int = 0
    blobs: int = 0
    bytes: int = 0
    documents: int = 0
    without_kv: int = 0  # chunks that are not computed or were evicted
    missing: int = 0  # chunks of documents that are not stored; not damage: the next precompute stores them
    repaired: int = 0  # findings that were repaired
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings


def verify(store: ChunkStore, progress: Progress | None = None, repair: bool = False) -> VerifyReport:
    """Audit the store. With `repair`, damaged KV and records are removed, references and counters rebuilt.

    A chunk without KV is a missing chunk: it is computed when it is needed. Damaged pages cannot be repaired in place:
    records that can be read are copied into a new file, which replaces the old one (see `salvage`).
    """
    report = VerifyReport()
    with store.read():  # raises if the store is closed
        pass
    _check_pages(store, report)
    if not report.findings:
        try:
            _check_records(store, report, progress)
        except StoreError as error:
            report.findings.append(Finding("page", error.message))
    if repair and report.findings:
        store.require_writable()
        if any(f.kind == "page" for f in report.findings):
            with store.set_aside():
                salvage(store.path, store.lock_timeout, progress, force=store.forced)
        else:
            _repair(store, report)
        report.repaired = len(report.findings)
    return report


def _check_pages(store: ChunkStore, report: VerifyReport) -> None:
    """Run py-lmdb's structural audit, with the writer lock held if this user may take it."""
    with locks.writer_lock(store.path, store.lock_timeout) if store.writable else nullcontext():
        try:
            found = lmdb.verify.verify(str(store.path / DATA))
        except (lmdb.verify.VerifyError, OSError) as error:
            found = [str(error)]
    report.findings += [Finding("page", text) for text in found]


def _check_records(store: ChunkStore, report: VerifyReport, progress: Progress | None) -> None:
    with store.read() as reader:
        total = reader.entries("chunks")
        known: set[bytes] = set()
        for key in reader.keys_from(b""):
            known.add(key)
            _check_chunk(reader, key, report)
            report.chunks += 1
            if progress is not None:
                progress(report.chunks, total)
        _check_strays(reader, known, report)
        _check_documents(reader, known, report)
        _check_counters(reader, report)
        for _ in _decoded(reader, "memo", reader.keys_with(MEMO_KEYS, "meta"), decode_memo, report):
            pass
        _check_summaries(reader, report)


def _check_chunk(reader: StoreReader, key: bytes, report: VerifyReport) -> None:
    try:
        manifest = reader.manifest(key)
        if manifest is None:
            raise StoreCorrupt(f"chunk {key.hex()[:12]} is in the list of chunks but not found by its key")
        layers = manifest.num_blobs if manifest.has_kv else 0
        for layer in range(layers):
            reader.layer(manifest, layer)
            report.blobs += 1
        report.bytes += manifest.num_bytes
        report.without_kv += not manifest.has_kv
        if next(reader.keys_from(blob_key(key, layers), "blobs"), b"").startswith(key):
            raise bad_blob(manifest, layers, "exists, but its record does not list it")
    except BadBlob as error:
        report.findings.append(Finding("manifest" if error.layer is None else "blob", error.message, key))


def _check_strays(reader: StoreReader, known: set[bytes], report: VerifyReport) -> None:
    last = b""
    for name in reader.keys_from(b"", "blobs"):
        key = name[:KEY_BYTES]
        if key != last and key not in known:
            report.findings.append(Finding("stray-blob", f"blobs of chunk {key.hex()[:12]} have no manifest", key))
        last = key
    for key in reader.keys_from(b"", "lru"):
        if key not in known:
            report.findings.append(Finding("use", f"a last use of chunk {key.hex()[:12]}, which is not stored", key))


def _check_documents(reader: StoreReader, known: set[bytes], report: VerifyReport) -> None:
    wanted: set[bytes] = set()
    report.documents = reader.entries("documents")
    for name, record in _decoded(reader, "document", reader.keys_from(b"", "documents"), decode_document, report):
        wanted |= {chunk.key + name for chunk in record.chunks}
        report.missing += sum(chunk.key not in known for chunk in record.chunks)
    there = set(reader.keys_from(b"", "refs"))
    for what, names in (("is missing", wanted - there), ("leads to no document", there - wanted)):
        for name in sorted(names):
            text = f"a reference to chunk {name.hex()[:12]} {what}"
            report.findings.append(Finding("reference", text, name[:KEY_BYTES]))


def _decoded(
    reader: StoreReader,
    kind: str,
    keys: Iterable[bytes],
    decode: Callable[[bytes, memoryview], T],
    report: VerifyReport,
) -> Iterator[tuple[bytes, T]]:
    """Yield (key, record) of undamaged records, and report the others. kind: of findings, see `_DATABASE`."""
    for key in keys:
        value = reader.get(_DATABASE[kind], key)
        if value is None:
            raise StoreCorrupt(f"{kind} record {key.hex()[:12]} is listed but not found by its key")
        try:
            record = decode(key, value)
        except BadBlob as error:
            report.findings.append(Finding(kind, error.message, key))
        else:
            yield key, record


def _check_summaries(reader: StoreReader, report: VerifyReport) -> None:
    if stamped(reader.get) != reader.pages.meta.txnid:
        return  # they are not used
    names = reader.keys_with(SUMMARY_KEYS, "meta")
    for name, summary in _decoded(reader, "summary", names, decode_summary, report):
        record = reader.document(summary.document)
        keys = [key for (key,) in struct.iter_unpack(f"{KEY_BYTES}s", summary.keys)]
        same = record is not None and keys == [chunk.key for chunk in record.chunks]
        if not same or not all(map(reader.has_kv, keys)):
            text = f"the summary of {summary.source} does not match its record, or a chunk of it has no KV"
            report.findings.append(Finding("summary", text, name))


def _check_counters(reader: StoreReader, report: VerifyReport) -> None:
    state = decode_state(reader.get)
    if state is None:
        text = "the record of the counters cannot be decoded, and the quota in it is lost"
        report.findings.append(Finding("counter", text))
        return
    names = {"blobs": "blobs", "chunks": "chunk records", "documents": "document records"}
    for database, counter in COUNTED.items():
        counted, there = getattr(state, counter), count_bytes(reader.pages, database)
        if counted not in (None, there):
            text = f"the counters say {counted:,} bytes of {names[database]}; the actual number is {there:,}"
            report.findings.append(Finding("counter", text))


def _repair(store: ChunkStore, report: VerifyReport) -> None:
    def work(writer: StoreWriter) -> None:
        for finding in report.findings:
            if finding.kind == "blob":
                writer.evict(finding.key)
            elif finding.kind in ("manifest", "stray-blob"):
                writer.delete_chunk(finding.key)
            elif finding.kind in _DATABASE:
                writer.delete(_DATABASE[finding.kind], finding.key)
        writer.rebuild_references()
        writer.changed()

    store.transact(work)
    store.transact(StoreWriter.recount)
