"""The sets of the study: questions with their chunks, the settings that are measured on them, and what is measured.

MuSiQue questions over four or all ten of their passages, the RAG inputs that CacheBlend's authors published, RULER-like
needles and variable tracking in passages of real text, passages cut into the paragraphs of a page, and the questions of
the demo's handbook. Questions in even places of a set are for choosing and fitting ("fit"), those in odd places for
results ("test").
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from settings import (
    answer_settings,
    context_settings,
    handbook_settings,
    leading_settings,
    wide_settings,
)

from cacheblend_cli.demo import model_dir
from cacheblend_cli.evaluation.samples import Context, Sample, pages, read_samples
from cacheblend_cli.evaluation.settings import Setting

STUDY = Path(__file__).parent
REAL = ("kl", "kl_median", "kl_p90", "top1", "same_answer", "found", "likelihood", "less_default")
HANDBOOK = ("exact_match", "f1", "norm_f1", "top1", "kl", "k_error")
LAYOUT = ("exact_match", "f1", "f1_difference", "kl", "same_answer")
MAIN = ("kl", "kl_median", "kl_p90", "top1", "same_start", "less_default")
"""Of --main: no setting answers on its own, which would take half of the time."""
ANSWERS = ("f1", "found", "exact_match", "f1_difference", "same_answer", "kl", "kl_median")
ANSWERED: dict[str, Any] = {
    "measures": ANSWERS, "tokens": 32, "own_tokens": 32, "answerable": True, "keeps_settings": True,
}  # fmt: skip
WHOLE: dict[str, Any] = {
    "measures": (
        "exact_match", "f1", "f1_difference", "found", "found_difference", "same_answer", "unsupported", "kl", "kl_median",
    ),
    "tokens": 24,
    "own_tokens": 24,
    "keeps_settings": True,
    "by_part": True,
}  # fmt: skip
COLOURS = "amber azure coral crimson ivory jade lilac maroon ochre olive pearl ruby saffron silver teal umber".split()
ANIMALS = (
    "badger beaver bison camel crane dolphin falcon ferret gibbon heron ibex jackal koala lynx otter raven".split()
)
NAMES = "Alder Birch Cedar Dogwood Elder Fir Ginkgo Hazel Iris Juniper Larch Maple Nettle Oak Poplar Rowan".split()
NEEDLE_SETS, PER_CHUNK = 240, 2
PASSAGE_WORDS = 330
"""Words of real text in a chunk with needles: about 500 tokens."""


def spellable_samples() -> list[Sample]:
    """Return the held-out questions whose names the demo's model can spell; it misspells the others with any KV."""
    return [s for s in read_samples(model_dir().with_name("heldout.jsonl")) if s.tags["names"] == "known"]


@dataclass(frozen=True)
class StudySet:
    """One set. samples: of a data folder, in order. questions: how many are measured by default. halves: whether odd
    and even places are told apart. tokens: of full prefill's answer, over which distributions are compared; own_tokens:
    of a setting's own answer. measures: fields of a result row. context: of chunks under --main. answerable: results
    are over the questions that full prefill answers at least in part. keeps_settings: --main does not change it.
    by_part: answers end at their first line, and are scored for each value of the tag "part", too."""

    samples: Callable[[Path | None], list[Sample]]
    settings: Callable[[], list[Setting]]
    questions: int
    measures: tuple[str, ...] = REAL
    model: str = "smollm2"
    tokens: int = 64
    own_tokens: int = 16
    halves: bool = True
    needs_data: bool = True
    context: str = "sink"
    answerable: bool = False
    keeps_settings: bool = False
    by_part: bool = False

    def for_main(self) -> StudySet:
        """Return the set as --main measures it: full prefill's answers only. Sets of answers stay as they are."""
        return self if self.keeps_settings else replace(self, own_tokens=1, measures=MAIN)


def study_sets() -> dict[str, StudySet]:
    """Return every set by name, in the order in which they are measured."""
    real = {
        "musique": StudySet(lambda data: musique(data, 4), wide_settings, 12),
        "needles-2k": StudySet(lambda data: needles(filler(data), 4), leading_settings, 8),
        "pages": StudySet(_all_pages, lambda: leading_settings("document"), 8, context="document"),
        "tracking-2k": StudySet(lambda data: tracking(filler(data), 4), leading_settings, 6),
        "needles-7k": StudySet(lambda data: needles(filler(data), 13), leading_settings, 3),
        "musique-10": StudySet(lambda data: list(_musique(data)), leading_settings, 7),
        "rag": StudySet(_rag, leading_settings, 2),
        "tracking-7k": StudySet(lambda data: tracking(filler(data), 13), leading_settings, 1),
    }
    answers = {
        "office": StudySet(lambda _: office(), answer_settings, 36, halves=False, needs_data=False, **ANSWERED),
        "answers": StudySet(_short_answers, answer_settings, 200, halves=False, **WHOLE),
    }
    handbook = {
        "handbook": StudySet(lambda _: spellable_samples(), handbook_settings, 520, HANDBOOK),
        **{
            f"handbook-{name}": StudySet(lambda _, name=name: layouts()[name], context_settings, 520, LAYOUT)
            for name in ("pages", "shuffled", "headless")
        },
    }
    own = {"model": "handbook", "tokens": 24, "own_tokens": 24, "halves": False, "needs_data": False}
    return real | answers | {name: replace(found, **own) for name, found in handbook.items()}


@cache
def _musique(data: Path) -> tuple[Sample, ...]:
    return tuple(read_samples(data / "musique_dev.json"))


def musique(data: Path, passages: int) -> list[Sample]:
    """Questions over their first passages; behind these over the next and the last ones, from the second question on: a
    question's place is odd in every round, or even in every round."""
    samples = _musique(data)
    first = [replace(s, contexts=s.contexts[:passages]) for s in samples]
    if len(samples) % 2 == 0:
        samples = samples[:-1]
    next_ones = [replace(s, contexts=s.contexts[passages : 2 * passages]) for s in samples[1:]]
    last_ones = [replace(s, contexts=s.contexts[-passages:]) for s in samples[1:]]
    return [*first[: len(samples)], *next_ones, *last_ones]


def _all_pages(data: Path) -> list[Sample]:
    return [_paged(sample, 2, 4) for sample in _musique(data)]


def _rag(data: Path) -> list[Sample]:
    return [s for path in sorted((data / "rag").glob("*.json")) for s in read_samples(path)]


def _short_answers(data: Path) -> list[Sample]:
    from answer_set import answer_samples

    return answer_samples(data)


def office(orders: int = 2, seed: int = 0) -> list[Sample]:
    """Return questions about ten pages of an office, each over all pages in some order, every page a chunk collected
    alone."""
    data = json.loads((STUDY / "office.json").read_text(encoding="utf-8"))
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
    texts = dict.fromkeys(context.text for sample in _musique(data) for context in sample.contexts)
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
