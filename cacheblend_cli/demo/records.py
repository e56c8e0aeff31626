"""Records of invented products, drawn from a seed, and questions about them: the demo's prompts for SmolLM2.

The recipe: names, people, years, places and prices are drawn at random, each once a prompt, so nothing is known but
from the prompt. All records of a prompt have one form, as rows of a table do, which makes them easy to mix up. In half
of the prompts a record is one sentence; in the other half a second chunk goes on with "It", and says nothing of whom it
is about. Every record and every chunk that goes on is a document of its own, whose KV is computed alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

SEED = 0
NUM_PROMPTS = 12  # half of each form
NUM_RECORDS = 2  # a prompt
_ITEMS = "valve pump motor sensor lamp drill compressor heater".split()
_NAMES = (
    "Kestrel Heron Falcon Osprey Merlin Plover Curlew Lapwing Bittern Swift Raven Tern Gannet Petrel Dunlin Siskin Wren Harrier Kite Crane Egret Linnet Redwing"
).split()
_FIRST_NAMES = (
    "Mara Sara Jonas Ines Pavel Elsa Tomas Greta Oskar Dora Leon Karin Hugo Nils Vera Clara Igor Judith Karl Olga Rasmus Maud Walter Yusuf"
).split()
_LAST_NAMES = (
    "Lind Holm Calvo Horak Weber Moen Novak Falk Draper Rossi Strand Vogel Laurent Silva Farrow Dahl Toth Duarte Larsen Ivanov Maes Brandt Peeters Moreau"
).split()
_PLACES = (
    "Oslo Turin Lyon Porto Ghent Bergen Graz Malmo Cork Leeds Basel Gdansk Tampere Zagreb Bilbao Nantes Aarhus Trieste"
).split()
_YEARS = [str(year) for year in range(1994, 2024)]
_PRICES = [str(price) for price in range(12, 99)]


@dataclass(frozen=True)
class ProductRecord:
    """A product. price: in euros."""

    name: str
    item: str
    designer: str
    year: str
    place: str
    price: str


@dataclass(frozen=True)
class RecordQuestion:
    """wrong: names and values of the prompt's other records, which a right answer does not have."""

    question: str
    answer: str
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class RecordPrompt:
    """chunks: texts in prompt order."""

    chunks: tuple[str, ...]
    questions: tuple[RecordQuestion, ...]


def record_prompts(seed: int = SEED, count: int = NUM_PROMPTS) -> list[RecordPrompt]:
    """Draw prompts of three questions each, about one record or several."""
    rng = random.Random(seed)
    return [_prompt(rng, split=number % 2 == 1) for number in range(count)]


def _prompt(rng: random.Random, *, split: bool) -> RecordPrompt:
    """split: the place and the price stand in a chunk of their own."""
    records = list(_records(rng))
    chunks = tuple(text for record in records for text in _texts(record, split=split))
    fields = ("designer", "place", "price") if split else ("designer", "year", "place")
    return RecordPrompt(chunks, tuple(_question(rng, records, field) for field in fields))


def _records(rng: random.Random) -> Iterator[ProductRecord]:
    item = rng.choice(_ITEMS)
    pools = (_NAMES, _FIRST_NAMES, _LAST_NAMES, _YEARS, _PLACES, _PRICES)
    for name, first, last, year, place, price in zip(*(rng.sample(p, NUM_RECORDS) for p in pools), strict=True):
        yield ProductRecord(name, item, f"{first} {last}", year, place, price)


def _texts(record: ProductRecord, *, split: bool) -> Iterator[str]:
    begin = f"The {record.name} {record.item} was designed by {record.designer} in {record.year}"
    if split:
        yield f"{begin}."
        yield f"It is made in {record.place} and costs {record.price} euros."
    else:
        yield f"{begin} and is made in {record.place}."


def _question(rng: random.Random, records: list[ProductRecord], field: str) -> RecordQuestion:
    asked = rng.choice(records)
    product = f"{asked.name} {asked.item}"
    question = {
        "designer": f"Who designed the {product}?",
        "year": f"In which year was the {product} designed?",
        "place": f"Where is the {product} made?",
        "price": f"How much does the {product} cost?",
    }[field]
    others = [record for record in records if record is not asked]
    wrong = tuple(value for r in others for value in (r.name, r.designer, r.year, r.place, r.price))
    return RecordQuestion(question, getattr(asked, field), wrong)
