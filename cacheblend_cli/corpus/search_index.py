"""Search index: an SQLite FTS5 file in the store's directory, derived from the store and updated from its change
log."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from cacheblend_store import ChunkStore, StorePermission
from cacheblend_store.private_files import InsecurePath, check_files, open_file

from cacheblend_cli.corpus.index_update import plan_update, write_update
from cacheblend_cli.corpus.normalise import fts5_tokenizer

_SCHEMA = 12
_TABLES = """
    CREATE TABLE stamp (value TEXT);
    CREATE TABLE places (
        id INTEGER PRIMARY KEY, key TEXT, source TEXT, position INTEGER, collection TEXT, context TEXT, document TEXT,
        length INTEGER
    );
    CREATE INDEX by_collection ON places (collection, length);
    CREATE INDEX by_source ON places (source);
    CREATE INDEX by_key ON places (key);
    CREATE INDEX by_document ON places (document);
    CREATE TABLE versions (document TEXT PRIMARY KEY, source TEXT, collection TEXT, context TEXT, digest TEXT, updated REAL);
    CREATE INDEX versions_by_source ON versions (source);
    CREATE TABLE vectors (id INTEGER PRIMARY KEY, vector BLOB);
    CREATE TABLE pending (id INTEGER PRIMARY KEY);
    CREATE TABLE embedder (digest TEXT);
    CREATE TABLE damaged (key TEXT, collection TEXT, PRIMARY KEY (key, collection));
    CREATE VIRTUAL TABLE chunks USING fts5(source, title, body, tokenize = "{tokenizer}");
    PRAGMA user_version = {schema};
"""
_LOCKED_S = 60.0  # seconds to wait for another process
_updating = threading.RLock()  # threads wait here, because SQLite's own lock has a timeout


@contextmanager
def open_index(store: ChunkStore) -> Iterator[sqlite3.Connection]:
    """Open an up-to-date index: the file in the store's directory, or one in memory if the store is not this user's.

    Any thread may call this; the connection belongs to the thread that opened it. Tables:

    - places (id, key, source, position, collection, context, document, length): one row per place of a chunk; length in
      words, NULL if it is not searchable
    - chunks (source, title, body), FTS5, rowid = places.id: one row per searchable place
    - versions (document, source, collection, context, digest, updated): one row per document record
    - vectors (id, vector), pending (id), embedder (digest): see corpus/ranking.py
    - damaged (key, collection): chunks whose record cannot be read; collection "" if no document refers to the chunk
    """
    with closing(_up_to_date(store)) as db:
        yield db


@contextmanager
def in_transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit everything or nothing."""
    with _updating:
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise


def _up_to_date(store: ChunkStore) -> sqlite3.Connection:
    path = store.path / "search.sqlite3"
    for _ in range(2):
        if not store.is_own:
            break
        try:
            _create(path)
        except FileNotFoundError:
            store.check_file()  # raises StoreError if the whole store is gone
            raise
        db = sqlite3.connect(path, timeout=_LOCKED_S, isolation_level=None)
        try:
            _refresh(db, store)
            return db
        except sqlite3.OperationalError:  # locked for too long, or no space
            db.close()
            break
        except sqlite3.DatabaseError:  # damaged: rebuild it
            db.close()
            path.unlink(missing_ok=True)
        except BaseException:
            db.close()
            raise
    db = sqlite3.connect(":memory:", isolation_level=None)
    _refresh(db, store)
    return db


def _create(path: Path) -> None:
    """Create the file if it is missing. Raises StorePermission for a link or a file of another user: SQLite would write
    to its target."""
    try:
        os.close(open_file(path, os.O_RDWR | os.O_CREAT, anywhere=True))
        check_files(*(path.with_name(f"{path.name}-{suffix}") for suffix in ("journal", "wal", "shm")))
    except InsecurePath as error:
        raise StorePermission(f"{error.filename} {error.strerror}", f"remove it: rm {error.filename}") from error


def _refresh(db: sqlite3.Connection, store: ChunkStore) -> None:
    """Update the index to the store's generation.

    The cost is proportional to the changes, unless the change log has a gap: then everything is compared.
    """
    if _stamp(db) == (store.identity, store.generation):
        return
    with in_transaction(db):
        identity, generation = _stamp(db)
        with store.read() as reader:
            now = reader.state().generation
            if (identity, generation) == (store.identity, now):  # another process was faster
                return
            changes = None
            if identity != store.identity:
                for table in ("chunks", "places", "versions", "stamp", "vectors", "pending", "embedder", "damaged"):
                    db.execute(f"DROP TABLE IF EXISTS {table}")
                for statement in _TABLES.format(tokenizer=fts5_tokenizer(), schema=_SCHEMA).split(";"):
                    db.execute(statement)
            else:
                changes = reader.changes_since(generation)
            update = plan_update(db, reader, changes)
        write_update(db, store, update)
        db.execute("DELETE FROM stamp")
        db.execute("INSERT INTO stamp VALUES (?)", (f"{store.identity}:{now}",))


def _stamp(db: sqlite3.Connection) -> tuple[str, int]:
    """Return (identity, generation) of the indexed store; ("", 0) for a new index or another schema."""
    if db.execute("PRAGMA user_version").fetchone()[0] != _SCHEMA:
        return "", 0
    row = db.execute("SELECT value FROM stamp").fetchone()
    identity, _, generation = (row[0] if row else ":0").partition(":")
    return identity, int(generation)
