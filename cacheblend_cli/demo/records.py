"""Pages about invented products, drawn from a seed, and questions about them: the demo's prompts for SmolLM2.

The recipe: names, people, years, places, prices, weights and colours are drawn at random, each once per prompt, so only
the prompt has the answer. A page is a document and a chunk of some 200 tokens, whose KV is computed alone. All pages of
a prompt have the same form, like product sheets, which makes them easy to confuse. A fact is written the way a small
model answers it, "The price of the Heron pump is 45 euros.", among unrelated sentences.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

SEED = 0
NUM_PROMPTS = 6
NUM_RECORDS = 4  # pages of a prompt
NUM_QUESTIONS = 3  # questions of a prompt
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
_WEIGHTS = [str(weight) for weight in range(2, 30)]
_COLOURS = "red blue green grey white black orange yellow".split()
_FACTS = {
    "designer": ("The designer of the {product} is {value}.", "Who is the designer of the {product}?"),
    "price": ("The price of the {product} is {value} euros.", "What is the price of the {product}?"),
    "place": ("The {product} is made in {value}.", "Where is the {product} made?"),
    "year": ("The {product} was designed in {value}.", "In which year was the {product} designed?"),
    "weight": ("The weight of the {product} is {value} kilograms.", "What is the weight of the {product}?"),
    "colour": ("The colour of the {product} is {value}.", "What is the colour of the {product}?"),
}
"""Field -> sentence and question."""
_OTHERS = (
    "It took two years to develop, and the first version was tested for six months in a workshop near the coast.",
    "The test team wrote a long report about noise and wear, and most of its advice was followed in the second version.",
    "The parts come from four suppliers, and a part that is replaced is written into the service book.",
    "Orders of ten or more get a discount, which the sales team agrees on with the customer.",
    "A repair is done by the regional workshops and takes five working days on average.",
    "Spare parts are kept for ten years, and the manual can be downloaded in eleven languages.",
    "Customers said in a survey that they would like a shorter cable and a quieter fan.",
    "The box is made of recycled paper and holds the tool that is needed for mounting.",
)
_PARAGRAPH = 2  # facts


@dataclass(frozen=True)
class RecordQuestion:
    """wrong: names and values of the prompt's other pages; a right answer contains none of them."""

    question: str
    answer: str
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class RecordPrompt:
    """pages: texts. questions: each with the order of the pages in its prompt."""

    pages: tuple[str, ...]
    questions: tuple[tuple[RecordQuestion, tuple[int, ...]], ...]


@dataclass(frozen=True)
class _Product:
    name: str
    full_name: str  # with the kind of product
    values: dict[str, str]  # by field


def record_prompts(seed: int = SEED) -> list[RecordPrompt]:
    """Draw prompts, with questions about one of their pages each."""
    rng = random.Random(seed)
    return [_prompt(rng) for _ in range(NUM_PROMPTS)]


def _prompt(rng: random.Random) -> RecordPrompt:
    products = list(_products(rng))
    pages = tuple(_page(rng, product) for product in products)
    orders = [tuple(rng.sample(range(len(pages)), len(pages))) for _ in range(NUM_QUESTIONS)]
    asked = [_question(rng, products, field) for field in rng.sample(list(_FACTS), NUM_QUESTIONS)]
    return RecordPrompt(pages, tuple(zip(asked, orders, strict=True)))


def _products(rng: random.Random) -> Iterator[_Product]:
    item = rng.choice(_ITEMS)
    pools = (_NAMES, _FIRST_NAMES, _LAST_NAMES, _PRICES, _PLACES, _YEARS, _WEIGHTS, _COLOURS)
    for name, first, last, *rest in zip(*(rng.sample(p, NUM_RECORDS) for p in pools), strict=True):
        yield _Product(name, f"{name} {item}", dict(zip(_FACTS, (f"{first} {last}", *rest), strict=True)))


def _page(rng: random.Random, product: _Product) -> str:
    """Return a page: its facts in random order, each before an unrelated sentence, in paragraphs."""
    fields = rng.sample(list(_FACTS), len(_FACTS))
    sentences = [
        f"{_FACTS[field][0].format(product=product.full_name, value=product.values[field])} {other}"
        for field, other in zip(fields, rng.sample(_OTHERS, len(fields)), strict=True)
    ]
    paragraphs = [" ".join(sentences[i : i + _PARAGRAPH]) for i in range(0, len(sentences), _PARAGRAPH)]
    return "\n\n".join([f"# {product.full_name}", *paragraphs]) + "\n"


def _question(rng: random.Random, products: list[_Product], field: str) -> RecordQuestion:
    asked = rng.choice(products)
    wrong = tuple(text for p in products if p is not asked for text in (p.name, p.values[field]))
    return RecordQuestion(_FACTS[field][1].format(product=asked.full_name), asked.values[field], wrong)
