"""Left contexts: the token ids between the prefix and a chunk while it is collected.

| context      | left context                                                                                        |
|--------------|-----------------------------------------------------------------------------------------------------|
| `sink`       | nothing: only the prefix, which takes the attention that would go to a sequence's first tokens        |
| `document`   | the chunks before it in its document, from the beginning of a window on                               |
| `neighbours` | the chunks most similar to it, the most similar last (FusionRAG, arXiv 2601.12904, section 4)         |

FusionRAG finds its neighbours by an embedding model; here it is cosine over TF-IDF, which needs none. The left
context's ids are part of a chunk's key, so a chunk can be stored in several contexts side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cacheblend_cli.corpus.search import CONTEXTS
from cacheblend_cli.corpus.similarity import TfIdf

__all__ = ["CONTEXTS", "Ids", "Neighbours", "Passage", "document_contexts"]

Ids = tuple[int, ...]
_LOOKED_AT = 4  # candidates per neighbour, since some do not fit


def document_contexts(chunks: Iterable[Ids], window: int) -> list[Ids]:
    """Return the left context of each chunk of one document, in order. A chunk that does not fit the window starts a new one."""
    out: list[Ids] = []
    left: Ids = ()
    for ids in chunks:
        if len(left) + len(ids) > window:
            left = ()  # start a new window
        out.append(left)
        left += ids
    return out


@dataclass(frozen=True)
class Passage:
    """A chunk that can be a neighbour. Has no document name: a renamed document keeps its neighbours."""

    text: str
    token_ids: Ids


class Neighbours:
    """Left contexts made of similar passages. They depend on the set of passages alone, not on order or repetition."""

    def __init__(self, passages: Iterable[Passage], count: int, window: int) -> None:
        self._count, self._window = count, window
        self._passages: list[Passage] = []
        self._number: dict[Ids, int] = {}
        for passage in sorted(passages, key=lambda p: p.token_ids):
            if passage.token_ids not in self._number:  # a passage of several documents counts once
                self._number[passage.token_ids] = len(self._passages)
                self._passages.append(passage)
        self._similarity = TfIdf([p.text for p in self._passages])

    def left(self, token_ids: Ids) -> Ids:
        """Return the ids of up to `count` of the most similar passages that fit the window together with the chunk.

        token_ids: one of the passages. Empty if no passage is similar.
        """
        chosen: list[Ids] = []
        room = self._window - len(token_ids)
        for number in self._similarity.nearest(self._number[token_ids], _LOOKED_AT * self._count):
            ids = self._passages[number].token_ids
            if len(chosen) < self._count and len(ids) <= room:
                chosen.append(ids)
                room -= len(ids)
        return tuple(i for ids in reversed(chosen) for i in ids)
