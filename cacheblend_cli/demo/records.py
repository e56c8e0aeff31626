"""Pages about invented products, drawn from a seed, and questions about them: the demo's prompts for SmolLM2.

The recipe: names, people, years, places, prices, weights and colours are drawn at random, each once per prompt, so only
the prompt has the answer. A page is a document and a chunk of some 420 tokens, whose KV is computed alone; a prompt has
four of them. A fact is written the way a small model answers it, "The price of the Heron pump is 45
euros.", among unrelated sentences.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

SEED = 0
NUM_PROMPTS = 4
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
_ASKED = ("price", "place")  # which a small model mostly finds in a prompt of this length
_OTHERS = (
    "It took two years to develop, and the first version was tested for six months in a workshop near the coast.",
    "The test team wrote a long report about noise and wear, and most of its advice was followed in the second version.",
    "The parts come from four suppliers, and a part that is replaced is written into the service book.",
    "Orders of ten or more get a discount, which the sales team agrees on with the customer.",
    "A repair is done by the regional workshops and takes five working days on average.",
    "Spare parts are kept for ten years, and the manual can be downloaded in eleven languages.",
    "Customers said in a survey that they would like a shorter cable and a quieter fan.",
    "The box is made of recycled paper and holds the tool that is needed for mounting.",
    "The first series was sold out within a month, and a second one followed in the next spring.",
    "It is tested for eight hours before it leaves the factory, and the result is kept with its serial number.",
    "The handbook explains in twelve short chapters how it is mounted, cleaned and stored during the winter.",
    "Two universities have compared it with older models and published their measurements in a journal.",
    "A training of half a day is offered to new customers, in small groups and in their own workshop.",
    "The packaging was changed after complaints about damaged corners, and since then few were returned.",
    "An electrician has to connect it, because the housing must be grounded according to the local rules.",
    "The sales department keeps a list of workshops that lend one to customers for a week.",
    "Its surface is treated against salt water, so that it can be used in harbours and on ships.",
    "The maintenance plan asks for a look at the seals every six months and for new grease once a year.",
    "Several smaller parts are printed in plastic, which makes them lighter and easier to replace.",
    "The team that developed it received a prize from the regional chamber of commerce.",
)
_BESIDE = 3  # other sentences after a fact


@dataclass(frozen=True)
class DemoQuestion:
    """documents: names of the prompt's documents, in order. wrong: words that a right answer does not contain."""

    question: str
    answer: str
    documents: tuple[str, ...]
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Product:
    name: str
    full_name: str  # with the kind of product
    values: dict[str, str]  # by field


def record_pages(seed: int) -> tuple[dict[str, str], list[DemoQuestion]]:
    """Draw prompts. Return their pages by name, and questions about one page each."""
    rng, pages, questions = random.Random(seed), dict[str, str](), list[DemoQuestion]()
    for number in range(NUM_PROMPTS):
        products = list(_products(rng))
        names = [f"{number:02}-{index}.md" for index in range(NUM_RECORDS)]
        pages.update(zip(names, [_page(rng, product) for product in products], strict=True))
        for product in rng.sample(products, NUM_QUESTIONS):
            order = tuple(rng.sample(names, NUM_RECORDS))
            questions.append(_question(products, product, rng.choice(_ASKED), order))
    return pages, questions


def _products(rng: random.Random) -> Iterator[_Product]:
    pools = (_ITEMS, _NAMES, _FIRST_NAMES, _LAST_NAMES, _PRICES, _PLACES, _YEARS, _WEIGHTS, _COLOURS)
    for item, name, first, last, *rest in zip(*(rng.sample(p, NUM_RECORDS) for p in pools), strict=True):
        yield _Product(name, f"{name} {item}", dict(zip(_FACTS, (f"{first} {last}", *rest), strict=True)))


def _page(rng: random.Random, product: _Product) -> str:
    """Return a page: its facts in random order, each in a paragraph with unrelated sentences."""
    others = iter(rng.sample(_OTHERS, _BESIDE * len(_FACTS)))
    paragraphs = []
    for field in rng.sample(list(_FACTS), len(_FACTS)):
        fact = _FACTS[field][0].format(product=product.full_name, value=product.values[field])
        paragraphs.append(" ".join([fact, *islice(others, _BESIDE)]))
    return "\n\n".join([f"# {product.full_name}", *paragraphs]) + "\n"


def _question(products: list[_Product], asked: _Product, field: str, order: tuple[str, ...]) -> DemoQuestion:
    """order: names of the pages. wrong words are names and values of the other pages."""
    wrong = tuple(text for p in products if p is not asked for text in (p.name, p.values[field]))
    return DemoQuestion(_FACTS[field][1].format(product=asked.full_name), asked.values[field], order, wrong)
