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

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cacheblend_cli.corpus.normalise import search_words

_MOST_TERMS = 32  # highest-weighted terms of a text to compare
_DIGITS = 9  # decimal digits of a score, so that rounding errors cannot reorder equal texts


class TfIdf:
    """TF-IDF vectors of length 1; weight (1 + log tf) * log((1 + N) / df) (Salton and Buckley, 1988).

    They are the same for the same texts in the same order.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(word.lower() for word, _ in search_words(text)) for text in texts]
        texts_of: dict[str, array[int]] = {}
        tf_of: dict[str, array[float]] = {}
        for number, found in enumerate(counts):
            for term, count in found.items():
                texts_of.setdefault(term, array("q")).append(number)
                tf_of.setdefault(term, array("d")).append(count)
        self._postings: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        squares = np.zeros(len(texts))
        for term, numbers in texts_of.items():
            index = np.frombuffer(numbers, dtype=np.int64)
            weight = (1 + np.log(np.frombuffer(tf_of[term]))) * np.log((1 + len(texts)) / len(index))
            squares[index] += weight**2
            self._postings[term] = index, weight
        norm = np.sqrt(squares)
        for index, weight in self._postings.values():
            weight /= norm[index]
        self._terms = [sorted(found) for found in counts]

    def nearest(self, number: int, most: int) -> list[int]:
        """Return up to `most` other texts that share a weighted term, most similar first; ties in order."""
        own: list[tuple[float, str]] = []
        for term in self._terms[number]:
            index, weight = self._postings[term]
            own.append((float(weight[np.searchsorted(index, number)]), term))
        own.sort(key=lambda pair: (-round(pair[0], _DIGITS), pair[1]))
        scores = np.zeros(len(self._terms))
        for value, term in own[:_MOST_TERMS]:
            index, weight = self._postings[term]
            scores[index] += value * weight
        scores = scores.round(_DIGITS)
        scores[number] = 0
        alike = np.flatnonzero(scores)
        if len(alike) > most > 0:
            alike = alike[scores[alike] >= np.partition(scores[alike], -most)[-most]]
        return [int(i) for i in alike[np.argsort(-scores[alike], kind="stable")][:most]]


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
