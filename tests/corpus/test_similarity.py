"""Similarity of texts depends only on the texts."""

from __future__ import annotations

import random

from cacheblend_cli.corpus.contexts import Neighbours, Passage, document_contexts
from cacheblend_cli.corpus.similarity import TfIdf

TEXTS = [
    "The billing team sends invoices on Monday.",
    "Invoices are paid by the billing team.",
    "Parrots live near the harbor.",
    "A parrot is a bird of the harbor town; parrots talk.",
    "Zzz.",
]


def test_texts_with_the_same_telling_words_are_near() -> None:
    index = TfIdf(TEXTS)
    assert index.nearest(0, 1) == [1]
    assert index.nearest(1, 1) == [0]
    assert index.nearest(3, 1) == [2]
    assert 2 in index.nearest(0, 9)  # by "the" alone, and after all that share more
    assert index.nearest(0, 9)[0] == 1
    assert index.nearest(4, 9) == []


def test_words_of_scripts_without_spaces() -> None:
    assert TfIdf(["東京の天気", "大阪の紅葉", "天気は晴れ"]).nearest(0, 1) == [2]


def test_equal_texts_come_in_order() -> None:
    assert TfIdf(["a b", "a c", "a c", "a c", "d"]).nearest(1, 2) == [2, 3]
    assert TfIdf(["a b", "a c", "a c", "a c", "d"]).nearest(3, 2) == [1, 2]


def passages() -> list[Passage]:
    return [Passage(text, tuple(text.encode())) for text in TEXTS]


def test_neighbours_depend_on_the_set_of_passages_alone() -> None:
    expected = [Neighbours(passages(), 2, 500).left(p.token_ids) for p in passages()]
    for seed in range(5):
        shuffled = passages() * 2
        random.Random(seed).shuffle(shuffled)
        found = Neighbours(shuffled, 2, 500)
        assert [found.left(p.token_ids) for p in passages()] == expected


def test_the_most_similar_stands_last_and_the_window_is_kept() -> None:
    own, best = passages()[0].token_ids, passages()[1].token_ids
    left = Neighbours(passages(), 2, 500).left(own)
    assert left[-len(best) :] == best
    assert len(left) > len(best)
    assert Neighbours(passages(), 2, len(own) + len(best)).left(own) == best
    assert len(Neighbours(passages(), 4, len(own) + len(best) - 1).left(own)) < len(best)
    assert Neighbours(passages(), 2, len(own)).left(own) == ()
    assert Neighbours(passages(), 2, 500).left(passages()[4].token_ids) == ()


def test_a_window_of_a_document_begins_anew_when_it_is_full() -> None:
    a, b, c, d = (1, 1), (2, 2, 2), (3,), (4,) * 9
    assert list(document_contexts([a, b, c, d], 6)) == [(), a, a + b, ()]
    assert list(document_contexts([a, b, c, d], 5)) == [(), a, (), ()]
