"""Lexical search over the stored chunks."""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend_store import ChunkStore

from cacheblend_cli.corpus.places import settle
from cacheblend_cli.corpus.scopes import EVERYTHING, Scope
from cacheblend_cli.corpus.search_index import open_index, spaced, unspaced
from cacheblend_cli.errors import NotFoundError, UsageError

_STOP_WORDS = frozenset(
    "a about an and any are as at be been but by can could did do does for from had has have he her his how i if in into "
    "is it its me my of on or our please s she should some t tell than that the their them there these they this those "
    "to us was we were what when where which who whom whose why will with would you your".split()
)
CONTEXTS = ("sink", "document", "neighbours")
_CONTEXT_ORDER = ("document", "neighbours", "sink")
_MAX_TERMS = 64  # of a long question the first ones; SQLite takes 500 parts of a UNION
# Weights: path, title, body. One row a term and chunk; ? is the term, then what its bm25 is to be multiplied with.
_TERM = "SELECT rowid AS id, -bm25(chunks, 0.5, 2.0, 1.0) * ? AS score FROM chunks WHERE chunks MATCH ?"
_BEST = """
    WITH found AS MATERIALIZED ({terms})
    SELECT p.id, p.key, p.source, p.position, p.collection, p.context, sum(score) AS total FROM found JOIN places AS p USING (id)
    WHERE {of} GROUP BY p.id ORDER BY total DESC, p.source, p.position, p.id
"""
_VERSIONS = """
    SELECT DISTINCT p.collection, p.context, coalesce(v.digest, ''), coalesce(v.updated, 0.0) FROM places AS p
    LEFT JOIN versions AS v USING (source, collection, context) WHERE p.source = ?
"""
_SNIPPET = "SELECT snippet(chunks, 2, '', '', ' ... ', 14) FROM chunks WHERE chunks MATCH ? AND rowid = ?"


@dataclass(frozen=True)
class Hit:
    """A found chunk. source: its document's name, see corpus/places.py. score: bm25, higher is better. snippet: text around the match."""

    key: bytes
    source: str
    index: int
    score: float
    snippet: str

    @property
    def id(self) -> str:
        return self.key.hex()


def search(
    store: ChunkStore,
    query: str,
    k: int,
    collections: Sequence[str] | None = None,
    context: str = "document",
    scope: Scope = EVERYTHING,
) -> list[Hit]:
    """The k best chunks of the scope's documents for a free-text query, best first; nothing for a query without words.

    A chunk is found by its own words and by its document's path and first heading, since later paragraphs of a page
    seldom repeat what the page is about. A passage that is stored for several models, and a paragraph that stands in
    several documents, is found once. collections: only chunks of these; of a document that is in several, those of the
    first. Of two texts of one document the one that was stored last counts. Of a document that is stored in several contexts, the chunks of the one named `context` are found; where that
    is not among them, of the first there is of document, neighbours, sink.
    """
    hits: list[Hit] = []
    keys: set[str] = set()
    places: set[tuple[str, int]] = set()
    with open_index(store) as db:
        weights = _term_weights(db, query_terms(query))
        if not weights:
            return hits
        terms = " UNION ALL ".join([_TERM] * len(weights))
        values = [v for term, weight in weights.items() for v in (weight, term)]
        of = "1" if collections is None else f"p.collection IN ({', '.join('?' * len(collections))})"
        rows = db.execute(_BEST.format(terms=terms, of=of), (*values, *(collections or ()))).fetchall()
        versions, names = _Versions(db, collections, context), dict[str, str | None]()  # None: not of the scope
        for row, key, source, index, collection, stored_in, score in rows:
            if len(hits) == k:
                break
            if source not in names:
                settled = settle(source)
                names[source] = settled if scope.holds(settled) else None
            name = names[source]
            if name is None or not versions.counts(source, collection, stored_in):
                continue
            if key not in keys and (source, index) not in places:
                [text] = db.execute(_SNIPPET, (" OR ".join(weights), row)).fetchone()
                hits.append(Hit(bytes.fromhex(key), name, index, score, " ".join(unspaced(text).split())))
            keys.add(key)
            places.add((source, index))
    return hits


def searchable(store: ChunkStore) -> list[str]:
    """The names of all documents that `search` can find."""
    with open_index(store) as db:
        return sorted({settle(source) for (source,) in db.execute("SELECT DISTINCT source FROM places")})


def found_elsewhere() -> NotFoundError:
    """For a search whose scope has nothing, while the rest of the store has something."""
    return NotFoundError(
        "none of these documents has a word of it, and others in the store do", "search them too: --all"
    )


def check_context(name: str) -> None:
    """Raises UsageError for a name that is no context chunks are collected in."""
    if name not in CONTEXTS:
        raise UsageError(f"unknown context {name!r}", f"known: {', '.join(CONTEXTS)}")


class _Versions:
    """Which chunks of a document count, when it is stored in several collections and contexts."""

    def __init__(self, db: sqlite3.Connection, collections: Sequence[str] | None, context: str) -> None:
        self._db, self._collections, self._order = db, collections, (context, *_CONTEXT_ORDER)
        self._known: dict[str, dict[str, str]] = {}

    def counts(self, source: str, collection: str, context: str) -> bool:
        if source not in self._known:
            self._known[source] = self._contexts(source)
        return self._known[source].get(collection) == context

    def _contexts(self, source: str) -> dict[str, str]:
        """collection -> context: of the first of the wanted collections that has the document, or of every one. What is
        stored of an older text does not count."""
        rows = self._db.execute(_VERSIONS, (source,)).fetchall()
        rows = [row for row in rows if self._collections is None or row[0] in self._collections]
        newest = max(rows, key=lambda row: row[3], default=("", "", "", 0.0))
        found: dict[str, str] = {}
        for collection, context, digest, _ in rows:
            if digest == newest[2]:
                known = found.get(collection, context)
                found[collection] = min(known, context, key=self._order.index)
        if self._collections is None:
            return found
        return {c: found[c] for c in [c for c in self._collections if c in found][:1]}


def query_terms(query: str) -> list[str]:
    """The query's words as FTS5 strings; question words count only when there is nothing else."""
    words = [w.lower() for w in re.findall(r"[^\W_]+", spaced(query))][:_MAX_TERMS]
    telling = [w for w in words if w not in _STOP_WORDS] or words
    return [f'"{w}"' for w in dict.fromkeys(telling)]


def _term_weights(db: sqlite3.Connection, terms: list[str]) -> dict[str, float]:
    """The factor from FTS5's bm25 of each term that occurs to ours.

    FTS5 gives a term of half the chunks and more no weight at all, and in a small corpus that is the page's subject.
    """
    [total] = db.execute("SELECT count(*) FROM chunks").fetchone()
    weights = {}
    for term in terms:
        [count] = db.execute("SELECT count(*) FROM chunks WHERE chunks MATCH ?", (term,)).fetchone()
        if count:
            rarity = (total - count + 0.5) / (count + 0.5)
            weights[term] = math.log1p(rarity) / (math.log(rarity) if rarity > 1 else 1e-6)
    return weights
