"""The vectors of stored chunks, in the search index beside its words: derived data, made when first needed.

Every search by meaning compares the question with all of them, which for 100,000 chunks of 256 numbers is 50 MB to read.
They are plain blobs and a matrix product: an SQLite extension would do the same scan, and many a Python cannot load one.
"""

from __future__ import annotations

import re
import sqlite3
from functools import cached_property
from typing import TYPE_CHECKING

from cacheblend_cli.corpus.search_index import in_transaction, unspaced

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cacheblend_cli.corpus.embedding import Embedder

LEAST_LIKE = 0.1
"""Cosine below which a text is not taken to say anything of what was asked."""
_BATCH = 1024
_CURRENT = "SELECT digest FROM embedder"
_MISSING = "SELECT rowid, title, body FROM chunks WHERE rowid NOT IN (SELECT id FROM vectors)"
_SENTENCE = re.compile(r"(?<=[.!?\u3002])\s+|\n\s*\n|\n(?=[-*#|])")
_SHOWN = 90  # characters of a sentence


class Asked:
    """A question and its vector."""

    def __init__(self, embedder: Embedder, text: str) -> None:
        self.embedder, self.text = embedder, text

    @cached_property
    def vector(self) -> NDArray[np.float32]:
        """[dim], of length 1."""
        return self.embedder.embed([self.text], question=True)[0]


def nearest(db: sqlite3.Connection, asked: Asked) -> list[tuple[int, float]]:
    """The id of every place of the index and the cosine of its chunk, read under its document's title, to the question."""
    import numpy as np

    while _embed_some(db, asked.embedder):
        pass
    rows = db.execute("SELECT id, vector FROM vectors").fetchall()
    if not rows:
        return []
    vectors = np.frombuffer(b"".join(vector for _, vector in rows), dtype=np.float16).reshape(len(rows), -1)
    scores = vectors.astype(np.float32) @ asked.vector
    return list(zip([i for i, _ in rows], scores.round(4).tolist(), strict=True))


def telling_sentence(text: str, asked: Asked | None) -> str:
    """The sentence that is most like what was asked, or the first one; on one line."""
    sentences = [one for part in _SENTENCE.split(text) if (one := " ".join(part.lstrip("#").split()))] or [""]
    best = 0
    if asked is not None and len(sentences) > 1:
        best = int((asked.embedder.embed(sentences) @ asked.vector).argmax())
    return sentences[best] if len(sentences[best]) <= _SHOWN else sentences[best][:_SHOWN] + " ..."


def _embed_some(db: sqlite3.Connection, embedder: Embedder) -> bool:
    """Compute up to a batch of vectors that are missing: all are where the weights are others. Whether there were any."""
    import numpy as np

    own = (embedder.digest,)
    if db.execute(_CURRENT).fetchone() == own and db.execute(_MISSING).fetchone() is None:
        return False
    with in_transaction(db):
        if db.execute(_CURRENT).fetchone() != own:
            db.execute("DELETE FROM vectors")
            db.execute("DELETE FROM embedder")
            db.execute("INSERT INTO embedder VALUES (?)", own)
        rows = db.execute(_MISSING).fetchmany(_BATCH)
        if rows:
            vectors = embedder.embed([unspaced(f"{title}\n{body}") for _, title, body in rows]).astype(np.float16)
            pairs = [(i, vector.tobytes()) for (i, *_), vector in zip(rows, vectors, strict=True)]
            db.executemany("INSERT INTO vectors VALUES (?, ?)", pairs)
    return bool(rows)
