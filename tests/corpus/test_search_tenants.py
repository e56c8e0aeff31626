"""Scores of a tenant's search say nothing about other tenants' documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bare_store import bare_writing
from cacheblend_store import ChunkStore
from stored_texts import forget, put_document

from cacheblend_cli.corpus.embedding import Embedder
from cacheblend_cli.corpus.search import Lookup, SearchResult, search

QUERY = "walrus titanium meeting"


class Letters:
    """Embeds a text as the counts of its letters."""

    embedding = np.ones(26, dtype=np.float32)

    def encode(self, texts: list[str], max_length: int) -> np.ndarray:
        return np.array([[text.lower().count(chr(97 + i)) for i in range(26)] for text in texts], dtype=np.float32)


LOOKUPS = [
    Lookup(9, by=by, embedder=None if by == "words" else Embedder("letters", Letters()), expand=1)
    for by in ("words", "meaning", "both")
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store", mode="write") as opened:
        put_document(opened, "(put)/bob/probe", "The walrus has a meeting at noon.\n", collection="bob")
        put_document(opened, "/shared/a.md", "Meetings are short.\n", "No walruses here.\n", collection="bob")
        yield opened


def bobs(store: ChunkStore, how: Lookup) -> SearchResult:
    return search(store, QUERY, how, ["bob"])


@pytest.mark.parametrize("how", LOOKUPS, ids=lambda how: how.by)
def test_results_are_the_same_to_the_last_digit_whatever_others_store(store: ChunkStore, how: Lookup) -> None:
    before = bobs(store, how)
    assert len(before.hits) == 3
    for i in range(60):  # more than either ranking looks at, and all better matches
        put_document(store, f"(put)/alice/{i}", f"Titanium walrus titanium meeting {i}.\n", collection="alice")
    put_document(store, "/shared/a.md", "# Titanium walrus meeting\n\n", "Titanium.\n", collection="alice")
    assert bobs(store, how) == before
    forget(store, "alice", "/shared/a.md")
    assert bobs(store, how) == before
    assert len(search(store, QUERY, replace(how, k=99)).hits) > 60, "the operator searches all"


def test_damage_of_others_is_not_counted(store: ChunkStore) -> None:
    [key] = put_document(store, "(put)/alice/a", "The walrus is mine.\n", collection="alice")
    with bare_writing(store) as (transaction, dbs):
        transaction.put(bytes.fromhex(key), b"damaged", db=dbs["chunks"])
    counts = [search(store, QUERY, Lookup(9), names).num_damaged for names in (["bob"], ["alice"], None)]
    assert counts == [0, 1, 1]


def test_only_own_texts_are_embedded(store: ChunkStore) -> None:
    put_document(store, "(put)/alice/a", "The walrus is mine.\n", collection="alice")
    embedded = list[str]()

    class Noted(Letters):
        def encode(self, texts: list[str], max_length: int) -> np.ndarray:
            embedded.extend(texts)
            return super().encode(texts, max_length)

    how = Lookup(9, by="meaning", embedder=Embedder("noted", Noted()))
    bobs(store, how)
    assert not any("mine" in text for text in embedded)
    search(store, QUERY, how, ["alice"])
    assert sum("mine" in text for text in embedded) > 0


def test_frequencies_are_those_of_the_text(store: ChunkStore) -> None:
    """BM25 by hand: frequency 3 in the body, 1 in the title, 1 in the path."""
    put_document(store, "/docs/otter.md", "otter otter, Otters swim.\n", "Nothing.\n", collection="carol")
    [hit, *_] = search(store, "otter", Lookup(9), ["carol"]).hits
    frequency, lengths = 3 + 2 + 0.5, (3 + 1 + 4, 3 + 1 + 1)  # path: docs, otter, md
    idf = np.log1p((2 - 2 + 0.5) / 2.5)
    wanted = idf * frequency * 2.2 / (frequency + 1.2 * (0.25 + 0.75 * lengths[0] / (sum(lengths) / 2)))
    assert hit.score == pytest.approx(wanted, rel=1e-12)
