"""Lexical search over the stored chunks: an SQLite FTS5 index beside the store, derived data, rebuilt when stale."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath

from cacheblend_store import ChunkStore

_SCHEMA = 2
_STOP_WORDS = frozenset(
    [
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "by",
        "did",
        "do",
        "does",
        "for",
        "from",
        "had",
        "has",
        "have",
        "how",
        "in",
        "is",
        "it",
        "its",
        "of",
        "on",
        "or",
        "that",
        "the",
        "their",
        "there",
        "this",
        "to",
        "was",
        "were",
        "what",
        "when",
        "where",
        "which",
        "who",
        "whom",
        "whose",
        "why",
        "will",
        "with",
    ]
)
_HEADING = re.compile(r"^#{1,6} +(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Hit:
    """A found chunk. score: bm25, higher is better. snippet: text around the match."""

    key: bytes
    source: str
    index: int
    score: float
    snippet: str

    @property
    def id(self) -> str:
        return self.key.hex()


def search(store: ChunkStore, query: str, k: int, collection: str | None = None) -> list[Hit]:
    """The k best chunks for a free-text query, best first; nothing for a query without words.

    A chunk is found by its own words and by its document's name and first heading, since later paragraphs of a page
    seldom repeat what the page is about. A later chunk ranks a little below an earlier one of equal score.
    """
    match = _match_expression(query)
    if not match:
        return []
    with _index(store) as db:
        rows = db.execute(
            "SELECT key, source, position, -bm25(chunks, 0, 1.0, 2.0, 1.0, 0, 0) AS score,"
            " snippet(chunks, 3, '', '', ' ... ', 14) FROM chunks WHERE chunks MATCH ?"
            " AND (? IS NULL OR collection = ?) ORDER BY score DESC, source, position LIMIT ?",
            (match, collection, collection, k),
        ).fetchall()
    return [
        Hit(bytes.fromhex(key), source, index, score, " ".join(text.split()))
        for key, source, index, score, text in rows
    ]


@contextmanager
def _index(store: ChunkStore) -> Iterator[sqlite3.Connection]:
    """An up-to-date index: the file beside the store, or one in memory where that cannot be written."""
    path = store.path / "search.sqlite3"
    stamp = f"{_SCHEMA}:{store.identity}:{store.generation}"
    if not os.access(store.path, os.W_OK):
        db = sqlite3.connect(":memory:")
        _build(db, store, stamp)
    else:
        db = _open(path)
        try:
            if _stamp(db) != stamp:
                _build(db, store, stamp)
        except sqlite3.DatabaseError:  # derived data: a damaged index is made anew
            db.close()
            path.unlink(missing_ok=True)
            db = _open(path)
            _build(db, store, stamp)
    try:
        yield db
    finally:
        db.close()


def _open(path: os.PathLike[str]) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    return sqlite3.connect(path, timeout=30, isolation_level=None)


def _stamp(db: sqlite3.Connection) -> str | None:
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'stamp'").fetchone():
        return None
    row = db.execute("SELECT value FROM stamp").fetchone()
    return row[0] if row else None


def _build(db: sqlite3.Connection, store: ChunkStore, stamp: str) -> None:
    db.isolation_level = None
    db.execute("BEGIN IMMEDIATE")
    if _stamp(db) == stamp:  # another process was faster
        db.execute("COMMIT")
        return
    db.execute("DROP TABLE IF EXISTS chunks")
    db.execute("DROP TABLE IF EXISTS stamp")
    db.execute("CREATE TABLE stamp (value TEXT)")
    db.execute(
        "CREATE VIRTUAL TABLE chunks USING fts5(key UNINDEXED, source, title, body, collection UNINDEXED,"
        " position UNINDEXED, tokenize = 'porter unicode61')"
    )
    manifests = list(store.chunks())
    titles: dict[str, str] = {}
    for m in sorted(manifests, key=lambda m: m.index):
        if m.source not in titles and (heading := _HEADING.search(m.text)):
            titles[m.source] = heading.group(1)
    db.executemany(
        "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?)",
        ((m.id, m.source, _title(m.source, titles), m.text, m.collection, m.index) for m in manifests),
    )
    db.execute("INSERT INTO stamp VALUES (?)", (stamp,))
    db.execute("COMMIT")


def _title(source: str, titles: dict[str, str]) -> str:
    stem = re.sub(r"[-_.]+", " ", PurePosixPath(source).stem)
    return f"{titles.get(source, '')} {stem}".strip()


def _match_expression(query: str) -> str:
    """FTS5 expression that ORs the query's words; question words count only when there is nothing else."""
    words = [w.lower() for w in re.findall(r"\w+", query)]
    telling = [w for w in words if w not in _STOP_WORDS] or words
    return " OR ".join(f'"{w}"' for w in dict.fromkeys(telling))
