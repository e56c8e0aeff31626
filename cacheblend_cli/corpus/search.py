"""Search over stored chunks by words, by meaning, or by both."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from cacheblend_store import ChunkStore

from cacheblend_cli.corpus.normalise import spaced, unspaced
from cacheblend_cli.corpus.ranking import (
    PLACES,
    ByMeaning,
    ByWords,
    Query,
    Row,
    embedded,
    fuse,
    questions_in,
    telling_sentence,
)
from cacheblend_cli.corpus.scopes import holds
from cacheblend_cli.corpus.search_index import Searched, check_stored, open_index, rebuilding, searchable
from cacheblend_cli.errors import NotFoundError, check_known
from cacheblend_cli.extras import install_hint
from cacheblend_cli.types import EVERYTHING, NUM_HITS, Scope, SearchParams

if TYPE_CHECKING:
    from cacheblend_cli.corpus.embedding import Embedder

CONTEXTS = ("sink", "document", "neighbours")
_CONTEXT_ORDER = ("document", "neighbours", "sink")
BY = ("words", "meaning", "both")
ON_WEAK_MATCH = ("answer", "refuse")
WEAK_BELOW = {"words": 0.4, "meaning": 0.33, "both": 0.38}
"""Kind of search -> `SearchResult.evidence` below which the best hit is a weak match. Measured in study/search.md."""
MAX_DROP = 0.45
"""How far the match of a hit may be below the best one's before it is cut, by meaning and by both. By words alone it
says too little: see study/search.md."""
_NEXT_TO = """
    SELECT id, key, position FROM places WHERE source = ? AND collection = ? AND context = ? AND position BETWEEN ? AND ?
    ORDER BY abs(position - ?), position
"""
_VERSIONS = """
    SELECT DISTINCT p.collection, p.context, coalesce(v.digest, ''), coalesce(v.updated, 0.0) FROM places AS p
    LEFT JOIN versions AS v USING (source, collection, context) WHERE p.source = ?
"""
_BODY = "SELECT body FROM chunks WHERE rowid = ?"
_DAMAGED = "SELECT count(DISTINCT p.key) FROM damaged AS p WHERE {where}"
_SNIPPET = "SELECT snippet(chunks, 2, '', '', ' ... ', ?) FROM chunks WHERE chunks MATCH ? AND rowid = ?"
_SNIPPET_WORDS, _SNIPPET_LETTERS = 14, 48  # tokens; of scripts without blanks, a token is a letter
_SNIPPET_CHARACTERS = 400  # a word can have thousands of characters
_QUERY_CHARACTERS = 1 << 15
"""Characters of a query to read. A search uses at most 64 terms and 2,048 tokens of them."""
_COMPARED = 100  # texts
_BEYOND = 50
"""Rows beyond k to compare with the hits."""
_AS_GOOD = 0.1
"""How far the last hit's match may be below the best one's for others to count that are at most half of it lower."""
WEAK = "the best match is weak"


@dataclass(frozen=True)
class Lookup(SearchParams):
    """Search parameters with loaded embeddings."""

    by: str = "words"  # "words", "meaning" or "both"; "words" without an embedder
    embedder: Embedder | None = None
    before: str = ""  # preceding conversation, with a lower weight than the query

    @classmethod
    def with_weights(cls, params: SearchParams, say: Callable[[str], None] | None = None) -> Lookup:
        """Load the embeddings.

        say: callback for a message if meaning was asked for and no embeddings are installed. Raises UsageError for
        unknown values, NotFoundError if the named embeddings do not exist.
        """
        check_known("context", params.context, CONTEXTS)
        check_known("on_weak_match", params.on_weak_match, ON_WEAK_MATCH)
        check_known("search", params.by, ("auto", *BY))
        embedder = None
        if params.by != "words":
            from cacheblend_cli.corpus.embedding import find_embedder

            embedder = find_embedder(params.embeddings)
            if embedder is None and params.by != "auto" and say:
                say(
                    f"there are no embedding weights to search by meaning with: words are searched ({install_hint('meaning')})"
                )
        by = "words" if embedder is None else "both" if params.by == "auto" else params.by
        return cls(**vars(params) | {"by": by}, embedder=embedder)

    @property
    def used_embedder(self) -> Embedder | None:
        return None if self.by == "words" else self.embedder


@dataclass(frozen=True)
class SearchHit:
    """A found chunk."""

    key: bytes
    source: str  # document name, see corpus/places.py
    index: int  # position of the chunk in the document
    # Higher is better. By words: BM25; by meaning: cosine; by both: 0.6 * coverage + 0.4 * cosine. Coverage is the
    # share of the query terms in the chunk, weighted by idf.
    score: float
    snippet: str  # text around the match, on one line
    match: float = 0.0  # quality from 0 to 1: coverage for a search by words, else the score
    beside: bool = False  # not found itself, but next to a hit; it has that hit's score
    others: tuple[str, ...] = ()  # names of other documents with the chunk

    @property
    def id(self) -> str:
        return self.key.hex()


class SearchResult(NamedTuple):
    hits: list[SearchHit]  # best first
    by: str  # "words", "meaning" or "both"
    num_cut: int = 0  # hits left out because their match is far below the best one's
    num_damaged: int = 0  # chunks of the store that cannot be searched, because their records are damaged
    num_repeated: int = 0  # hits left out because a better one contains their text
    evidence: float = 0.0  # the best match, and half of what it is above that of the next document
    num_more: int = 0  # passages beyond k that match as well as the last hit

    @property
    def weak(self) -> bool:
        """Return whether even the best hit is a weak match. The thresholds are measured in study/search.md."""
        return self.evidence < WEAK_BELOW[self.by]


def left_out_notes(num_cut: int, num_repeated: int) -> Iterator[str]:
    """Say how many hits were left out, and why."""
    for count, why in (
        (num_cut, f"far below the best match (-k {NUM_HITS} takes all)"),
        (num_repeated, "a better one contains the text"),
    ):
        if count:
            yield f"{'1 more hit is' if count == 1 else f'{count} more hits are'} left out: {why}"


def more_note(num_more: int, k: int) -> str:
    """Say that passages beyond the k hits match as well, and how to have them."""
    what = "1 more passage matches" if num_more == 1 else f"{num_more} more passages match"
    return f"{what} as well: -k {k + num_more}"


def damaged_note(count: int) -> str:
    """Say how many chunks were not searched and how to repair them."""
    what = "1 stored chunk is" if count == 1 else f"{count} stored chunks are"
    return f"{what} damaged and not searched; repair: cacheblend chunks verify --repair, then cacheblend precompute"


@rebuilding
def search(store: ChunkStore, query: str, lookup: Lookup, collections: Sequence[str] | None = None) -> SearchResult:
    """Find the k best chunks in the scope for a free-text query. A query without words has no hits. Thread-safe.

    A search covers the chunk's own text and the path and first heading of its document, because later paragraphs of a
    page seldom repeat its subject. It goes by words, by meaning or by both, see corpus/ranking.py.

    Each passage is found once, even if it is stored for several models or in several documents, and not if a better hit
    contains its text. Only the text of a document that was stored last is searched. If a document is stored in several
    contexts, the context of `lookup` is searched, else the first of document, neighbours, sink. With `lookup.expand`,
    the adjacent chunks follow after the k hits.

    Of a longer message that matches weakly as a whole, the questions are searched by themselves: the share of its words
    that one passage has is small.

    collections: search only these; for a document in several of them, only the first.
    """
    query = query[:_QUERY_CHARACTERS]
    with open_index(store) as db, embedded(db, lookup.used_embedder, Searched(collections)):
        found = _search(db, query, lookup, collections)
        if found.weak:
            others = [_search(db, question, lookup, collections) for question in questions_in(query)]
            found = max(found, *others, key=lambda result: result.evidence) if others else found
        check_stored(db, store, (hit.key for hit in found.hits))
        return found


@rebuilding
def prepare(store: ChunkStore, params: SearchParams, collections: Sequence[str]) -> None:
    """Update the index, and the embeddings of these collections, so that the next search need not."""
    embedder = Lookup.with_weights(params).used_embedder
    with open_index(store) as db, embedded(db, embedder, Searched(collections)):
        pass


def _search(db: sqlite3.Connection, query: str, lookup: Lookup, collections: Sequence[str] | None) -> SearchResult:
    """Search for one text, see `search`."""
    asked = Query(query, lookup.before[:_QUERY_CHARACTERS], lookup.used_embedder)
    searched = Searched(collections)
    [(damaged,)] = db.execute(_DAMAGED.format(where=searched.where), searched.parameters)
    if not asked.terms:
        return SearchResult([], lookup.by, 0, damaged)
    counted = _Counted(db, collections, lookup.context, lookup.scope)
    words = None if lookup.by == "meaning" and asked.embedder else ByWords(db, asked, searched)
    meaning = ByMeaning(db, asked, searched) if asked.embedder else None
    ranking: Iterable[Row] = words or meaning or ()
    if words and meaning:
        ranking = fuse(words, meaning, counted.of, lookup.k)
    distinct = _Distinct(db)
    ranked = distinct.of(counted.of(ranking))
    rows = list(islice(ranked, lookup.k))
    num_found, num_repeated = len(rows), distinct.num_repeated
    beyond = list(islice(ranked, _BEYOND))
    matches = {row.id: words.of(row)[0] if words and not meaning else row.score for row in (*rows, *beyond)}
    best, source = max(((matches[row.id], row.source) for row in rows), default=(0.0, ""))
    other = max((matches[row.id] for row in (*rows, *beyond) if row.source != source), default=0.0)
    evidence, num_more = best + max(best - other, 0.0) / 2, 0
    if num_found == lookup.k and matches[rows[-1].id] >= best - _AS_GOOD and evidence >= WEAK_BELOW[lookup.by]:
        least = matches[rows[-1].id] - _AS_GOOD / 2
        num_more = sum(matches[row.id] >= least for row in beyond)
    if lookup.cut and meaning:
        rows = [row for row in rows if row.score >= rows[0].score - MAX_DROP]
    hits = []
    for row in rows:
        hit = _hit(row, _snippet(db, row, words.terms if words else (), asked), matches[row.id])
        others = {alike.source for alike in counted.alike(row)} - {row.source}
        hits.append(replace(hit, others=tuple(sorted(others))))
    hits += _beside(db, rows, lookup.expand)
    return SearchResult(hits, lookup.by, num_found - len(rows), damaged, num_repeated, evidence, num_more)


def _hit(row: Row, snippet: str, match: float, *, beside: bool = False) -> SearchHit:
    return SearchHit(bytes.fromhex(row.key), row.source, row.position, row.score, snippet, match, beside)


def _snippet(db: sqlite3.Connection, row: Row, terms: Collection[str], asked: Query | None) -> str:
    found = None
    if terms:
        size = _SNIPPET_WORDS if all(spaced(term) == term for term in terms) else _SNIPPET_LETTERS
        found = db.execute(_SNIPPET, (size, " OR ".join(terms), row.id)).fetchone()
    if found is None:
        [body] = db.execute(_BODY, (row.id,)).fetchone()
        return telling_sentence(unspaced(body), asked)
    return " ".join(unspaced(found[0]).split())[:_SNIPPET_CHARACTERS]


def _beside(db: sqlite3.Connection, rows: Sequence[Row], count: int) -> Iterator[SearchHit]:
    """Yield up to `count` chunks before and after each row in the same document, without duplicates."""
    seen = {row.key for row in rows}
    for row in rows if count else ():
        at = (row.source, row.collection, row.context, row.position - count, row.position + count, row.position)
        for i, key, position in db.execute(_NEXT_TO, at).fetchall():
            if key not in seen:
                seen.add(key)
                neighbour = row._replace(id=i, key=key, position=position)
                yield _hit(neighbour, _snippet(db, neighbour, (), None), 0.0, beside=True)


class _Distinct:
    """Filter rows, best first: leave out and count those whose text is part of one of the _COMPARED best ones' (more
    would take a search for all chunks minutes). Blanks do not matter."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db, self.num_repeated = db, 0

    def of(self, rows: Iterable[Row]) -> Iterator[Row]:
        better = list[str]()
        for row in rows:
            [body] = self._db.execute(_BODY, (row.id,)).fetchone()
            text = f" {' '.join(body.split())} "
            if any(text in other for other in better):
                self.num_repeated += 1
                continue
            if len(better) < _COMPARED:
                better.append(text)
            yield row


class _Counted:
    """Filter rows: in the scope, in the requested collections, from the newest text of a document, in one context.

    Duplicate passages are dropped.
    """

    def __init__(self, db: sqlite3.Connection, collections: Sequence[str] | None, context: str, scope: Scope) -> None:
        self._db, self._collections, self._scope = db, collections, scope
        self._order = (context, *_CONTEXT_ORDER)
        self._known: dict[str, dict[str, str]] = {}

    def of(self, rows: Iterable[Row]) -> Iterator[Row]:
        seen = set[tuple[str, int]]()  # places of the passages so far
        for row in filter(self._counts, rows):
            places = {(alike.source, alike.position) for alike in self.alike(row)}
            if seen.isdisjoint(places):
                yield row
            seen |= places

    def alike(self, row: Row) -> list[Row]:
        """Return all places of the row's chunk."""
        rows = (Row(*found) for found in self._db.execute(f"{PLACES} WHERE key = ?", (row.key,)))
        return list(filter(self._counts, rows))

    def _counts(self, row: Row) -> bool:
        if row.source not in self._known:
            self._known[row.source] = self._contexts(row.source)
        return self._known[row.source].get(row.collection) == row.context

    def _contexts(self, source: str) -> dict[str, str]:
        """Map collection to context for a document in the scope: its first requested collection, or all if none is
        requested. Collections with an older text are left out."""
        if not holds(self._scope, source):
            return {}
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


def weak_note(store: ChunkStore, scope: Scope, collections: Sequence[str] | None = None, num_used: int = 0) -> str:
    """Say that even the best hit is a weak match, and how many documents outside the scope were not searched.

    num_used: passages from which a question is answered all the same.
    """
    rest = "" if num_used < 2 else " and 1 more passage" if num_used == 2 else f" and {num_used - 1} more passages"
    used = f"{WEAK}: answered from it{rest}" if num_used else WEAK
    count = num_elsewhere(store, scope, collections)
    return f"{used}; {_not_searched(count)}: --all" if count else used


def num_elsewhere(store: ChunkStore, scope: Scope, collections: Sequence[str] | None = None) -> int:
    """Return the number of documents outside the scope that `search` can find."""
    return sum(not holds(scope, name) for name in searchable(store, collections)) if scope != EVERYTHING else 0


def _not_searched(count: int) -> str:
    return "1 document elsewhere was not searched" if count == 1 else f"{count} documents elsewhere were not searched"


def look(store: ChunkStore, query: str, params: SearchParams, say: Callable[[str], None] | None = None) -> SearchResult:
    """Search the scope. Raises NotFoundError if nothing is found."""
    lookup = Lookup.with_weights(params, say)
    found = search(store, query, lookup)
    if not found.hits:
        if found.num_damaged and say:
            say(damaged_note(found.num_damaged))
        raise found_elsewhere(store, query, lookup) or NotFoundError(
            f"no stored chunk matches {query!r}", "try other words, or precompute more documents"
        )
    return found


def found_elsewhere(
    store: ChunkStore, query: str, lookup: Lookup, collections: Sequence[str] | None = None
) -> NotFoundError | None:
    """Return an error that hits are outside the scope, or None if the whole store has none."""
    if search(store, query, Lookup(1), collections).hits:
        count = num_elsewhere(store, lookup.scope, collections)
        what = f"no match in these documents; other stored documents match ({_not_searched(count)})"
        return NotFoundError(what, "search them too: --all")
    return None
