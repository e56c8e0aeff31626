"""The questions of docs/fidelity.md: real text, as chunks of different documents and as chunks of one page.

Each set is a list of samples whose even places are for choosing and fitting and whose odd places are what is reported.

| set | chunks | prompt |
|---|---|---|
| musique | four of a MuSiQue question's ten passages, some 400 words each, put together from other articles each | 2k |
| musique-10 | all ten | 6k |
| rag | the RAG inputs that CacheBlend's authors published | 3k |
| needles-2k, needles-7k | passages of real text, with two codes said in each; the question asks for one (RULER's multi-key needles, arXiv 2404.06654) | 2k, 7k |
| tracking-2k, tracking-7k | passages with names that are given the value of another; the question asks for the last one's (RULER's variable tracking) | 2k, 7k |
| pages | two passages, each a page of four paragraphs in order | 1k |
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from cacheblend_cli.evaluation.samples import Context, Sample, pages, read_samples

COLOURS = "amber azure coral crimson ivory jade lilac maroon ochre olive pearl ruby saffron silver teal umber".split()
ANIMALS = (
    "badger beaver bison camel crane dolphin falcon ferret gibbon heron ibex jackal koala lynx otter raven".split()
)
NAMES = "Alder Birch Cedar Dogwood Elder Fir Ginkgo Hazel Iris Juniper Larch Maple Nettle Oak Poplar Rowan".split()
NEEDLE_SETS, PER_CHUNK = 40, 2
PASSAGE_WORDS = 330
"""Of real text in a chunk that gets needles: some 500 tokens."""


def read_sets(folder: Path) -> dict[str, Callable[[], list[Sample]]]:
    """What can be made of a folder with musique_dev.json (a list of {"question", "answers", "ctxs"}) and rag/*.json."""
    musique = read_samples(folder / "musique_dev.json")
    filler = _sentences(musique)
    return {
        "musique": lambda: [_first(sample, 4) for sample in musique],
        "needles-2k": lambda: needles(filler, chunks=4),
        "pages": lambda: [_paged(sample, 2, 4) for sample in musique],
        "tracking-2k": lambda: tracking(filler, chunks=4),
        "needles-7k": lambda: needles(filler, chunks=13),
        "musique-10": lambda: musique,
        "rag": lambda: [s for path in sorted((folder / "rag").glob("*.json")) for s in read_samples(path)],
        "tracking-7k": lambda: tracking(filler, chunks=13),
    }


def needles(filler: Sequence[str], chunks: int, seed: int = 0) -> list[Sample]:
    """Codes of coloured animals, two in every chunk; one is asked for."""
    samples = []
    for number in range(NEEDLE_SETS):
        rng = random.Random(f"{seed}-{number}")
        things = rng.sample([f"{c} {a}" for c in COLOURS for a in ANIMALS], chunks * PER_CHUNK)
        codes = [str(rng.randrange(100_000, 1_000_000)) for _ in things]
        said = [f"The access code of the {t} is {code}." for t, code in zip(things, codes, strict=True)]
        texts = [_strewn(filler, said[i * PER_CHUNK : (i + 1) * PER_CHUNK], rng) for i in range(chunks)]
        asked = rng.randrange(PER_CHUNK, len(things))  # the first chunk is exact in any case
        question = f"What is the access code of the {things[asked]}? Answer with the number only."
        samples.append(Sample(question, (codes[asked],), tuple(Context(text) for text in texts)))
    return samples


def tracking(filler: Sequence[str], chunks: int, seed: int = 1) -> list[Sample]:
    """A name gets a number, another the number of the first, a third that of the second: each said in another chunk, beside
    two such chains that are not asked for."""
    samples = []
    for number in range(NEEDLE_SETS):
        rng = random.Random(f"{seed}-{number}")
        names = rng.sample(NAMES, 9)
        said: list[list[str]] = [[] for _ in range(chunks)]
        values = []
        for chain in (names[:3], names[3:6], names[6:]):
            values.append(str(rng.randrange(10_000, 100_000)))
            told = [f"{chain[0]} has the value {values[-1]}."]
            told += [f"{after} has the same value as {before}." for before, after in pairwise(chain)]
            for place, sentence in zip(sorted(rng.sample(range(chunks), len(told))), told, strict=True):
                said[place].append(sentence)
        texts = [_strewn(filler, sentences, rng) for sentences in said]
        question = f"Which value does {names[2]} have? Answer with the number only."
        samples.append(Sample(question, (values[0],), tuple(Context(text) for text in texts)))
    return samples


def _strewn(filler: Sequence[str], said: Sequence[str], rng: random.Random) -> str:
    """A passage of real sentences with those said at random places."""
    at, passage = rng.randrange(len(filler)), []
    while sum(len(sentence.split()) for sentence in passage) < PASSAGE_WORDS:
        passage.append(filler[at % len(filler)])
        at += 1
    for sentence in said:
        passage.insert(rng.randrange(1, len(passage)), sentence)
    return " ".join(passage) + "\n\n"


def _sentences(samples: Sequence[Sample]) -> list[str]:
    """Of all passages, without those that are very short or long."""
    texts = dict.fromkeys(context.text for sample in samples for context in sample.contexts)
    found = (s.strip() for text in texts for s in re.split(r"(?<=[.?!]) ", text))
    return [s for s in found if 5 <= len(s.split()) <= 60]


def _first(sample: Sample, count: int) -> Sample:
    return Sample(sample.question, sample.answers, sample.contexts[:count], sample.tags)


def _paged(sample: Sample, num_pages: int, paragraphs: int) -> Sample:
    """Its first passages as pages, each cut at sentences into paragraphs of much the same length."""
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
