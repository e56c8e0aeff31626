"""Similar texts, by cosine over TF-IDF."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

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
