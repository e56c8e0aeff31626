"""The search index: an SQLite FTS5 file inside the store's directory. Derived data, brought up to date when stale."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from cacheblend_store import BadBlob, ChunkManifest, ChunkStore, DocumentRecord

from cacheblend_cli.corpus.places import PUT

_SCHEMA = 8
_TABLES = f"""
    DROP TABLE IF EXISTS chunks;
    DROP TABLE IF EXISTS places;
    DROP TABLE IF EXISTS versions;
    DROP TABLE IF EXISTS stamp;
    DROP TABLE IF EXISTS vectors;
    DROP TABLE IF EXISTS embedder;
    CREATE TABLE stamp (value TEXT);
    CREATE TABLE places (id INTEGER PRIMARY KEY, key TEXT, source TEXT, position INTEGER, collection TEXT, context TEXT);
    CREATE INDEX by_source ON places (source);
    CREATE INDEX by_key ON places (key);
    CREATE TABLE versions (source TEXT, collection TEXT, context TEXT, digest TEXT, updated REAL);
    CREATE INDEX versions_by_source ON versions (source);
    CREATE TABLE vectors (id INTEGER PRIMARY KEY, vector BLOB);
    CREATE TABLE embedder (digest TEXT);
    CREATE VIRTUAL TABLE chunks USING fts5(source, title, body, tokenize = 'porter unicode61');
    PRAGMA user_version = {_SCHEMA};
"""
_HEADING = re.compile(r"^#{1,6} +(.+)$", re.MULTILINE)
_HEADING_WITHIN = 4  # chunks
_TELLING_PARTS = 4  # of a path, from its end: what comes before says where a machine keeps its files
_WIDE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # scripts that write no spaces between words


class Place(NamedTuple):
    """Where a chunk stands, and in what context it was collected for it: a chunk that documents share has several places.
    source: the document's name, see corpus/places.py."""

    key: str
    source: str
    position: int
    collection: str
    context: str


@contextmanager
def open_index(store: ChunkStore) -> Iterator[sqlite3.Connection]:
    """An up-to-date index: the file in the store's directory, or one in memory where that cannot be written.

    Tables: places (id, key, source, position, collection, context), the FTS5 table chunks (source, title, body), rowid = id,
    and versions (source, collection, context, digest, updated): what text of a document is stored there, and since when;
    vectors (id, vector) and embedder (digest), which are filled when they are first needed, see corpus/vectors.py.
    """
    with closing(_up_to_date(store)) as db:
        yield db


def spaced(text: str) -> str:
    """The text with every character of a script without spaces as a word of its own."""
    return re.sub(f"([{_WIDE}])", r" \1 ", text)


def unspaced(text: str) -> str:
    """What `spaced` was made from."""
    return re.sub(f" ([{_WIDE}]) ", r"\1", text)


def _up_to_date(store: ChunkStore) -> sqlite3.Connection:
    path = store.path / "search.sqlite3"
    for _ in range(2):
        if not os.access(store.path, os.W_OK):
            break
        db = _open(path)
        try:
            _refresh(db, store)
            return db
        except sqlite3.OperationalError:  # locked for too long, or no space
            db.close()
            break
        except sqlite3.DatabaseError:  # damaged: it is made anew
            db.close()
            path.unlink(missing_ok=True)
    db = sqlite3.connect(":memory:", isolation_level=None)
    _refresh(db, store)
    return db


def _open(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return sqlite3.connect(path, timeout=30, isolation_level=None)


def _refresh(db: sqlite3.Connection, store: ChunkStore) -> None:
    """Bring the index to the store's generation: only places that came or went are read."""
    if _stamp(db) == f"{store.identity}:{store.generation}":
        return
    with in_transaction(db):
        stamp = f"{store.identity}:{store.generation}"  # before the chunks: what comes later makes it stale
        if (found := _stamp(db)) == stamp:  # another process was faster
            return
        if found.partition(":")[0] != store.identity:
            for statement in _TABLES.split(";"):
                db.execute(statement)
        _update(db, store)
        db.execute("DELETE FROM stamp")
        db.execute("INSERT INTO stamp VALUES (?)", (stamp,))


@contextmanager
def in_transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of it is written, or nothing."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def _stamp(db: sqlite3.Connection) -> str:
    """The identity and the generation of the store it is of; "" for a new one, and one with other tables."""
    if db.execute("PRAGMA user_version").fetchone()[0] != _SCHEMA:
        return ""
    row = db.execute("SELECT value FROM stamp").fetchone()
    return row[0] if row else ""


def _update(db: sqlite3.Connection, store: ChunkStore) -> None:
    documents = [(_clean(d.source), d) for d in store.documents()]
    versions = [(name, d.collection, d.context, d.content_digest, d.updated) for name, d in documents]
    db.execute("DELETE FROM versions")
    db.executemany("INSERT INTO versions VALUES (?, ?, ?, ?, ?)", versions)
    wanted, loose = _places(store, documents)
    indexed = {
        Place(*row): i for i, *row in db.execute("SELECT id, key, source, position, collection, context FROM places")
    }
    for place, i in indexed.items():
        if place not in wanted:
            db.execute("DELETE FROM chunks WHERE rowid = ?", (i,))
            db.execute("DELETE FROM places WHERE id = ?", (i,))
            db.execute("DELETE FROM vectors WHERE id = ?", (i,))
    for place in sorted(wanted - indexed.keys()):
        manifest = loose.get(place.key) or _manifest(store, place.key)
        if manifest is not None:
            i = db.execute(
                "INSERT INTO places (key, source, position, collection, context) VALUES (?, ?, ?, ?, ?)", place
            ).lastrowid
            path = "/".join(place.source.split("/")[-_TELLING_PARTS:])
            row = (i, path, "", spaced(_clean(manifest.text)))
            db.execute("INSERT INTO chunks (rowid, source, title, body) VALUES (?, ?, ?, ?)", row)
    for source in sorted({place.source for place in wanted ^ indexed.keys()}):
        _retitle(db, source)


def _places(
    store: ChunkStore, documents: Sequence[tuple[str, DocumentRecord]]
) -> tuple[set[Place], dict[str, ChunkManifest]]:
    """Every place of every stored chunk, and the manifests of the chunks that stand in no document. documents: by name. A
    document that is being put, or whose PUT was killed, is none yet."""
    with store.read() as reader:
        stored = {key.hex() for key in reader.keys_from(b"")}
    places = {
        Place(chunk.key.hex(), name, chunk.index, document.collection, document.context)
        for name, document in documents
        for chunk in document.chunks
        if chunk.key.hex() in stored
    }
    loose: dict[str, ChunkManifest] = {}
    for key in stored - {place.key for place in places}:
        manifest = _manifest(store, key)
        if manifest is not None and manifest.context != "prefix" and not manifest.source.startswith(PUT):
            loose[key] = manifest
            places.add(Place(key, _clean(manifest.source), manifest.index, manifest.collection, manifest.context))
    return places, loose


def _retitle(db: sqlite3.Connection, source: str) -> None:
    """Give all places of a source the first heading near its beginning and the words of its file name."""
    rows = db.execute(
        "SELECT p.id, chunks.title, CASE WHEN p.position < ? THEN chunks.body END"
        " FROM places AS p JOIN chunks ON chunks.rowid = p.id WHERE p.source = ? ORDER BY p.position",
        (_HEADING_WITHIN, source),
    ).fetchall()
    headings = (match.group(1) for _, _, body in rows if (match := _HEADING.search(body or "")))
    stem = re.sub(r"[-_.]+", " ", PurePosixPath(source).stem)
    title = f"{next(headings, '')} {spaced(stem)}".strip()
    changed = [(title, i) for i, old, _ in rows if old != title]
    db.executemany("UPDATE chunks SET title = ? WHERE rowid = ?", changed)
    db.executemany("DELETE FROM vectors WHERE id = ?", [(i,) for _, i in changed])


def _manifest(store: ChunkStore, key: str) -> ChunkManifest | None:
    """None when it went in the meantime or is damaged."""
    try:
        return store.get_chunk(bytes.fromhex(key))
    except BadBlob:
        return None


def _clean(text: str) -> str:
    """Without lone surrogates, which SQLite does not take."""
    return text.encode("utf-8", "replace").decode("utf-8")
