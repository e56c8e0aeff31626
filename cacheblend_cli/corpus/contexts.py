"""Left contexts: the token ids between the prefix and a chunk while its KV is computed.

| context      | left context                                                                                        |
|--------------|-----------------------------------------------------------------------------------------------------|
| `sink`       | empty: only the prefix comes before the chunk, and takes the attention of the first tokens            |
| `document`   | the preceding chunks of its document, from the start of a window                                      |
| `neighbours` | the most similar chunks, most similar last (FusionRAG, arXiv 2601.12904, section 4)                   |

FusionRAG finds neighbours with an embedding model. We use cosine over TF-IDF, which needs no model. The ids of the left
context are part of the chunk key, so a chunk can be stored in several contexts side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Ids = tuple[int, ...]
_LOOKED_AT = 4  # candidates per neighbour, because some do not fit the window


def document_contexts(chunks: Iterable[Ids], window: int) -> Iterator[Ids]:
    """Yield the left context of each chunk of one document, in order.

    A chunk that does not fit the window starts a new one.
    """
    left: Ids = ()
    for ids in chunks:
        if len(left) + len(ids) > window:
            left = ()  # start a new window
        yield left
        left += ids


@dataclass(frozen=True)
class Passage:
    """A candidate neighbour. It has no document name, so renaming a document does not change neighbours."""

    text: str
    token_ids: Ids


class Neighbours:
    """Left contexts of similar passages. They depend only on the set of passages, not on order or repetition."""

    def __init__(self, passages: Iterable[Passage], count: int, window: int) -> None:
        self._count, self._window = count, window
        self._passages: list[Passage] = []
        self._number: dict[Ids, int] = {}
        for passage in sorted(passages, key=lambda p: p.token_ids):
            if passage.token_ids not in self._number:  # a passage of several documents counts once
                self._number[passage.token_ids] = len(self._passages)
                self._passages.append(passage)
        from cacheblend_cli.corpus.similarity import TfIdf  # imports numpy

        self._similarity = TfIdf([p.text for p in self._passages])

    def left(self, token_ids: Ids) -> Ids:
        """Return the ids of up to `count` most similar passages that fit the window together with the chunk.

        token_ids: ids of one of the passages. The result is empty if no passage is similar.
        """
        chosen: list[Ids] = []
        room = self._window - len(token_ids)
        for number in self._similarity.nearest(self._number[token_ids], _LOOKED_AT * self._count):
            ids = self._passages[number].token_ids
            if len(chosen) < self._count and len(ids) <= room:
                chosen.append(ids)
                room -= len(ids)
        return tuple(i for ids in reversed(chosen) for i in ids)
