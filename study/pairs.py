"""How often two retrieved chunks are a pair of which the second was collected behind the first, if each chunk is also
collected behind its m most similar ones. Needs no model.

    python study/pairs.py --data FOLDER --out study/results/pairs.json

Each passage of MuSiQue (150 words, about 200 tokens) and each page of the office is a document of one chunk, as in
own_ratio.py; prompts are the five chunks that a search finds. likeness: the chunk before is one of the m nearest by
TF-IDF, as in --context neighbours, or by `search` with the chunk as the question. leading: the first two hits are a
pair as they stand. any: some two of the five hits are, so that they could be put first.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

from cacheblend_store import ChunkStore
from results import write_result
from search_recall import Corpus, colloquial, fill, office_data
from sets import musique

from cacheblend_cli.corpus.contexts import TfIdf
from cacheblend_cli.corpus.embedding import find_embedder
from cacheblend_cli.corpus.search import Lookup, search
from cacheblend_cli.evaluation.samples import Context, Sample

HITS, WORDS = 5, 150
NEIGHBOURS = (1, 2, 3)
Near = Callable[[str], list[str]]
"""Returns the names of the documents most similar to one, most similar first."""


def cut(text: str) -> str:
    return " ".join(text.split()[:WORDS])


def corpus_of(samples: Sequence[Sample], passages: int) -> Corpus:
    """Return the first passages of the samples, each a document."""
    texts = dict.fromkeys(cut(context.text) for sample in samples for context in sample.contexts[:passages])
    return {f"/musique/{number:03}": [text] for number, text in enumerate(texts)}


def corpora(data: Path) -> dict[str, tuple[Corpus, list[str]]]:
    """Return documents and questions, by name."""
    samples = musique(data, 10)[:75]
    asked, pages = [s.question for s in samples], office_data()
    office = {f"/office/{name}": [text] for name, text in pages["pages"].items()}
    office_asked = [question for question, *_ in pages["questions"]] + [question for question, _ in colloquial()]
    held = samples[1::2][:12]
    return {
        "musique, 12 questions with 2 passages each": (corpus_of(held, 2), [s.question for s in held]),
        "musique, 75 questions with 2 passages each": (corpus_of(samples, 2), asked),
        "musique, 75 questions with 10 passages each": (corpus_of(samples, 10), asked),
        "office": (office, office_asked),
    }


def by_terms(corpus: Corpus) -> Near:
    """Return likeness by TF-IDF."""
    names = sorted(corpus)
    similarity = TfIdf([corpus[name][0] for name in names])
    return lambda name: [names[i] for i in similarity.nearest(names.index(name), max(NEIGHBOURS))]


def by_search(store: ChunkStore, corpus: Corpus, by: str, embedder: Any) -> Near:
    """Return likeness by a search with the chunk's text."""
    lookup = Lookup(max(NEIGHBOURS) + 1, by=by, embedder=embedder)

    def near(name: str) -> list[str]:
        hits = search(store, corpus[name][0], lookup).hits
        return [hit.source for hit in hits if hit.source != name][: max(NEIGHBOURS)]

    return near


def measure(corpus: Corpus, questions: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per search, likeness and number of neighbours."""
    rows, embedder = list[dict[str, Any]](), find_embedder("")
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(Path(folder) / "store", mode="write") as store:
        fill(store, corpus)
        ways = {"terms": by_terms(corpus), "search": by_search(store, corpus, "words", None)}
        if embedder is not None:
            ways["meaning"] = by_search(store, corpus, "meaning", embedder)
        nearest = {way: {name: near(name) for name in corpus} for way, near in ways.items()}
        for by in ("words", "both"):
            lookup = Lookup(HITS, by=by, embedder=embedder)
            found = [[hit.source for hit in search(store, question, lookup).hits] for question in questions]
            for way, near in nearest.items():
                rows += [{"search": by, "likeness": way, **counted(found, near, m)} for m in NEIGHBOURS]
    return rows


def counted(found: Sequence[Sequence[str]], near: dict[str, list[str]], m: int) -> dict[str, Any]:
    """Return how many prompts have a pair. near: most similar documents of each, which are collected before it."""

    def is_pair(first: str, second: str) -> bool:
        return first in near[second][:m]

    leading = sum(len(hits) > 1 and is_pair(*hits[:2]) for hits in found)
    some = sum(any(is_pair(a, b) for a, b in permutations(hits, 2)) for hits in found)
    best = sum(any(is_pair(hits[0], b) for b in hits[1:]) for hits in found)
    return {"m": m, "prompts": len(found), "leading": leading, "behind_the_best": best, "any": some}


def found_samples(data: Path, paired: bool) -> list[Sample]:
    """Return MuSiQue's questions over the five hits of a search by words among all passages. paired: only questions
    with a pair (m 1, by TF-IDF) among them, the one whose hits are best first; else all, in the order of the hits."""
    samples, found = musique(data, 10)[:75], list[Sample]()
    corpus = corpus_of(samples, 10)
    near, lookup = by_terms(corpus), Lookup(HITS, by="words")
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(Path(folder) / "store", mode="write") as store:
        fill(store, corpus)
        for sample in samples:
            hits = [hit.source for hit in search(store, sample.question, lookup).hits]
            pairs = [pair for pair in permutations(hits, 2) if pair[0] in near(pair[1])[:1]]
            first = min(pairs, key=lambda pair: sum(map(hits.index, pair)), default=())
            if paired:
                hits = [*first, *(hit for hit in hits if hit not in first)] if first else []
            found.append(replace(sample, contexts=tuple(Context(corpus[hit][0] + "\n\n") for hit in hits)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with musique_dev.json")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = list[dict[str, Any]]()
    for name, (corpus, questions) in corpora(arguments.data).items():
        rows += [{"text": name, "chunks": len(corpus), **row} for row in measure(corpus, questions)]
    write_result(arguments.out, {"hits": HITS, "words": WORDS, "rows": rows})
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
