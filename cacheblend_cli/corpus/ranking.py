"""Rankings of indexed chunks for a query: by words (BM25), by meaning (cosine), and by both scores fused."""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from typing import TYPE_CHECKING, NamedTuple

from cacheblend_cli.corpus.normalise import indexed
from cacheblend_cli.corpus.vectors import LEAST_LIKE, cosines

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cacheblend_cli.corpus.embedding import Embedder

_STOP_WORDS = frozenset(
    "a about an and any are as at be been but by can could did do does for from get gets got had has have he her his how i if in into "
    "is it its many me much my of off on or our please s she should some t tell than that the their them there these they this those "
    "to us was we were what when where which who whom whose why will with would you your".split()
)
_MAX_TERMS = 64  # the first ones of a long query; SQLite takes 500 parts of a UNION
_DEPTH = 50  # rows of each ranking that are fused
_WORDS_SHARE = 0.6  # of a fused score
_BEFORE_SHARE = 0.5  # of a term or vector of the text before the query, against one of the query
PLACES = "SELECT id, key, source, position, collection, context FROM places"
_MATCHED = "CREATE TEMP TABLE matched (id INTEGER PRIMARY KEY, score REAL, idf REAL)"
# Weights: path, title, body. One row a term and chunk; ? is the factor on FTS5's bm25, the term's idf, the term.
_TERM = "SELECT rowid AS id, -bm25(chunks, 0.5, 2.0, 1.0) * ? AS score, ? AS idf FROM chunks WHERE chunks MATCH ?"
_MATCH = """
    INSERT INTO matched WITH found AS MATERIALIZED ({terms}) SELECT id, sum(score), sum(idf) FROM found GROUP BY id
"""
_BEST = """
    SELECT p.id, p.key, p.source, p.position, p.collection, p.context, m.score FROM matched AS m JOIN places AS p USING (id)
    ORDER BY m.score DESC, p.source, p.position, p.id
"""


class Row(NamedTuple):
    """A place of a chunk in the index. score: of the ranking that gave it."""

    id: int
    key: str
    source: str
    position: int
    collection: str
    context: str
    score: float = 0.0


Filter = Callable[[Iterable[Row]], Iterator[Row]]


@dataclass(frozen=True)
class Query:
    """Text to search for. before: what was said before it, which counts less. embedder: None to search by words only."""

    text: str
    before: str = ""
    embedder: Embedder | None = None

    @cached_property
    def terms(self) -> dict[str, float]:
        """FTS5 strings and what they count."""
        terms = dict.fromkeys(query_terms(self.text), 1.0)
        before = query_terms(self.before) if terms else []
        return terms | {term: _BEFORE_SHARE for term in before if term not in terms}

    @cached_property
    def vector(self) -> NDArray[np.float32]:
        """[dim], of length 1."""
        assert self.embedder is not None
        import numpy as np

        vectors = self.embedder.embed([self.text, *filter(None, (self.before,))], question=True)
        vector: NDArray[np.float32] = vectors[0] + _BEFORE_SHARE * vectors[1:].sum(axis=0)
        return vector / max(float(np.linalg.norm(vector)), 1e-9)


def query_terms(text: str) -> list[str]:
    """Return the words as FTS5 strings; question words only if there are no others."""
    words = [w.lower() for w in re.findall(r"[^\W_]+", indexed(text))][:_MAX_TERMS]
    telling = [w for w in words if w not in _STOP_WORDS] or words
    return [f'"{w}"' for w in dict.fromkeys(telling)]


class ByWords:
    """Chunks that have words of the query. terms: those of the query's terms that occur."""

    def __init__(self, db: sqlite3.Connection, query: Query) -> None:
        self._db, self.terms = db, list[str]()
        [total] = db.execute("SELECT count(*) FROM chunks_docsize").fetchone()
        self._idf, values = 0.0, list[float | str]()
        for term, share in list(query.terms.items())[:_MAX_TERMS]:
            [count] = db.execute("SELECT count(*) FROM chunks WHERE chunks MATCH ?", (term,)).fetchone()
            rarity = (total - count + 0.5) / (count + 0.5)
            idf = share * math.log1p(rarity)
            self._idf += idf
            if count:
                # FTS5 gives a term of half the chunks and more no weight at all, and in a small corpus that is a page's subject
                self.terms.append(term)
                values += [idf / (math.log(rarity) if rarity > 1 else 1e-6), idf, term]
        db.execute(_MATCHED)
        if self.terms:
            terms = " UNION ALL ".join([_TERM] * len(self.terms))
            db.execute(_MATCH.format(terms=terms), values)

    def __iter__(self) -> Iterator[Row]:
        """Rows by BM25, best first."""
        yield from map(Row._make, self._db.execute(_BEST))

    def of(self, row: Row) -> tuple[float, float]:
        """Return the row's coverage, the share of the query's terms that it has, each counted by its idf, and its BM25."""
        found = self._db.execute("SELECT idf, score FROM matched WHERE id = ?", (row.id,)).fetchone()
        return (found[0] / self._idf, found[1]) if found else (0.0, 0.0)


class ByMeaning:
    """Chunks by the cosine of their vectors to the query's."""

    def __init__(self, db: sqlite3.Connection, query: Query) -> None:
        assert query.embedder is not None
        self._db = db
        self._ids, self._scores = cosines(db, query.embedder, query.vector)

    def __iter__(self) -> Iterator[Row]:
        """Rows of at least LEAST_LIKE, best first."""
        order = (-self._scores).argsort(kind="stable")
        order = order[self._scores[order] >= LEAST_LIKE]
        pairs = zip(self._scores[order].tolist(), self._ids[order].tolist(), strict=True)
        for score, same in groupby(pairs, key=lambda pair: pair[0]):
            rows = [self._db.execute(f"{PLACES} WHERE id = ?", (i,)).fetchone() for _, i in same]
            yield from sorted(
                (Row(*row)._replace(score=score) for row in rows if row), key=lambda r: (r.source, r.position, r.id)
            )

    def of(self, row: Row) -> float:
        """Return the row's cosine, 0 where it has no vector."""
        at = int(self._ids.searchsorted(row.id))
        return float(self._scores[at]) if at < len(self._ids) and self._ids[at] == row.id else 0.0


def fuse(words: ByWords, meaning: ByMeaning, keep: Filter, k: int) -> list[Row]:
    """Rank the best rows of both rankings by a convex combination of coverage and cosine; ties go to the higher BM25.

    A sum of scores keeps what a sum of ranks loses: that one chunk has all words of the query and the next has half of
    them (Bruch et al., 2023, arXiv 2210.11934). keep: which rows count.
    """
    best: dict[str, tuple[float, float, Row]] = {}
    for ranking in (words, meaning):
        for row in islice(keep(ranking), max(_DEPTH, k)):
            coverage, bm25 = words.of(row)
            score = round(_WORDS_SHARE * coverage + (1 - _WORDS_SHARE) * max(meaning.of(row), 0.0), 4)
            best[row.key] = max(best.get(row.key, (0.0, 0.0, row)), (score, bm25, row), key=lambda found: found[:2])
    ranked = sorted(best.values(), key=lambda found: (-found[0], -found[1], found[2].source, found[2].position))
    return [row._replace(score=score) for score, _, row in ranked]
