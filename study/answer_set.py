"""The set `answers`: 200 questions with short answers, over prompts of 300 to 1,000 tokens, each chunk collected alone.

| part | questions | text |
|---|---|---|
| `hops` | 80 of single_hops.jsonl, one fact each | four of an item's passages in MuSiQue, cut to 150 words |
| `office` | 18 of office.json, twice | five of its ten pages, the answer's among them, in two orders |
| `needles` | 44 access codes | four passages of real sentences with two codes each |
| `records` | 40 of the demo's held-out questions | the pages of four people, each a chunk |
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import questions

from cacheblend_cli.evaluation.samples import Context, Sample, read_samples

STUDY = Path(__file__).parent
SHORT = "Answer with the name, number or words only."
WORDS, PASSAGES, PAGES = 150, 4, 5
NEEDLES, RECORDS = 44, 40


def answer_samples(data: Path) -> list[Sample]:
    """Return the questions of all parts, each with its part as a tag. Parts are interleaved, so that the first n
    questions have about the same shares of them."""
    parts = {"hops": [*hops(data)], "office": [*office()], "needles": needles(data), "records": [*records()]}
    placed = [
        ((number + 0.5) / len(samples), replace(sample, question=_short(sample.question), tags={"part": part}))
        for part, samples in parts.items()
        for number, sample in enumerate(samples)
    ]
    return [sample for _, sample in sorted(placed, key=lambda pair: pair[0])]


def _short(question: str) -> str:
    return question if question.endswith(" only.") else f"{question} {SHORT}"


def hops(data: Path) -> Iterator[Sample]:
    """Yield questions about one passage among four, as far as the data's passages have the answers."""
    items = read_samples(data / "musique_dev.json")
    for line in (STUDY / "single_hops.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        texts = [c.text for item in items[row["item"] :][:1] for c in item.contexts[:PASSAGES]]
        if row["passage"] >= len(texts) or row["answer"] not in texts[row["passage"]].lower():
            continue
        answers = [row["answer"] if place == row["passage"] else "" for place in range(PASSAGES)]
        contexts = [Context(_around(*pair) + "\n\n") for pair in zip(texts, answers, strict=True)]
        yield Sample(row["question"], (row["answer"],), tuple(contexts))


def _around(text: str, answer: str) -> str:
    """Return the passage's first 150 words, or as many with the answer in the middle."""
    words = text.split()
    before = len(text[: text.lower().index(answer)].split())
    start = max(0, min(before - WORDS // 2, len(words) - WORDS))
    return " ".join(words[start : start + WORDS])


def office(orders: int = 2) -> Iterator[Sample]:
    """Yield the office's questions over its page and four others."""
    data = questions.office_data()
    for order in range(orders):
        for question, answer, page in data["questions"]:
            rng = random.Random(f"{order} {question}")
            names = [page, *rng.sample([name for name in data["pages"] if name != page], PAGES - 1)]
            rng.shuffle(names)
            yield Sample(question, (answer,), tuple(Context(data["pages"][name] + "\n") for name in names))


def needles(data: Path) -> list[Sample]:
    """Return questions for access codes in passages of 150 words."""
    return questions.needles(questions.filler(data), PASSAGES, seed=2, words=WORDS)[:NEEDLES]


def records() -> Iterator[Sample]:
    """Yield held-out questions about the demo's people, with the value alone as the answer."""
    samples = questions.spellable_samples()
    for sample in samples[:: len(samples) // RECORDS][:RECORDS]:
        [sentence] = sample.answers
        value = sentence.rstrip(".").partition(" is ")[2]
        yield Sample(sample.question, (value,), tuple(_pages(sample.contexts)))


def _pages(contexts: Sequence[Context]) -> Iterator[Context]:
    """Join the chunks of each page: a title begins the next."""
    starts = [place for place, context in enumerate(contexts) if context.text.startswith("# ")]
    for start, end in pairwise([*starts, len(contexts)]):
        yield Context("".join(context.text for context in contexts[start:end]) + "\n")
