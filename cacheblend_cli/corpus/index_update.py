"""Updates of the search index: rows to add and remove for chunks that changed since the last update."""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

from cacheblend_documents.converted import shortened
from cacheblend_store import BadBlob, ChunkManifest, ChunkStore, DocumentRecord, StoreReader
from cacheblend_store.format.changes import Changes

from cacheblend_cli.corpus.normalise import indexed
from cacheblend_cli.corpus.places import PUT, SENT

_PLACE = "key, source, position, collection, context, document"
_HEADING = re.compile(r"^#{1,6} +(.+)$", re.MULTILINE)
_HEADING_WITHIN = 4  # first chunks of a document to look for a heading in
_TELLING_PARTS = 4  # last path components to index: the ones before say nothing about the content
_BATCH = 16384  # chunks whose texts are in memory at once


Source = tuple[str, str]
"""Name and collection of a document: each collection has its own text of it, and its own title."""


class IndexEntry(NamedTuple):
    """Position of a chunk in a document, and its context. A chunk shared by documents has several places."""

    key: str  # chunk key, hex
    source: str  # document name, see corpus/places.py
    position: int  # index of the chunk in the document
    collection: str
    context: str
    document: str  # key of the document record, hex; "" for a chunk without a document


@dataclass(frozen=True)
class IndexUpdate:
    """Changes to write to the index."""

    records: Mapping[str, DocumentRecord | None]  # by document key (hex); None: the document was removed
    new: Sequence[IndexEntry]  # places to add
    new_loose: Sequence[bytes]  # keys of chunks without a document to add
    gone: Mapping[int, Source]  # row id -> source of the places to remove
    changed: Iterable[bytes] | None  # keys of the chunks that were added, removed or replaced; None: all are compared


def plan_update(db: sqlite3.Connection, reader: StoreReader, changes: Changes | None) -> IndexUpdate:
    """Compare the index with the store. Only the changes are compared, or everything if `changes` is None."""
    chunks, documents = _compared(db, reader, changes)
    records = {key.hex(): reader.document(key) for key in documents}

    def is_stored(key: str) -> bool:
        return bytes.fromhex(key) in chunks if changes is None else reader.get("chunks", bytes.fromhex(key)) is not None

    wanted = {place for place in _places(records) if is_stored(place.key)}
    rows = dict(_rows(db)) if changes is None else _changed_rows(db, records, wanted, chunks)
    in_documents = wanted | {place for place in rows if place.document and place.document not in records}
    loose = {key for key in _keys(chunks, rows) - _keys((), in_documents) if is_stored(key)}
    # a changed chunk may have been stored again from another source
    same = loose if changes is None else loose - _keys(chunks, ())
    kept = {place for place in rows if not place.document and place.key in same}
    gone = {rows[place]: (place.source, place.collection) for place in rows.keys() - in_documents - kept}
    new_loose = sorted(map(bytes.fromhex, loose - _keys((), kept)))
    return IndexUpdate(records, sorted(wanted - rows.keys()), new_loose, gone, None if changes is None else chunks)


def _compared(db: sqlite3.Connection, reader: StoreReader, changes: Changes | None) -> tuple[Set[bytes], Set[bytes]]:
    """Return the keys of the chunks and of the document records to compare."""
    if changes is not None:
        return changes.chunks, changes.documents.union(*map(reader.documents_of, changes.chunks))
    indexed_documents = {bytes.fromhex(key) for (key,) in db.execute("SELECT document FROM versions")}
    return set(reader.keys_from(b"")), indexed_documents.union(reader.keys_from(b"", "documents"))


def _keys(chunks: Iterable[bytes], places: Iterable[IndexEntry]) -> set[str]:
    """Return the keys of chunks and places, in hex."""
    return {key.hex() for key in chunks} | {place.key for place in places}


def _places(records: Mapping[str, DocumentRecord | None]) -> Iterator[IndexEntry]:
    """Yield the places of the documents' chunks. records: by document key (hex)."""
    for document, r in records.items():
        if r is not None:
            source = _clean(r.source)
            for chunk in r.chunks:
                yield IndexEntry(chunk.key.hex(), source, chunk.index, r.collection, r.context, document)


def _changed_rows(
    db: sqlite3.Connection, documents: Iterable[str], wanted: Iterable[IndexEntry], chunks: Iterable[bytes]
) -> dict[IndexEntry, int]:
    """Return the rows of documents, and those of chunks that changed or are in these documents."""
    rows = {place: i for document in documents for place, i in _rows(db, "WHERE document = ?", document)}
    keys = _keys(chunks, (*wanted, *rows))
    return rows | {place: i for key in keys for place, i in _rows(db, "WHERE key = ?", key)}


def write_update(db: sqlite3.Connection, store: ChunkStore, update: IndexUpdate) -> bool:
    """Apply an update, reading the texts of new chunks from the store. Call it in a transaction. Return False if a
    chunk of a document has been removed since the update was planned: the document's new text has to be added.

    Chunks with a damaged record have no text to search; their keys go into the table `damaged`.
    """
    versions = [
        (document, _clean(r.source), r.collection, r.context, r.content_digest, r.updated)
        for document, r in update.records.items()
        if r is not None
    ]
    db.executemany("DELETE FROM versions WHERE document = ?", [(document,) for document in update.records])
    db.executemany("INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?)", versions)
    for table, column in (("chunks", "rowid"), ("places", "id"), ("vectors", "id"), ("pending", "id")):
        db.executemany(f"DELETE FROM {table} WHERE {column} = ?", [(i,) for i in update.gone])
    if update.changed is None:
        db.execute("DELETE FROM damaged")
    else:
        db.executemany("DELETE FROM damaged WHERE key = ?", [(key.hex(),) for key in update.changed])
    added = [_add_places(db, store, batch) for batch in _by_source(update.new)]
    damaged = {place for places, _ in added for place in places}
    damaged |= {(key.hex(), "") for key in _add_loose(db, store, update.new_loose)}
    for source in sorted(set(update.gone.values())):
        _add(db, *source, [])
    db.executemany("INSERT OR IGNORE INTO damaged VALUES (?, ?)", sorted(damaged))
    return all(is_complete for _, is_complete in added)


def _add_places(
    db: sqlite3.Connection, store: ChunkStore, batch: Mapping[Source, Sequence[IndexEntry]]
) -> tuple[set[tuple[str, str]], bool]:
    """Add places of documents. Return key and collection of those whose record is damaged, and whether all chunks are
    still stored."""
    unreadable = list[bytes]()
    keys = {bytes.fromhex(place.key) for places in batch.values() for place in places}
    texts = {manifest.id: manifest.text for manifest in _manifests(store, keys, unreadable)}
    lost = {key.hex() for key in unreadable}
    for source, places in batch.items():
        _add(db, *source, [(place, texts[place.key]) for place in places if place.key in texts])
    damaged = {(place.key, place.collection) for places in batch.values() for place in places if place.key in lost}
    return damaged, len(texts) + len(lost) == len(keys)


def _add_loose(db: sqlite3.Connection, store: ChunkStore, keys: Sequence[bytes]) -> list[bytes]:
    """Add chunks without a document. Return the keys of those whose record is damaged."""
    damaged = list[bytes]()
    for start in range(0, len(keys), _BATCH):
        for m in _manifests(store, keys[start : start + _BATCH], damaged):
            place = IndexEntry(m.id, _clean(m.source), m.index, m.collection, m.context, "")
            hidden = m.context == "prefix" or place.source.startswith((SENT, PUT))
            _add(db, place.source, place.collection, [(place, None if hidden else m.text)])
    return damaged


def _by_source(places: Iterable[IndexEntry]) -> Iterator[dict[Source, list[IndexEntry]]]:
    """Yield batches of about _BATCH places by source. All places of a source are in the same batch."""
    batch: defaultdict[Source, list[IndexEntry]] = defaultdict(list)
    size = 0
    for place in sorted(places, key=lambda p: (p.source, p.collection)):
        source = place.source, place.collection
        if size >= _BATCH and source not in batch:
            yield batch
            batch, size = defaultdict(list), 0
        batch[source].append(place)
        size += 1
    yield batch


def _manifests(store: ChunkStore, keys: Iterable[bytes], damaged: list[bytes]) -> Iterator[ChunkManifest]:
    """Yield the manifests of the chunks, skipping missing ones. Adds the keys of damaged ones to `damaged`."""
    with store.read() as reader:
        for key in sorted(keys):
            try:
                manifest = reader.manifest(key)
            except BadBlob:
                damaged.append(key)
                continue
            if manifest is not None:
                yield manifest


def _add(db: sqlite3.Connection, source: str, collection: str, added: Sequence[tuple[IndexEntry, str | None]]) -> None:
    """Add places of a source with their texts (None: not searchable), and update the title of its other rows."""
    rows = db.execute(
        "SELECT p.position, p.id, chunks.title, CASE WHEN p.position < ? THEN chunks.body END"
        " FROM places AS p JOIN chunks ON chunks.rowid = p.id WHERE p.source = ? AND p.collection = ?",
        (_HEADING_WITHIN, source, collection),
    ).fetchall()
    texts = [(place, indexed(text)) for place, text in added if text is not None]
    beginnings = [(position, body) for position, _, _, body in rows if body is not None]
    beginnings += [(place.position, body) for place, body in texts if place.position < _HEADING_WITHIN]
    title = _title(source, [body for _, body in sorted(beginnings)])
    [(last,)] = db.execute("SELECT coalesce(max(id), 0) FROM places")
    ids = {place: last + number for number, (place, _) in enumerate(added, 1)}
    db.executemany(
        f"INSERT INTO places (id, {_PLACE}) VALUES (?, ?, ?, ?, ?, ?, ?)", [(i, *place) for place, i in ids.items()]
    )
    path = indexed("/".join(source.split("/")[-_TELLING_PARTS:]))
    db.executemany(
        "INSERT INTO chunks (rowid, source, title, body) VALUES (?, ?, ?, ?)",
        [(ids[place], path, title, body) for place, body in texts],
    )
    changed = [(title, i) for _, i, old, _ in rows if old != title]
    db.executemany("UPDATE chunks SET title = ? WHERE rowid = ?", changed)
    again = [(i,) for _, i in changed]
    db.executemany("DELETE FROM vectors WHERE id = ?", again)
    written = again + [(ids[place],) for place, _ in texts]
    db.executemany("INSERT OR IGNORE INTO pending VALUES (?)", written)
    sizes = [(_length(db.execute("SELECT sz FROM chunks_docsize WHERE id = ?", i).fetchone()[0]), *i) for i in written]
    db.executemany("UPDATE places SET length = ? WHERE id = ?", sizes)


def _length(sizes: bytes) -> int:
    """Return the number of words of a row. sizes: FTS5's record of it, a big-endian varint per column."""
    total = value = 0
    for byte in sizes:
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            total, value = total + value, 0
    return total


def _title(source: str, beginnings: Iterable[str]) -> str:
    """Return the first heading near the beginning of a document, and the words of its file name."""
    headings = (match.group(1) for body in beginnings if (match := _HEADING.search(body)))
    stem = re.sub(r"[-_.]+", " ", PurePosixPath(source).stem)
    return f"{shortened(next(headings, ''))} {indexed(stem)}".strip()


def _rows(db: sqlite3.Connection, where: str = "", *values: str) -> Iterator[tuple[IndexEntry, int]]:
    for i, *place in db.execute(f"SELECT id, {_PLACE} FROM places {where}", values):
        yield IndexEntry(*place), i


def _clean(name: str) -> str:
    """Replace lone surrogates, which SQLite rejects."""
    return name.encode("utf-8", "replace").decode("utf-8")
