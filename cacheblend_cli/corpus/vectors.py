"""Vectors of stored chunks in the search index, computed on first use.

A search by meaning reads all vectors: 50 MB for 100,000 chunks of 256 dimensions in fp16. They are plain blobs,
multiplied as one matrix. An SQLite extension would do the same scan, and many Python builds cannot load extensions.
"""

from __future__ import annotations

import re
import sqlite3
from typing import TYPE_CHECKING

from cacheblend_cli.corpus.normalise import unspaced
from cacheblend_cli.corpus.search_index import in_transaction

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cacheblend_cli.corpus.embedding import Embedder

LEAST_LIKE = 0.1
"""Cosine below which a text is not a hit."""
_BATCH = 1024
_CURRENT = "SELECT digest FROM embedder"
_PENDING = "SELECT rowid, title, body FROM chunks WHERE rowid IN (SELECT id FROM pending LIMIT ?)"
_SENTENCE = re.compile(r"(?<=[.!?\u3002])\s+|\n\s*\n|\n(?=[-*#|])")
_SHOWN = 90  # maximum characters of a sentence


def cosines(
    db: sqlite3.Connection, embedder: Embedder, vector: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return (ids of all searchable places, ascending; cosine of each chunk to `vector`), both [num_places].

    A chunk is embedded together with the title of its document. vector: [dim], of length 1.
    """
    import numpy as np

    while _embed_some(db, embedder):
        pass
    rows = db.execute("SELECT id, vector FROM vectors ORDER BY id").fetchall()
    vectors = np.frombuffer(b"".join(vector for _, vector in rows), dtype=np.float16).reshape(len(rows), len(vector))
    scores = vectors.astype(np.float32) @ vector
    return np.array([i for i, _ in rows], dtype=np.int64), scores.round(4)


def sentences_of(text: str) -> list[str]:
    """Split a text into sentences, headings and list items, each on one line."""
    return [one for part in _SENTENCE.split(text) if (one := " ".join(part.lstrip("#").split()))]


def telling_sentence(text: str, embedder: Embedder | None, vector: NDArray[np.float32] | None) -> str:
    """Return the sentence nearest to a vector [dim], on one line; without a vector, the first sentence."""
    sentences = sentences_of(text) or [""]
    best = 0
    if embedder is not None and vector is not None and len(sentences) > 1:
        best = int((embedder.embed(sentences) @ vector).argmax())
    return sentences[best] if len(sentences[best]) <= _SHOWN else sentences[best][:_SHOWN] + " ..."


def _embed_some(db: sqlite3.Connection, embedder: Embedder) -> bool:
    """Compute up to _BATCH missing vectors.

    If the weights changed, all are missing. Return False when none is missing.
    """
    import numpy as np

    own = (embedder.digest,)
    if db.execute(_CURRENT).fetchone() == own and db.execute("SELECT id FROM pending").fetchone() is None:
        return False
    with in_transaction(db):
        if db.execute(_CURRENT).fetchone() != own:
            db.execute("DELETE FROM vectors")
            db.execute("DELETE FROM embedder")
            db.execute("INSERT INTO embedder VALUES (?)", own)
            db.execute("INSERT OR IGNORE INTO pending SELECT rowid FROM chunks")
        rows = db.execute(_PENDING, (_BATCH,)).fetchall()
        if rows:
            vectors = embedder.embed([unspaced(f"{title}\n{body}") for _, title, body in rows]).astype(np.float16)
            pairs = [(i, vector.tobytes()) for (i, *_), vector in zip(rows, vectors, strict=True)]
            db.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", pairs)
            db.executemany("DELETE FROM pending WHERE id = ?", [(i,) for i, *_ in rows])
    return bool(rows)
