"""Rank indexed chunks for a query: by words (BM25), by meaning (cosine), or by a fusion of both.

A search by meaning reads the vectors of all chunks, which are computed on first use: 50 MB for 100,000 chunks of 256
dimensions in fp16. They are plain blobs, multiplied as one matrix. An SQLite extension would do the same scan, and many
Python builds cannot load extensions.
"""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from typing import TYPE_CHECKING, NamedTuple

from cacheblend_cli.corpus.function_words import function_words
from cacheblend_cli.corpus.normalise import normalised, search_words, unspaced
from cacheblend_cli.corpus.search_index import Searched, in_transaction, snapshot
from cacheblend_cli.corpus.word_forms import beginning, forms, joined

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cacheblend_cli.corpus.embedding import Embedder


LEAST_LIKE = 0.1
"""Cosine below which a text is not a hit."""
_BATCH = 1024
_CURRENT = "SELECT digest FROM embedder"
_PENDING = """
    SELECT rowid, title, body FROM chunks WHERE rowid IN (
        SELECT q.id FROM pending AS q JOIN places AS p USING (id) WHERE {where} LIMIT ?
    )
"""
_VECTORS = "SELECT v.id, v.vector FROM vectors AS v JOIN places AS p USING (id) WHERE {where} ORDER BY v.id"
_SENTENCE = re.compile(r"(?<=[.!?\u3002])\s+|\n\s*\n|\n(?=[-*#|])")
_PART = re.compile(r"(?<=[.!?:;\u061f\u061b])\s+|(?<=[\u3002\uff01\uff1f])|\n+")
_ASKS = re.compile(r"""[?\uff1f\u061f\u1367]["'\u201d\u00bb)]*$|[\u0370-\u03ff\u1f00-\u1fff];$""")  # the last is Greek
_MOST_QUESTIONS, _LAST_PARTS = 4, 2
_SHOWN = 90  # maximum characters of a sentence


def sentences_of(text: str) -> list[str]:
    """Split a text into sentences, headings and list items, each on one line."""
    return [one for part in _SENTENCE.split(text) if (one := " ".join(part.lstrip("#").split()))]


def questions_in(message: str) -> list[str]:
    """Return the questions of a message of several sentences, or the last sentences if none ends as a question."""
    parts = [part for one in _PART.split(message) if (part := one.strip())]
    questions = [part for part in parts if _ASKS.search(part)][-_MOST_QUESTIONS:]
    return (questions or parts[-_LAST_PARTS:]) if len(parts) > 1 else []


def telling_sentence(text: str, query: Query | None) -> str:
    """Return the sentence nearest to the query, on one line; without a query or embeddings, the first sentence."""
    sentences = sentences_of(text) or [""]
    best = 0
    if query is not None and query.embedder is not None and len(sentences) > 1:
        best = int((query.embedder.embed(sentences) @ query.vector).argmax())
    return sentences[best] if len(sentences[best]) <= _SHOWN else sentences[best][:_SHOWN] + " ..."


@contextmanager
def embedded(db: sqlite3.Connection, embedder: Embedder | None, searched: Searched) -> Iterator[None]:
    """Let all reads of the block see one state of the index: with an embedder, one in which no vector of the searched
    collections is missing."""
    while True:
        with snapshot(db):
            if embedder is None or not _is_missing(db, embedder, searched):
                yield
                return
        _embed_some(db, embedder, searched)


def _is_missing(db: sqlite3.Connection, embedder: Embedder, searched: Searched) -> bool:
    """Return whether vectors of the searched collections are missing. If the weights changed, all are."""
    pending = db.execute(_PENDING.format(where=searched.where), (*searched.parameters, 1))
    return db.execute(_CURRENT).fetchone() != (embedder.digest,) or pending.fetchone() is not None


def _embed_some(db: sqlite3.Connection, embedder: Embedder, searched: Searched) -> None:
    """Compute up to _BATCH missing vectors of the searched collections."""
    import numpy as np

    own = (embedder.digest,)
    with in_transaction(db):
        if db.execute(_CURRENT).fetchone() != own:
            db.execute("DELETE FROM vectors")
            db.execute("DELETE FROM embedder")
            db.execute("INSERT INTO embedder VALUES (?)", own)
            db.execute("INSERT OR IGNORE INTO pending SELECT rowid FROM chunks")
        rows = db.execute(_PENDING.format(where=searched.where), (*searched.parameters, _BATCH)).fetchall()
        if rows:
            vectors = embedder.embed([unspaced(f"{title}\n{body}") for _, title, body in rows]).astype(np.float16)
            pairs = [(i, vector.tobytes()) for (i, *_), vector in zip(rows, vectors, strict=True)]
            db.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", pairs)
            db.executemany("DELETE FROM pending WHERE id = ?", [(i,) for i, *_ in rows])


_MAX_TERMS = 64  # first terms of a long query
_DEPTH = 50  # rows of each ranking to fuse
_WORDS_SHARE = 0.6  # weight of the coverage in a fused score
_BEFORE_SHARE = 0.5  # weight of the text before the query, relative to the query
_BEGINNING = 0.6  # weight of a chunk's word that begins as the query's, relative to the same word
_COMMON = 100  # a word that so many chunks have is not searched by its beginning
PLACES = "SELECT id, key, source, position, collection, context FROM places"
# whole: 1 for a chunk with a form of the term, 0 for one with its beginning only
_TABLES = """
    DROP TABLE IF EXISTS temp.found;
    DROP TABLE IF EXISTS temp.weights;
    DROP TABLE IF EXISTS temp.matched;
    CREATE TEMP TABLE found (
        term INTEGER, whole INTEGER, id INTEGER, frequency REAL, length INTEGER, PRIMARY KEY (term, id)
    ) WITHOUT ROWID;
    CREATE TEMP TABLE weights (term INTEGER, whole INTEGER, idf REAL);
    CREATE TEMP TABLE matched (id INTEGER PRIMARY KEY, score REAL, idf REAL);
"""
_SIZE = "SELECT count(p.length), total(p.length) FROM places AS p WHERE {where}"
_NUM_MATCHES = "SELECT count(*) FROM chunks WHERE chunks MATCH ?"
# FTS5's bm25() is idf * f * 2.2 / (f + k), with statistics of the whole index. Solved for f, the frequency of the term
# in the chunk, where an occurrence in the body counts 1, in the title 2, in the path 0.5. Parameters: the term, its
# number, whole, FTS5's idf, the mean length of all chunks.
_FIND = """
    INSERT OR IGNORE INTO found WITH scores AS MATERIALIZED (
        SELECT rowid AS id, -bm25(chunks, 0.5, 2.0, 1.0) AS score FROM chunks WHERE chunks MATCH ?
    )
    SELECT ?, ?, p.id, round(2 * s.score * (0.3 + 0.9 * p.length / g.mean) / (2.2 * g.idf - s.score)) / 2, p.length
    FROM (SELECT ? AS idf, ? AS mean) AS g CROSS JOIN scores AS s JOIN places AS p USING (id) WHERE {where}
"""
_NUM_CHUNKS = "SELECT term, sum(whole), count(*) FROM found GROUP BY term"
# BM25 with the k1 and b of FTS5, 1.2 and 0.75. Parameter: mean length of the searched chunks.
_SCORE = """
    INSERT INTO matched
    SELECT id, sum(idf * frequency * 2.2 / (frequency + 0.3 + 0.9 * length / ?)), sum(idf)
    FROM found JOIN weights USING (term, whole) GROUP BY id
"""
_BEST = "SELECT score, id FROM matched ORDER BY score DESC"


class Row(NamedTuple):
    """A place of a chunk in the index, with the score of its ranking."""

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
    """Text to search for."""

    text: str
    before: str = ""  # preceding conversation, weighted by _BEFORE_SHARE
    embedder: Embedder | None = None  # None: search by words only

    @cached_property
    def terms(self) -> dict[str, float]:
        """Map each FTS5 string to its weight."""
        terms = query_terms(self.text)
        before = query_terms(self.before) if terms else {}
        return terms | {term: _BEFORE_SHARE * weight for term, weight in before.items() if term not in terms}

    @cached_property
    def vector(self) -> NDArray[np.float32]:
        """Query vector [dim] of length 1."""
        assert self.embedder is not None
        import numpy as np

        vectors = self.embedder.embed([self.text, *filter(None, (self.before,))], question=True)
        vector: NDArray[np.float32] = vectors[0] + _BEFORE_SHARE * vectors[1:].sum(axis=0)
        return vector / max(float(np.linalg.norm(vector)), 1e-9)


def query_terms(text: str) -> dict[str, float]:
    """Map each word, as an FTS5 string, to its weight. Function words are kept only if there are no other words."""
    words = list(islice(_words(text), _MAX_TERMS))
    ignored = function_words({word for word, _ in words})
    telling = [pair for pair in words if pair[0] not in ignored] or words
    terms: dict[str, float] = {}
    for word, weight in telling:
        terms[f'"{word}"'] = max(weight, terms.get(f'"{word}"', 0.0))
    return terms


def has_telling_words(text: str) -> bool:
    """Return whether the text has words other than function words."""
    words = {word for word, _ in _words(text)}
    return bool(words - function_words(words))


def _words(text: str) -> Iterator[tuple[str, float]]:
    return ((word.lower(), weight) for word, weight in search_words(joined(normalised(text))))


class ByWords:
    """Chunks with words of the query, by BM25 with the statistics of the searched collections.

    FTS5's own bm25() counts the chunks of the whole index: its scores would reveal to a tenant which words others
    store. terms: forms of the query's terms that occur in the collections.
    """

    def __init__(self, db: sqlite3.Connection, query: Query, searched: Searched) -> None:
        self._db = db
        for statement in _TABLES.split(";"):
            db.execute(statement)
        everything = db.execute(_SIZE.format(where=Searched().where)).fetchone()
        total, length = db.execute(_SIZE.format(where=searched.where), searched.parameters).fetchone()
        shares = dict(islice(query.terms.items(), _MAX_TERMS))
        self.terms = list[str]()
        for number, term in enumerate(shares):
            word = term.strip('"')
            count = sum(self._find(number, form, True, searched, *everything) for form in forms(word))
            if count < _COMMON and (begun := beginning(word)):
                self._find(number, begun, False, searched, *everything)
        num_chunks = {number: counts for number, *counts in db.execute(_NUM_CHUNKS)}
        # FTS5 gives no weight to a term that at least half of the chunks contain. In a small corpus such a term can be
        # the subject of the page.
        self._idf = 0.0
        for number, share in enumerate(shares.values()):
            counts = num_chunks.get(number, (0, 0))
            idf, idf_begun = (share * math.log1p(_rarity(total, count)) for count in counts)
            self._idf += idf
            db.execute("INSERT INTO weights VALUES (?, 1, ?), (?, 0, ?)", (number, idf, number, _BEGINNING * idf_begun))
        db.execute(_SCORE, (length / max(total, 1),))

    def _find(self, number: int, form: str, whole: bool, searched: Searched, total: int, length: float) -> int:
        """Add the chunks with a form of a term to the table `found`, except those that it has. Return their number.

        total, length: number and words of all chunks.
        """
        [count] = self._db.execute(_NUM_MATCHES, (form,)).fetchone()
        if not count:
            return 0
        rarity = _rarity(total, count)
        idf = math.log(rarity) if rarity > 1 else 1e-6  # as FTS5 has it
        parameters = (form, number, whole, idf, length / total, *searched.parameters)
        num_new = self._db.execute(_FIND.format(where=searched.where), parameters).rowcount
        if num_new:
            self.terms.append(form)
        return num_new

    def __iter__(self) -> Iterator[Row]:
        yield from _rows(self._db, self._db.execute(_BEST))

    def of(self, row: Row) -> tuple[float, float]:
        """Return (coverage, BM25) of a row. Coverage: share of the query terms that it contains, weighted by idf."""
        found = self._db.execute("SELECT idf, score FROM matched WHERE id = ?", (row.id,)).fetchone()
        return (found[0] / self._idf, found[1]) if found else (0.0, 0.0)


def _rows(db: sqlite3.Connection, ranking: Iterable[tuple[float, int]]) -> Iterator[Row]:
    """Yield the rows of (score, id), best first; of equal scores in order of source and position."""
    for score, same in groupby(ranking, key=lambda pair: pair[0]):
        rows = [db.execute(f"{PLACES} WHERE id = ?", (i,)).fetchone() for _, i in same]
        yield from sorted(
            (Row(*row)._replace(score=score) for row in rows if row), key=lambda r: (r.source, r.position, r.id)
        )


def _rarity(total: int, count: int) -> float:
    """Return the odds against a chunk with a term that `count` of `total` chunks contain."""
    return (total - count + 0.5) / (count + 0.5)


class ByMeaning:
    """Chunks by cosine similarity to the query vector. A chunk is embedded together with the title of its document."""

    def __init__(self, db: sqlite3.Connection, query: Query, searched: Searched) -> None:
        import numpy as np

        rows = db.execute(_VECTORS.format(where=searched.where), searched.parameters).fetchall()
        if any(len(vector) != 2 * len(query.vector) for _, vector in rows):
            raise sqlite3.DatabaseError("the index has vectors of another size")
        stored = np.frombuffer(b"".join(vector for _, vector in rows), dtype=np.float16)
        vectors = stored.reshape(len(rows), len(query.vector)).astype(np.float32)
        self._db, self._scores = db, (vectors @ query.vector).round(4)
        self._ids = np.array([i for i, _ in rows], dtype=np.int64)  # of all searchable places, ascending

    def __iter__(self) -> Iterator[Row]:
        order = (-self._scores).argsort(kind="stable")
        order = order[self._scores[order] >= LEAST_LIKE]
        yield from _rows(self._db, zip(self._scores[order].tolist(), self._ids[order].tolist(), strict=True))

    def of(self, row: Row) -> float:
        """Return the cosine of a row, 0 if it has no vector."""
        at = int(self._ids.searchsorted(row.id))
        return float(self._scores[at]) if at < len(self._ids) and self._ids[at] == row.id else 0.0


def fuse(words: ByWords, meaning: ByMeaning, keep: Filter, k: int) -> list[Row]:
    """Rank the best rows of both rankings by a convex combination of coverage and cosine; ties go to the higher BM25.

    Ranks would lose the difference between a chunk with all words of the query and the next one with half of them;
    scores keep it (Bruch et al., 2023, arXiv 2210.11934). keep: filters the rows.
    """
    best: dict[str, tuple[float, float, Row]] = {}
    for ranking in (words, meaning):
        for row in islice(keep(ranking), max(_DEPTH, k)):
            coverage, bm25 = words.of(row)
            score = round(_WORDS_SHARE * coverage + (1 - _WORDS_SHARE) * max(meaning.of(row), 0.0), 4)
            best[row.key] = max(best.get(row.key, (0.0, 0.0, row)), (score, bm25, row), key=lambda found: found[:2])
    ranked = sorted(best.values(), key=lambda found: (-found[0], -found[1], found[2].source, found[2].position))
    return [row._replace(score=score) for score, _, row in ranked]
