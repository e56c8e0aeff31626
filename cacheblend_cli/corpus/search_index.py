"""Search index: an SQLite FTS5 file in the store's directory, derived from the store and updated from its change log.

The file may come from elsewhere or be damaged. It is used if its schema is exactly ours, and made anew after any error.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import lru_cache, wraps
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from cacheblend_store import ChunkStore, StoreError, StorePermission
from cacheblend_store.private_files import InsecurePath, check_files, open_file

from cacheblend_cli.corpus.index_update import plan_update, write_update
from cacheblend_cli.corpus.normalise import fts5_tokenizer
from cacheblend_cli.corpus.scopes import holds
from cacheblend_cli.types import EVERYTHING

_FILE = "search.sqlite3"
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
_SOURCES = "SELECT DISTINCT p.source FROM places AS p WHERE p.context != 'prefix' AND {where}"
_LOCKED_S = 60.0  # seconds to wait for another process
_MOST_UPDATES = 8  # in a transaction, while chunks of each update are replaced before it has read their texts
_BESIDE = ("-journal", "-wal", "-shm")  # SQLite's files beside a database
_updating = threading.RLock()  # threads wait here, because SQLite's own lock has a timeout
_DAMAGE = (sqlite3.DatabaseError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)
"""Errors of damaged data, or of values that we did not write."""
_discarded = set[tuple[str, int]]()  # (identity, generation) of the indexes that this process made anew after an error
Schema = tuple[int, frozenset[tuple[str | None, ...]]]
P = ParamSpec("P")
T = TypeVar("T")


class Searched(NamedTuple):
    """Collections to search. Other tenants' collections are not read, so neither scores nor times depend on them."""

    names: Sequence[str] | None = None  # None: all

    @property
    def where(self) -> str:
        """SQL condition on `places AS p`, with the parameters `names`."""
        return "TRUE" if self.names is None else f"p.collection IN ({', '.join('?' * len(self.names))})"

    @property
    def parameters(self) -> Sequence[str]:
        return self.names or ()


def rebuilding(work: Callable[Concatenate[ChunkStore, P], T]) -> Callable[Concatenate[ChunkStore, P], T]:
    """Decorate a function that uses `open_index`: after an error of a damaged index, make the index anew and call it
    again. The index is made anew once for each generation: after that, the fault is not in it."""

    @wraps(work)
    def call(store: ChunkStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(store, *args, **kwargs)
        except _DAMAGE as error:
            if not store.is_own:
                raise
            if isinstance(error, sqlite3.OperationalError):
                if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_DBMOVED:
                    raise
                # another thread or process has made the index anew
            elif (state := (store.identity, store.generation)) not in _discarded:
                _discarded.add(state)
                _discard(store.path / _FILE)
        return work(store, *args, **kwargs)

    return call


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


@rebuilding
def searchable(store: ChunkStore, collections: Sequence[str] | None = None) -> list[str]:
    """Return the names of all documents that `search` can find. collections: only documents in these."""
    searched = Searched(collections)
    with open_index(store) as db:
        names = [name for (name,) in db.execute(_SOURCES.format(where=searched.where), searched.parameters)]
    return sorted(name for name in names if holds(EVERYTHING, name))


@rebuilding
def has_documents(store: ChunkStore, collections: Sequence[str]) -> bool:
    """Return whether `search` could find a chunk of these collections."""
    searched = Searched(collections)
    with open_index(store) as db:
        return db.execute(_SOURCES.format(where=searched.where), searched.parameters).fetchone() is not None


def check_stored(db: sqlite3.Connection, store: ChunkStore, keys: Iterable[bytes]) -> None:
    """Raise DatabaseError if the index names chunks that the store does not have, though nothing changed since."""
    with suppress(StoreError), store.read() as reader:
        if any(reader.get("chunks", key) is None for key in keys) and _indexed(db, store) == store.generation:
            raise sqlite3.DatabaseError("the index has other chunks than the store")


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


@contextmanager
def snapshot(db: sqlite3.Connection) -> Iterator[None]:
    """Let all reads of the block see one state of the index. Writers wait."""
    db.execute("BEGIN")
    try:
        yield
    finally:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")


def _up_to_date(store: ChunkStore) -> sqlite3.Connection:
    path = store.path / _FILE
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
        except BaseException as error:
            db.close()
            if not isinstance(error, _DAMAGE):
                raise
            if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                break  # locked for too long, or no space
            _discard(path)
    db = sqlite3.connect(":memory:", isolation_level=None)
    _refresh(db, store)
    return db


def _discard(path: Path) -> None:
    for suffix in ("", *_BESIDE):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _create(path: Path) -> None:
    """Create the file if it is missing. Raises StorePermission for a link or a file of another user: SQLite would write
    to its target."""
    try:
        os.close(open_file(path, os.O_RDWR | os.O_CREAT, anywhere=True))
        check_files(*(path.with_name(path.name + suffix) for suffix in _BESIDE))
    except InsecurePath as error:
        raise StorePermission(f"{error.filename} {error.strerror}", f"remove it: rm {error.filename}") from error


def _refresh(db: sqlite3.Connection, store: ChunkStore) -> None:
    """Update the index to the store's generation.

    The cost is proportional to the changes, unless the change log has a gap: then everything is compared.
    """
    db.execute("PRAGMA trusted_schema = OFF")
    with snapshot(db):
        if _indexed(db, store) == store.generation:
            return
    with in_transaction(db):
        for _ in range(_MOST_UPDATES):
            indexed = _indexed(db, store)
            with store.read() as reader:
                now = reader.state().generation
                if indexed == now:  # another process was faster
                    return
                if indexed is None:
                    _make_tables(db)
                changes = None if indexed is None else reader.changes_since(indexed)
                update = plan_update(db, reader, changes)
            is_complete = write_update(db, store, update)
            db.execute("DELETE FROM stamp")
            db.execute("INSERT INTO stamp VALUES (?)", (f"{store.identity}:{now}",))
            if is_complete:
                return


def _make_tables(db: sqlite3.Connection) -> None:
    for statement in _TABLES.format(tokenizer=fts5_tokenizer(), schema=_SCHEMA).split(";"):
        db.execute(statement)


@lru_cache(maxsize=1)
def _own_schema() -> Schema:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        _make_tables(db)
        return _schema(db)


def _schema(db: sqlite3.Connection) -> Schema:
    """Return the schema's version and its entries."""
    [(version,)] = db.execute("PRAGMA user_version")
    return version, frozenset(db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))


def _indexed(db: sqlite3.Connection, store: ChunkStore) -> int | None:
    """Return the generation of the store that is indexed, None for an empty file. Raises DatabaseError for an index of
    another store or with another schema: it could have triggers, or views that do not end."""
    schema = _schema(db)
    if not schema[1]:
        return None
    if schema != _own_schema():
        raise sqlite3.DatabaseError("the index has another schema")
    [(stamp,)] = db.execute("SELECT value FROM stamp")
    identity, _, generation = stamp.partition(":")
    if identity != store.identity:
        raise sqlite3.DatabaseError("the index is of another store")
    return int(generation)
