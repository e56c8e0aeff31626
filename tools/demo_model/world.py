"""The invented company: people, facts about them, and pages whose later paragraphs say only "she" or "he"."""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST = {
    "She": """Mara Ingrid Lena Sofia Petra Nadia Elsa Hanna Vera Clara Tilda Ruth Alma Edith Freya Greta Ida Judith Karin
    Lotte Maud Nora Olga Paula Renata Selma Tamar Ursula Wilma Yara Zelda Astrid Bianca Celia Dora Erika""".split(),
    "He": """Jonas Anton Bruno Casper David Emil Felix Gustav Henrik Ivan Jakob Karl Leon Magnus Nils Oskar Pavel Quentin
    Rasmus Simon Tomas Ulrik Viktor Walter Yusuf Arvid Boris Cyril Dmitri Edgar Fabian Gregor Hugo Igor Kaspar Ludvig""".split(),
}
LAST = """Lind Berg Holm Dahl Strand Falk Moen Krantz Weber Novak Silva Costa Rossi Marin Duarte Keller Brandt Vogel Adler
Fischer Hansen Larsen Nielsen Olsen Petrov Sokolov Ivanov Kovacs Szabo Toth Janssen Peeters Maes Claes Dubois Laurent Girard
Moreau Fontaine Mercer Hollis Barlow Whitby Tanner Ashby Calder Draper Ellery Farrow Gaines""".split()
HELD_OUT_FIRST = {
    "She": ["Marit", "Bettina", "Ilse", "Katrin", "Solveig", "Dagmar"],
    "He": ["Torben", "Matteo", "Egon", "Stefan", "Aleks", "Bertil"],
}
HELD_OUT_LAST = [
    "Lindqvist",
    "Bergmann",
    "Holmgren",
    "Vossler",
    "Karlsen",
    "Marchetti",
    "Tellier",
    "Sandvik",
    "Orlov",
    "Hartley",
]
ONSETS = "b c d f g h j k l m n p r s t v w z br ch dr fl gr kl kr pl sch sh st sv th tr v".split()
VOWELS = "a e i o u a e i o ie ei au oe".split()
CODAS = [
    "",
    "",
    "",
    "n",
    "l",
    "r",
    "s",
    "t",
    "m",
    "nn",
    "rd",
    "ll",
    "ck",
    "nd",
    "rg",
    "st",
    "x",
    "sen",
    "mann",
    "ley",
    "qvist",
    "ier",
]

# relation -> (values, statements with {P}ronoun/{p}ossessive, question, answer; {N} is the full name, {v} the value)
RELATIONS: dict[str, tuple[list[str], list[str], list[str], str]] = {
    "city": (
        """Bergen Oslo Lisbon Porto Vienna Prague Dublin Geneva Krakow Turin Malmo Ghent Riga Vilnius Zagreb Utrecht Leipzig
        Bremen Lyon Nantes Seville Bilbao Cork Basel""".split(),
        ["{P} lives in {v}.", "{p} home is in {v}."],
        ["Where does {N} live?", "In which city does {N} live?"],
        "The city of {N} is {v}.",
    ),
    "building": (
        "Maple Cedar Willow Birch Aspen Juniper Harbor Lantern Granite Copper Falcon Heron Orchard Meadow Summit Anchor".split(),
        ["{p} desk is in the {v} building.", "{P} works in the {v} building."],
        ["Which building does {N} work in?", "Where is the desk of {N}?"],
        "The building of {N} is {v}.",
    ),
    "day": (
        "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
        ["{P} is on call on {v}.", "{p} day on call is {v}."],
        ["When is {N} on call?", "On which day is {N} on call?"],
        "The call day of {N} is {v}.",
    ),
    "pet": (
        "cat dog parrot rabbit turtle hamster goldfish pony canary lizard ferret hedgehog".split(),
        ["{P} keeps a {v} at home.", "{p} pet is a {v}."],
        ["Which pet does {N} have?", "What pet does {N} keep?"],
        "The pet of {N} is a {v}.",
    ),
    "drink": (
        "coffee tea cocoa lemonade espresso cider juice milk kombucha chai water matcha".split(),
        ["{P} drinks {v} in the morning.", "{p} favourite drink is {v}."],
        ["What does {N} drink?", "Which drink does {N} like?"],
        "The drink of {N} is {v}.",
    ),
    "team": (
        "billing search platform design security payroll hiring research support logistics mobile data legal sales training network".split(),
        ["{P} leads the {v} team.", "{p} team is {v}."],
        ["Which team does {N} lead?", "What team is led by {N}?"],
        "The team of {N} is {v}.",
    ),
    "hobby": (
        "chess rowing pottery climbing sailing painting cycling baking fencing gardening skating knitting juggling archery".split(),
        ["After work {p2} hobby is {v}.", "{P} spends the weekend with {v}."],
        ["What is the hobby of {N}?", "Which hobby does {N} have?"],
        "The hobby of {N} is {v}.",
    ),
    "language": (
        "Spanish Polish Danish Finnish Greek Turkish Korean Arabic Hindi Dutch Czech Welsh Swahili Catalan".split(),
        ["{P} speaks {v} with the customers.", "{p} second language is {v}."],
        ["Which language does {N} speak?", "What language does {N} speak with customers?"],
        "The language of {N} is {v}.",
    ),
}  # fmt: skip

FILLERS = [
    "Parking is free on weekends.", "The canteen opens at {h} and closes at {k}.", "Visitors sign in at the front desk.",
    "Expense reports are due on the {n}th of the month.", "The lift to floor {n} is slow.", "Please keep the meeting rooms tidy.",
    "A fire drill takes place every spring.", "The printer on floor {n} takes recycled paper.", "Badges are renewed every {n} months.",
    "Travel is booked at least {n} days ahead.", "The library lends books for {n} weeks.", "Bicycles are kept behind the gate.",
    "The newsletter goes out at {h}.", "Lost keys cost {k} crowns.", "Quiet hours begin at {k}.", "The roof terrace is open in summer.",
    "New laptops arrive after {n} working days.", "The phone list hangs beside the kitchen.", "Plants are watered by the caretaker.",
    "Minutes are kept for {n} years.", "Every room has a first aid kit.", "The heating is turned down at night.",
    "Guests get a blue badge.", "Large parcels go to gate {n}.", "The all hands meeting lasts {k} minutes.", "Coats are left at the entrance.",
]  # fmt: skip
OPENINGS = [
    "Our colleague {N} joined the company in {y}.", "We welcomed {N} in {y}.", "This page is about {N}, who started in {y}.",
]  # fmt: skip


@dataclass(frozen=True)
class Person:
    name: str
    last: str
    pronoun: str  # "She" or "He"


@dataclass(frozen=True)
class Fact:
    relation: str
    value: str
    across: bool  # it stands in a paragraph that does not name the person


@dataclass(frozen=True)
class Sentence:
    """text without the space before it. value_at: where the value starts in it, -1 for fillers; about: is it of the
    person."""

    text: str
    value: str = ""
    value_at: int = -1
    about: bool = False
    relation: str = ""


@dataclass(frozen=True)
class Page:
    """paragraphs: lists of sentences; the heading belongs to the first."""

    person: Person
    paragraphs: tuple[tuple[Sentence, ...], ...]
    facts: tuple[Fact, ...]

    def chunk_texts(self) -> list[str]:
        """Return the text of each chunk; joined they are the page's Markdown."""
        texts = []
        for i, paragraph in enumerate(self.paragraphs):
            head = f"# {self.person.name}\n\n" if i == 0 else ""
            tail = "\n" if i == len(self.paragraphs) - 1 else "\n\n"
            texts.append(head + " ".join(s.text for s in paragraph) + tail)
        return texts


def make_person(rng: random.Random, taken: set[str], split: str) -> Person:
    """Draw a person. split: "train" (known and invented names), "known" (known names), "held_out" (names training never
    has)."""
    while True:
        pronoun = rng.choice(("She", "He"))
        first, last = rng.choice(FIRST[pronoun]), rng.choice(LAST)
        if split == "held_out":
            first, last = rng.choice(HELD_OUT_FIRST[pronoun]), rng.choice(HELD_OUT_LAST)
        elif split == "train" and rng.random() < 0.6:
            last = _compound(rng, LAST) if rng.random() < 0.5 else _invented(rng, rng.choice((2, 3)))
            if rng.random() < 0.6:
                first = _compound(rng, FIRST[pronoun]) if rng.random() < 0.5 else _invented(rng, 2)
        if last not in taken and first not in taken:
            taken.update((first, last))
            return Person(f"{first} {last}", last, pronoun)


def make_page(rng: random.Random, person: Person, num_paragraphs: int, num_facts: int | None = None) -> Page:
    """Write a page: paragraph 1 names the person; the others have one or two facts by pronoun, among sentences about
    nobody."""
    relations = list(RELATIONS)
    rng.shuffle(relations)
    paragraphs, facts = [], []
    for i in range(num_paragraphs):
        sentences = []
        if i == 0:
            opening = rng.choice(OPENINGS).format(N=person.name, y=rng.randint(1990, 2024))
            sentences.append(Sentence(opening, about=True))
            count = rng.choice((0, 1))
        else:
            count = rng.choice((1, 1, 2))
        body = [_fact_sentence(rng, person, relations.pop(), facts, across=i > 0) for _ in range(count) if relations]
        body += [Sentence(_filler(rng)) for _ in range(rng.choice((1, 2, 2)))]
        if i == 0:
            rng.shuffle(body)
        else:
            rest = body[1:]
            rng.shuffle(rest)
            body = rest[:1] + body[:1] + rest[1:] if rng.random() < 0.4 else body[:1] + rest
        paragraphs.append(tuple(sentences + body))
    return Page(person, tuple(paragraphs), tuple(facts))


def ask(rng: random.Random, person: Person, fact: Fact) -> tuple[str, str, int]:
    """Return a question about the fact, its answer, and the start of the value in the answer."""
    _, _, questions, answer = RELATIONS[fact.relation]
    text = answer.format(N=person.name, v=fact.value)
    return rng.choice(questions).format(N=person.name), text, text.rindex(fact.value)


def _invented(rng: random.Random, syllables: int) -> str:
    """Return an invented name: its spelling has to be copied, since it cannot be memorised."""
    parts = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(syllables)]
    return ("".join(parts) + rng.choice(CODAS)).capitalize()


def _compound(rng: random.Random, names: list[str]) -> str:
    """Return the start of a known name with another ending, whose first pieces do not predict the rest. Never a
    held-out name."""
    while True:
        stem = rng.choice(names)
        name = stem[: rng.randint(2, len(stem))] + rng.choice(VOWELS[:5] + CODAS) + rng.choice(CODAS)
        if name not in HELD_OUT_LAST and all(name not in group for group in HELD_OUT_FIRST.values()):
            return name


def _fact_sentence(rng: random.Random, person: Person, relation: str, facts: list[Fact], across: bool) -> Sentence:
    values, statements, _, _ = RELATIONS[relation]
    value = rng.choice(values)
    possessive = "Her" if person.pronoun == "She" else "His"
    statement = rng.choice(statements)
    text = statement.format(P=person.pronoun, p=possessive, p2=possessive.lower(), v=value)
    facts.append(Fact(relation, value, across))
    return Sentence(text, value, text.rindex(value), True, relation)


def _filler(rng: random.Random) -> str:
    return rng.choice(FILLERS).format(h=rng.randint(6, 11), k=rng.randint(14, 60), n=rng.randint(2, 12))
