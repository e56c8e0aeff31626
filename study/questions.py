"""Questions with their chunks: MuSiQue over four or all ten of its passages, the RAG inputs that CacheBlend's authors
published, RULER-like needles and variable tracking in passages of real text, passages cut into the paragraphs of a
page, an office's pages, and the demo's handbook."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from cacheblend_cli.evaluation.samples import Context, Sample, pages, read_samples

COLOURS = "amber azure coral crimson ivory jade lilac maroon ochre olive pearl ruby saffron silver teal umber".split()
ANIMALS = (
    "badger beaver bison camel crane dolphin falcon ferret gibbon heron ibex jackal koala lynx otter raven".split()
)
NAMES = "Alder Birch Cedar Dogwood Elder Fir Ginkgo Hazel Iris Juniper Larch Maple Nettle Oak Poplar Rowan".split()
NEEDLE_SETS, PER_CHUNK = 240, 2
HELD_OUT = Path(__file__).parents[1] / "tests/demo/heldout.jsonl"
PASSAGE_WORDS = 330
"""Words of real text in a chunk with needles: about 500 tokens."""


def spellable_samples() -> list[Sample]:
    """Return the held-out questions whose names the demo's model can spell; it misspells the others with any KV."""
    return [s for s in read_samples(HELD_OUT) if s.tags["names"] == "known"]


@cache
def all_passages(data: Path) -> tuple[Sample, ...]:
    """Return MuSiQue's questions over all ten of their passages."""
    return tuple(read_samples(data / "musique_dev.json"))


def musique(data: Path, passages: int) -> list[Sample]:
    """Questions over their first passages; behind these over the next and the last ones, from the second question on: a
    question's place is odd in every round, or even in every round."""
    samples = all_passages(data)
    first = [replace(s, contexts=s.contexts[:passages]) for s in samples]
    if len(samples) % 2 == 0:
        samples = samples[:-1]
    next_ones = [replace(s, contexts=s.contexts[passages : 2 * passages]) for s in samples[1:]]
    last_ones = [replace(s, contexts=s.contexts[-passages:]) for s in samples[1:]]
    return [*first[: len(samples)], *next_ones, *last_ones]


def paged_passages(data: Path) -> list[Sample]:
    """Return each question over two pages of four paragraphs."""
    return [_paged(sample, 2, 4) for sample in all_passages(data)]


def pairs(data: Path, words: int = 150) -> list[Sample]:
    """Return each question over the beginnings of four passages. Collected with document context, the second one is
    behind the first, and exact in the prompt."""
    samples = []
    for sample in all_passages(data):
        first, second, *others = (" ".join(context.text.split()[:words]) + "\n\n" for context in sample.contexts[:4])
        samples.append(
            replace(sample, contexts=(Context(first), Context(second, before=(first,)), *map(Context, others)))
        )
    return samples


def rag(data: Path) -> list[Sample]:
    """Return the RAG inputs that CacheBlend's authors published."""
    return [s for path in sorted((data / "rag").glob("*.json")) for s in read_samples(path)]


def office_data() -> dict[str, Any]:
    """Return the office's pages, and its questions as [question, answer, page]."""
    data: dict[str, Any] = json.loads((Path(__file__).parent / "office.json").read_text(encoding="utf-8"))
    return data


def office(orders: int = 2, seed: int = 0) -> list[Sample]:
    """Return questions about ten pages of an office, each over all pages in some order, every page a chunk collected
    alone."""
    data = office_data()
    texts, rng, samples = [page + "\n" for page in data["pages"].values()], random.Random(seed), []
    for question, answer, _ in data["questions"] * orders:
        contexts = tuple(map(Context, rng.sample(texts, len(texts))))
        samples.append(Sample(question, (answer,), contexts))
    return samples


def layouts(seed: int = 0) -> dict[str, list[Sample]]:
    """Return the handbook's questions with their chunks as collected, shuffled, and without the first chunk of each
    page. A question is not in the last layout if its answer is in a page's first chunk (tag "across") or no chunk would
    be left."""
    rng, samples = random.Random(seed), spellable_samples()
    shuffled = [replace(s, contexts=tuple(rng.sample(s.contexts, len(s.contexts)))) for s in samples]
    headless = [
        replace(s, contexts=later)
        for s in samples
        if s.tags.get("across", True) and (later := tuple(c for c in s.contexts if c.before))
    ]
    return {"pages": list(samples), "shuffled": shuffled, "headless": headless}


@cache
def filler(data: Path) -> tuple[str, ...]:
    """Sentences of all passages, without very short and very long ones."""
    texts = dict.fromkeys(context.text for sample in all_passages(data) for context in sample.contexts)
    found = (s.strip() for text in texts for s in re.split(r"(?<=[.?!]) ", text))
    return tuple(s for s in found if 5 <= len(s.split()) <= 60)


def needles(filler: Sequence[str], chunks: int, seed: int = 0, words: int = PASSAGE_WORDS) -> list[Sample]:
    """Make questions for one of many access codes, two in every chunk."""
    samples = []
    for number in range(NEEDLE_SETS):
        rng = random.Random(f"{seed}-{number}")
        things = rng.sample([f"{c} {a}" for c in COLOURS for a in ANIMALS], chunks * PER_CHUNK)
        codes = [str(rng.randrange(100_000, 1_000_000)) for _ in things]
        sentences = [f"The access code of the {t} is {code}." for t, code in zip(things, codes, strict=True)]
        own = (sentences[i * PER_CHUNK : (i + 1) * PER_CHUNK] for i in range(chunks))
        texts = [_strewn(filler, of_chunk, rng, words) for of_chunk in own]
        target = rng.randrange(PER_CHUNK, len(things))  # the first chunk is exact in any case
        question = f"What is the access code of the {things[target]}? Answer with the number only."
        samples.append(Sample(question, (codes[target],), tuple(Context(text) for text in texts)))
    return samples


def tracking(filler: Sequence[str], chunks: int, seed: int = 1) -> list[Sample]:
    """Make questions for a value that is assigned over a chain of three names, each link in another chunk, beside two
    other chains (RULER's variable tracking)."""
    samples = []
    for number in range(NEEDLE_SETS):
        rng = random.Random(f"{seed}-{number}")
        names = rng.sample(NAMES, 9)
        by_chunk: list[list[str]] = [[] for _ in range(chunks)]
        values = []
        for chain in (names[:3], names[3:6], names[6:]):
            values.append(str(rng.randrange(10_000, 100_000)))
            links = [f"{chain[0]} has the value {values[-1]}."]
            links += [f"{after} has the same value as {before}." for before, after in pairwise(chain)]
            for place, sentence in zip(sorted(rng.sample(range(chunks), len(links))), links, strict=True):
                by_chunk[place].append(sentence)
        texts = [_strewn(filler, sentences, rng) for sentences in by_chunk]
        question = f"Which value does {names[2]} have? Answer with the number only."
        samples.append(Sample(question, (values[0],), tuple(Context(text) for text in texts)))
    return samples


def _strewn(filler: Sequence[str], sentences: Sequence[str], rng: random.Random, words: int = PASSAGE_WORDS) -> str:
    """Return a passage of real sentences with the given ones at random places."""
    at, passage = rng.randrange(len(filler)), []
    while sum(len(sentence.split()) for sentence in passage) < words:
        passage.append(filler[at % len(filler)])
        at += 1
    for sentence in sentences:
        passage.insert(rng.randrange(1, len(passage)), sentence)
    return " ".join(passage) + "\n\n"


def _paged(sample: Sample, num_pages: int, paragraphs: int) -> Sample:
    """Cut the first passages into pages of paragraphs of similar length, at sentence ends."""
    titles, texts = [], []
    for number, context in enumerate(sample.contexts[:num_pages]):
        sentences = re.split(r"(?<=[.?!] )", context.text)
        size, parts = len(context.text) / paragraphs, [""]
        for sentence in sentences:
            if len(parts[-1]) >= size and len(parts) < paragraphs:
                parts.append("")
            parts[-1] += sentence
        texts += [*(part for part in parts[:-1]), parts[-1] + "\n\n"]
        titles += [f"page {number + 1}"] * len(parts)
    return Sample(sample.question, sample.answers, pages(titles, texts), sample.tags)
