"""The check of claims: what of an answer is looked up, and what counts as found."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest

from cacheblend_cli.claims import check
from cacheblend_cli.claims.passages import Passages, Place

TEXTS = [
    "The fee is 45 euros per month. Mara Lindt leads billing since 3 March 2024; call +47 55 12 34 56 or write to "
    "mara.lindt@example.org. The office is open from 9:00 to 17:30.",
    "Invoice INV-2024-0031 over $1,234.50 was paid on 2024-11-27. The temper-\nature was -5 °C at noon. About "
    "forty-five people came to Bergen by train.",
]


def looked_up(answer: str, *texts: str) -> dict[str, bool]:
    """Return claim -> whether it was found."""
    return {claim.text: claim.place is not None for claim in check(answer, texts or TEXTS)}


def missing(answer: str, *texts: str) -> list[str]:
    return [text for text, found in looked_up(answer, *texts).items() if not found]


@pytest.mark.parametrize(
    "answer",
    [
        "The fee is 45 euros.",
        "The fee is €45 a month.",
        "It costs 45.00 EUR.",
        "Mara Lindt leads billing.",
        "It is led by Lindt, Mara since March 3, 2024.",
        "She has led it since 03.03.2024, so since March 2024.",
        "Write to mara.lindt@example.org.",
        "It opens at 9 am and closes at 5:30 pm.",
        "It closes at 17.30 Uhr.",
        "The invoice INV-2024-0031 was $1234.5, paid on 27 November 2024.",
        "Am 27. November 2024 wurden 1.234,50 $ bezahlt.",
        "Le 27 novembre 2024, 1 234,50 $.",
        "2024年11月27日, 1234.50美元",
        "At noon it was \N{MINUS SIGN}5 °C.",
        "45 people came to Bergen.",
        '"The temperature was" low.',
        "The trains to Bergen; **Bergen's** people.",
        "1. Bergen\n2. nothing else\n3) two ways",
        "That is what I've found, and I\u2019m sure.",
    ],
)
def test_what_the_texts_say_is_found(answer: str) -> None:
    assert missing(answer) == []


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The fee is 54 euros.", "54 euros"),
        ("The invoice was over 1234.50 euros.", "1234.50 euros"),
        ("The fee is 45 million euros.", "45 million euros"),
        ("The fee is 5 euros.", "5 euros"),
        ("It was 5 °C at noon.", "5 °C"),
        ("Mara Lind leads billing.", "Mara Lind"),
        ("Maria Lindt leads billing.", "Maria Lindt"),
        ("The team is led by Anna Lindt.", "Anna Lindt"),
        ("They came to Bergan.", "Bergan"),
        ("Bergan is far.", "Bergan"),  # the first word of a sentence, one letter from a name
        ("Since 3 May 2024 she leads it.", "3 May 2024"),
        ("Since 4 March 2024 she leads it.", "4 March 2024"),
        ("Since March 2023 she leads it.", "March 2023"),
        ("It closes at 5:30 am.", "5:30 am"),
        ("It closes at 17:31.", "17:31"),
        ("The invoice is INV-2024-0032.", "INV-2024-0032"),
        ("Write to mara.lind@example.org.", "mara.lind@example.org"),
        ("See https://example.org/fees.", "https://example.org/fees"),
        ('"The fee was waived" in May.', "The fee was waived"),
        ("About sixty-five people came.", "sixty-five"),
        ("Es kostet 1.243,50 $.", "1.243,50 $"),
        ("2024年11月28日", "2024年11月28日"),
        ("At noon it was -5 percent.", "-5 percent"),
    ],
)
def test_what_they_do_not_say_is_not(answer: str, expected: str) -> None:
    assert expected in missing(answer)


def test_a_figure_inside_another_is_not_found() -> None:
    text = "Room 312 has 1,045 books, 3.5 m of shelves, v2.45, 45-50 chairs and code A45B."
    assert missing("It has 45 books.", "Room 1,045 and 3.45 and 451.") == ["45"]
    assert missing("It has 12 books and 35 shelves.", text) == ["12", "35"]
    assert missing("45 chairs, 50 chairs.", text) == []


def test_german_nouns_are_no_names() -> None:
    text = "Die Kantine im Hafengebäude öffnet um 11:30 Uhr. Geleitet wird sie von Frau Petra Öztürk."
    answer = "Die Öffnungszeit der Kantine im Gebäude am Hafen ist 11.30 Uhr, die Leitung hat Petra Öztürk."
    assert missing(answer, text) == []
    assert missing(answer.replace("Petra", "Peter").replace("11.30", "11.40"), text) == ["11.40 Uhr", "Peter Öztürk"]


def test_names_of_several_words_and_titles() -> None:
    text = "Dr. Ines Calvo of the University of Bergen met Jean-Luc de la Tour and O'Brien in New York."
    assert (
        missing("Ines Calvo, Jean-Luc de la Tour and O'Brien met in New York at the University of Bergen.", text) == []
    )
    assert missing("Ines Calva met O'Brian at the University of Oslo.", text) == [
        "Ines Calva", "O'Brian", "University of Oslo",
    ]  # fmt: skip


def test_headings_and_labels_of_an_answer_are_no_names() -> None:
    assert missing("# Summary Of Fees\n**Monthly Fee:** 45 euros\n\n**Final Answer**\n- Monthly Costs: 45 euros") == []


def test_places() -> None:
    found = {claim.text: (claim.kind, claim.place) for claim in check('To Bergen, 5:30 pm: "temperature was".', TEXTS)}
    places = {
        text: (kind, place.passage, TEXTS[place.passage][place.start : place.end])
        for text, (kind, place) in found.items()
        if place is not None
    }
    assert places["5:30 pm"] == ("time", 0, "17:30")
    assert places["Bergen"] == ("name", 1, "Bergen")
    assert found["temperature was"] == ("quote", Place(1, -1, -1))  # divided at the end of a line


def test_of_several_texts_the_one_with_most_claims_is_named() -> None:
    texts = ["Closed on Friday.", "Anna Berg is on call on Friday.", "Anna Berg is on call on Monday."]
    claims = check("The call day of Anna Berg is Friday.", texts)
    assert [(c.text, c.place and c.place.passage) for c in claims] == [("Anna Berg", 1), ("Friday", 1)]


def test_claims_keep_their_place_in_the_answer() -> None:
    answer = "😀 Der Preis: 54 Euro, „ganz neu“, für İnes Calvo."
    for claim in check(answer, TEXTS):
        assert answer[claim.start : claim.end] == claim.text


@pytest.mark.parametrize(
    "piece",
    [
        "1",
        "1,",
        "A b ",
        "Ab ",
        "\u202e1.2 ",
        "-1",
        '"a',
        "1 000",
        "x-",
        "twenty-",
        "http://",
        "a@",
        "1..",
        "jan 1",
        "A.B",
        "a\n-",
        "\0",
    ],
)
def test_hostile_text(piece: str) -> None:
    answer, text = piece * (100_000 // len(piece)), piece * (300_000 // len(piece))
    claims = check(answer, [text, "x"])
    assert all(before.end <= after.start for before, after in pairwise(claims))
    assert all(answer[claim.start : claim.end] == claim.text for claim in claims)


PIECES = [
    *"- . , : / ' \" ` # @ $ € £ ² ½ ① ٣ K İ ß \u02bc « » “ ” 「 」 人 0 00 -5 54 1e5 99:99 17:60:15 25:30:10 9:00 11h30".split(),
    *"http:// www. :// a@b.c A1 _a a_b INV-1 v2.13 12th 1.2.3 1,234.5 99.99.2024 2024-13-45 2024年 13月 21天 45% million".split(),
    *"Mara Lindt S's O'Brien of de I'm forty five hundred and one- zero may 2024 3 March und ist der k m 万".split(),
    "\n", "-\n", " ", "9 am", "5:30 p.m.", "25 h 70", "March 3, 2024", "Dr. ", "30 uhr", "11.30 bis 14 uhr", "per cent", "\0", "\ud800",
]  # fmt: skip


def test_no_text_makes_it_fail() -> None:
    rng = random.Random(0)

    def text(most: int) -> str:
        return "".join(rng.choice(PIECES) + rng.choice(("", " ")) for _ in range(rng.randrange(1, most)))

    for _ in range(1500):
        answer, texts = text(14), [text(20) for _ in range(rng.randrange(4))]
        claims = check(answer, texts)
        assert all(before.end <= after.start for before, after in pairwise(claims)), answer
        assert all(claim.place is None or claim.place.passage < len(texts) for claim in claims), answer


@pytest.mark.parametrize("piece", ["http://", "www.//", "https://www."])
def test_an_address_of_nothing_is_in_no_text(piece: str) -> None:
    assert [c.place for c in check(f"See {piece}/ for it.", ["See www. for it, www., http:// and https://."])] in (
        [],
        [None],
    )


CARRIED_OVER = [  # source, answer: the same in another form
    ("The dose is 5 mg a day.", "It is 5 milligrams a day."),
    ("The dose is 5mg a day.", "It is 5 mg."),
    ("The dose is 5 mg/kg.", "Take 5 mg."),
    ("It goes 80 km per hour.", "It goes 80 km/h."),
    ("It goes 50 mph.", "It goes 50 miles per hour."),
    ("It uses 4.5 kilowatt hours.", "It uses 4.5 kWh."),
    ("The wall is 8 feet high.", "It is 8 ft high."),
    ("It costs ₹500.", "It costs 500 rupees."),
    ("They bought 5 red apples.", "They bought 5 apples."),
    ("They bought 5 apples.", "They bought 5 red apples."),
    ("Three people came in 2023 to the fair.", "3 visitors came in 2023."),
    ("They have 3 TV sets.", "They have 3 sets, 3 TVs and 3 televisions."),
    ("It loads 3 lbs at 20 Mbps.", "It loads 3 pounds at 20 mbps."),
    ("It needs client v5.2.10.", "Version 5.2.10 is needed."),
    ("It needs version 5.2.10 at least.", "The client is v5.2.10."),
    ("Store it at minus 20 °C.", "Store it at -20 °C."),
    ("Store it at \N{MINUS SIGN}20 °C.", "Store it at minus 20 °C."),
    ("The result was minus 3 percent.", "It was -3 %, a change by 3 %."),
    ("The fee is 30 euros.", "It is the price minus 30 euros."),
    ("It opens at 9:00 and closes at 17:30.", "It opens at 9 am and closes at 5:30 pm or 5:30."),
    ("It is open from 2:00 to 4:30 pm.", "It opens at 2 pm."),
    ("We meet at 8:00 in the evening.", "We meet at 8 pm."),
    ("下午5点开会。", "17:00"),
]
ALTERED = [  # source, answer, what is in no source
    ("The dose is 5 g a day.", "The dose is 5 mg a day.", "5 mg"),
    ("The dose is 5 g a day.", "The dose is 5 milligrams a day.", "5 milligrams"),
    ("The dose is 5 mg/kg.", "The dose is 5 mg/l.", "5 mg/l"),
    ("It runs at 230 V.", "It runs at 230 kV.", "230 kV"),
    ("It runs at 230 kV.", "It runs at 230kHz.", "230kHz"),
    ("It opens at 8 bar.", "It opens at 8 psi.", "8 psi"),
    ("The motor has 1.4 kW.", "The motor has 1.4 MW.", "1.4 MW"),
    ("Add 20 ml.", "Add twenty dl.", "twenty dl"),
    ("It weighs 7 oz.", "It weighs 7 kg.", "7 kg"),
    ("5 кг", "5 мг", "5 мг"),
    ("It goes 80 km/h.", "It goes 80 m/s.", "80 m/s"),
    ("It opens at 11:00.", "It opens at 11 pm.", "11 pm"),
    ("It opens at 5:30.", "It opens at 17:30.", "17:30"),
    ("It needs v5.2.10.", "Version 5.2.1 is needed.", "5.2.1"),
    ("It costs 2.5 euros.", "It is v2.5.", "v2.5"),
    ("Store it at 20 °C.", "Store it at minus 20 °C.", "minus 20 °C"),
    ("Store it at minus 20 °C.", "Store it at 20 °C.", "20 °C"),
]


@pytest.mark.parametrize(("source", "answer"), CARRIED_OVER)
def test_another_form_is_found(source: str, answer: str) -> None:
    assert missing(answer, source) == []


@pytest.mark.parametrize(("source", "answer", "expected"), ALTERED)
def test_another_unit_sign_or_half_of_the_day_is_not_found(source: str, answer: str, expected: str) -> None:
    assert missing(answer, source) == [expected]


def test_the_question_is_named_only_for_what_no_text_has() -> None:
    passages = Passages(["Jonas Berg keeps a parrot."], ["Does Jonas Berg of Bergen keep 3 parrots?"])
    claims = check("Jonas Berg keeps 3 parrots in Bergen, not 4.", passages)
    assert [(c.text, c.place and c.place.passage) for c in claims] == [
        ("Jonas Berg", 0), ("3", 1), ("Bergen", 1), ("4", None),
    ]  # fmt: skip


# the work for a request is bounded

HOSTILE = {  # answer, text
    "one figure": ("1 s " * 600, "1 ft " * 400),
    "figures": (" ".join(f"{n}," for n in range(10_001, 10_600)), "1 x " * 2000),
    "inside figures": (" ".join("1" * n for n in range(1, 200)), "1" * 2000 + "1," * 4000),
    "names with a gap": (" x ".join(f"A{n:c}b Lund" for n in range(97, 123)) * 9, "aab b " * 4000),
    "misspelled": (". ".join(f"Lin{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(600)), "the Bergen " * 2000),
    "capitals": ("Lindt. " * 600, " ".join(f"the Lind{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(600))),
    "quotations": (" ".join(f'"a b {n}"' for n in range(600)), "a b " * 4000),
    "texts with all": (" ".join(f"{n}," for n in range(300)), " ".join(f"{n}," for n in range(1000))),
    "a heading": ("**" + "Ab Cd x " * 600, "x"),
}  # fmt: skip


def lines_of(work: Callable[[], object]) -> int:
    """Return how many lines of Python a call runs."""
    count, before = 0, sys.gettrace()

    def trace(frame: object, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", HOSTILE)
def test_the_work_is_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, text = HOSTILE[name]
    monkeypatch.setattr("cacheblend_cli.claims.passages.MAX_STEPS", 2000)
    passages = Passages([text] * 3)
    assert lines_of(lambda: [check(answer, passages) for _ in range(4)]) < 4 * 30 * len(answer) + 30 * 2000


def test_each_claim_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spent, spend = list[int](), Passages.spend
    monkeypatch.setattr(Passages, "spend", lambda self, steps=1: (spent.append(steps), spend(self, steps))[1])

    def work(answer: str, times: int = 1) -> int:
        passages = Passages(["1 ft, room 4, Mara Lind. " * 400])
        spent.clear()
        for _ in range(times):
            check(answer, passages)
        return sum(spent)

    answer = 'It is 1 s, "room 5", 1 day and x Maria Lind. '
    assert work(answer * 50, 16) < work(answer) + 100


@pytest.mark.parametrize(
    ("piece", "steps"), [("Code{}. ", 300), ("{} km, ", 3300), ('"word {}" ', 2000), ("x Lind{}a Lund ", 2000)]
)
def test_what_exceeds_the_bound_is_not_reported_but_counted(
    piece: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_cli.claims.passages.MAX_STEPS", steps)
    letters = ["".join(pair) for pair in product("abcdefghijklmnop", repeat=2)]
    pieces = [piece.format(letters[n] if "Lund" in piece else 10_000 + n) for n in range(200)]
    passages = Passages(["word 1 Lund " * 500])
    claims = check("".join(pieces), passages)
    assert 0 < len(claims) < 200
    assert len(claims) + passages.num_left_out == 200


def test_a_cancelled_look_up_ends() -> None:
    passages = Passages(["word " * 100], is_cancelled=lambda: True)
    assert check("Code1, Code2, Code3", passages) == []
    assert passages.num_left_out == 3
